"""The problem in the solver's form: merged parallel edges, one table per pair, and the options still allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from search.problem import Array, Problem

Mask = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Pairwise:
    """A function of an assignment: the sum of one vector per variable and one table per pair (a, b), a < b."""

    unaries: tuple[Array, ...]
    edges: Mapping[tuple[int, int], Array]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Count the options of each variable."""
        return tuple(map(len, self.unaries))

    def neighbors(self) -> tuple[tuple[int, ...], ...]:
        """List, for each variable, the variables it shares a table with."""
        neighbors: list[list[int]] = [[] for _ in self.unaries]
        for a, b in sorted(self.edges):
            neighbors[a].append(b)
            neighbors[b].append(a)
        return tuple(tuple(sorted(others)) for others in neighbors)

    def table(self, a: int, b: int) -> Array:
        """Return the table of a pair with ``a`` as its first axis."""
        return self.edges[a, b] if a < b else self.edges[b, a].T

    def restrict(self, keep: Sequence[Indices]) -> Pairwise:
        """Return the same function on fewer options."""
        unaries = tuple(unary[kept] for unary, kept in zip(self.unaries, keep, strict=True))
        edges = {(a, b): table[np.ix_(keep[a], keep[b])] for (a, b), table in self.edges.items()}
        return Pairwise(unaries, edges)


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """Costs and usage over the options that remain.

    ``usage[v]`` has the bytes that each option of variable v takes from the budget; ``usage`` is None without a
    budget. ``options[v]`` maps a remaining option of variable v to its index in the original problem (ascending).
    """

    costs: Pairwise
    usage: tuple[Array, ...] | None
    options: tuple[Indices, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Count the remaining options of each variable."""
        return self.costs.sizes

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """List all pairs that share a cost table."""
        return tuple(sorted(self.costs.edges))

    def keep(self, masks: Sequence[Mask]) -> Core:
        """Return the core with only the options whose mask is true."""
        if all(mask.all() for mask in masks):
            return self
        kept = [np.flatnonzero(mask) for mask in masks]
        usage = None if self.usage is None else tuple(values[new] for values, new in zip(self.usage, kept, strict=True))
        options = tuple(old[new] for old, new in zip(self.options, kept, strict=True))
        return Core(self.costs.restrict(kept), usage, options)

    def original(self, assignment: Iterable[int]) -> tuple[int, ...]:
        """Translate choices among the remaining options to option indices of the original problem."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.options, assignment, strict=True))

    def weighted(self, multiplier: float) -> Pairwise:
        """Return costs + multiplier * usage."""
        if multiplier == 0.0 or self.usage is None:
            return self.costs
        unaries = (total + multiplier * part for total, part in zip(self.costs.unaries, self.usage, strict=True))
        return Pairwise(tuple(unaries), self.costs.edges)

    def without_budget(self) -> Core:
        """Return the core that minimizes the cost alone."""
        return Core(self.costs, None, self.options)


def build_core(problem: Problem) -> Core:
    """Merge parallel edges, turn self loops into unary costs, fold tables that depend on one end only."""
    unaries = [variable.costs.copy() for variable in problem.variables]
    edges: dict[tuple[int, int], Array] = {}
    for edge in problem.edges:
        _add(unaries, edges, edge.a, edge.b, edge.costs)
    return Core(
        _fold(unaries, edges),
        tuple(variable.usage for variable in problem.variables),
        tuple(np.arange(variable.num_options, dtype=np.int64) for variable in problem.variables),
    )


def usage_only(core: Core) -> Core:
    """Return the core that minimizes the usage; forbidden options keep infinite cost."""
    assert core.usage is not None
    pairs = zip(core.costs.unaries, core.usage, strict=True)
    unaries = tuple(np.where(np.isinf(cost), np.inf, part) for cost, part in pairs)
    barred = {pair: np.isinf(table) for pair, table in core.costs.edges.items()}
    edges = {pair: np.where(bar, np.inf, 0.0) for pair, bar in barred.items() if bar.any()}
    return Core(Pairwise(unaries, edges), None, core.options)


def shifted(core: Core) -> tuple[Core, float]:
    """Subtract each variable's least usage; return the core and the sum subtracted from the budget.

    Without this, multiplier times limit can dwarf the costs, and digits of the costs are lost.
    """
    assert core.usage is not None
    removed = float(sum(values.min() for values in core.usage))
    return Core(core.costs, tuple(values - values.min() for values in core.usage), core.options), removed


def _add(unaries: list[Array], edges: dict[tuple[int, int], Array], a: int, b: int, table: Array) -> None:
    """Add one edge's table in place."""
    if a == b:
        unaries[a] += np.diagonal(table)
        return
    pair, oriented = ((a, b), table) if a < b else ((b, a), table.T)
    edges[pair] = edges[pair] + oriented if pair in edges else oriented.copy()


def _fold(unaries: list[Array], edges: dict[tuple[int, int], Array]) -> Pairwise:
    """Move tables whose rows (or columns) are all equal into the unary costs: fewer edges, smaller width."""
    kept: dict[tuple[int, int], Array] = {}
    for (a, b), table in edges.items():
        if (table == table[:1, :]).all():
            unaries[b] += table[0]
        elif (table == table[:, :1]).all():
            unaries[a] += table[:, 0]
        else:
            kept[a, b] = table
    return Pairwise(tuple(unaries), kept)
