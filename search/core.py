"""The problem the solver works on: parallel edges merged, one table per pair, options that are still allowed."""

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
        """Number of options per variable."""
        return tuple(map(len, self.unaries))

    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """For each variable, the variables it shares a table with."""
        found: list[list[int]] = [[] for _ in self.unaries]
        for a, b in sorted(self.edges):
            found[a].append(b)
            found[b].append(a)
        return tuple(tuple(sorted(others)) for others in found)

    def table(self, a: int, b: int) -> Array:
        """The table of a pair with ``a`` as its first axis."""
        return self.edges[a, b] if a < b else self.edges[b, a].T

    def restrict(self, keep: Sequence[Indices]) -> Pairwise:
        """The same function on fewer options."""
        unaries = tuple(unary[kept] for unary, kept in zip(self.unaries, keep, strict=True))
        edges = {(a, b): table[np.ix_(keep[a], keep[b])] for (a, b), table in self.edges.items()}
        return Pairwise(unaries, edges)


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """Costs and usage over the options that remain.

    ``usage[v]`` is what each of variable v's takes from the budget; None without one. ``options[v]`` maps a remaining
    option of variable v to its index in the original problem (ascending).
    """

    costs: Pairwise
    usage: tuple[Array, ...] | None
    options: tuple[Indices, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of remaining options per variable."""
        return self.costs.sizes

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All pairs that share a cost table."""
        return tuple(sorted(self.costs.edges))

    def keep(self, masks: Sequence[Mask]) -> Core:
        """The core with only the options whose mask is true."""
        if all(mask.all() for mask in masks):
            return self
        kept = [np.flatnonzero(mask) for mask in masks]
        usage = None if self.usage is None else tuple(own[new] for own, new in zip(self.usage, kept, strict=True))
        options = tuple(old[new] for old, new in zip(self.options, kept, strict=True))
        return Core(self.costs.restrict(kept), usage, options)

    def original(self, assignment: Iterable[int]) -> tuple[int, ...]:
        """Choices among the remaining options, as option indices of the original problem."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.options, assignment, strict=True))

    def weighted(self, multiplier: float) -> Pairwise:
        """costs + multiplier * usage."""
        if multiplier == 0.0 or self.usage is None:
            return self.costs
        unaries = (total + multiplier * part for total, part in zip(self.costs.unaries, self.usage, strict=True))
        return Pairwise(tuple(unaries), self.costs.edges)

    def without_budget(self) -> Core:
        """The core that minimises the cost alone."""
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
    """The core that minimises the usage, infinite where the cost is."""
    assert core.usage is not None
    pairs = zip(core.costs.unaries, core.usage, strict=True)
    unaries = tuple(np.where(np.isinf(cost), np.inf, part) for cost, part in pairs)
    barred = {pair: np.isinf(table) for pair, table in core.costs.edges.items()}
    edges = {pair: np.where(bar, np.inf, 0.0) for pair, bar in barred.items() if bar.any()}
    return Core(Pairwise(unaries, edges), None, core.options)


def shifted(core: Core) -> tuple[Core, float]:
    """The core with each variable's least usage subtracted, and what that takes from the budget.

    Without it, multiplier times limit may dwarf the costs and cost digits.
    """
    assert core.usage is not None
    removed = float(sum(own.min() for own in core.usage))
    return Core(core.costs, tuple(own - own.min() for own in core.usage), core.options), removed


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
