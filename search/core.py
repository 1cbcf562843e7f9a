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
    """Costs and usages over the options that remain.

    ``options[v]`` maps a remaining option of variable v to its index in the original problem (ascending).
    """

    costs: Pairwise
    usages: tuple[Pairwise, ...]
    options: tuple[Indices, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of remaining options per variable."""
        return self.costs.sizes

    def pairs(self) -> tuple[tuple[int, int], ...]:
        """All pairs that share a cost table or a usage table."""
        keys = set(self.costs.edges)
        for usage in self.usages:
            keys.update(usage.edges)
        return tuple(sorted(keys))

    def keep(self, masks: Sequence[Mask]) -> Core:
        """The core with only the options whose mask is true."""
        if all(mask.all() for mask in masks):
            return self
        kept = [np.flatnonzero(mask) for mask in masks]
        usages = tuple(usage.restrict(kept) for usage in self.usages)
        options = tuple(old[new] for old, new in zip(self.options, kept, strict=True))
        return Core(self.costs.restrict(kept), usages, options)

    def original(self, assignment: Iterable[int]) -> tuple[int, ...]:
        """Choices among the remaining options, as option indices of the original problem."""
        return tuple(int(kept[choice]) for kept, choice in zip(self.options, assignment, strict=True))

    def weighted(self, multipliers: Sequence[float]) -> Pairwise:
        """costs + sum_k multipliers[k] * usages[k]."""
        unaries = list(self.costs.unaries)
        edges = dict(self.costs.edges)
        for factor, usage in zip(multipliers, self.usages, strict=True):
            if factor == 0.0:
                continue
            unaries = [total + factor * part for total, part in zip(unaries, usage.unaries, strict=True)]
            for pair, table in usage.edges.items():
                edges[pair] = edges[pair] + factor * table if pair in edges else factor * table
        return Pairwise(tuple(unaries), edges)

    def usage_only(self, budget: int) -> Pairwise:
        """The usage of one budget, infinite where the cost is."""
        usage = self.usages[budget]
        unaries = [
            np.where(np.isinf(cost), np.inf, part) for cost, part in zip(self.costs.unaries, usage.unaries, strict=True)
        ]
        edges = dict(usage.edges)
        for pair, table in self.costs.edges.items():
            if np.isinf(table).any():
                edges[pair] = np.where(np.isinf(table), np.inf, edges.get(pair, 0.0))
        return Pairwise(tuple(unaries), edges)

    def shifted(self) -> tuple[Core, tuple[float, ...]]:
        """The core with each table's least usage subtracted, and what that takes from each budget.

        Without it, multiplier times limit may dwarf the costs and cost digits.
        """
        usages: list[Pairwise] = []
        removed: list[float] = []
        for usage in self.usages:
            unaries = tuple(unary - unary.min() for unary in usage.unaries)
            edges = {pair: table - table.min() for pair, table in usage.edges.items()}
            usages.append(Pairwise(unaries, edges))
            removed.append(float(sum(table.min() for table in (*usage.unaries, *usage.edges.values()))))
        return Core(self.costs, tuple(usages), self.options), tuple(removed)

    def alone(self, function: Pairwise) -> Core:
        """The core that minimises ``function`` instead of the cost, without budgets."""
        return Core(function, (), self.options)


def build_core(problem: Problem) -> Core:
    """Merge parallel edges, turn self loops into unary costs, fold tables that depend on one end only."""
    num_budgets = len(problem.budgets)
    unaries = [variable.costs.copy() for variable in problem.variables]
    usages = [[variable.usage[k].copy() for variable in problem.variables] for k in range(num_budgets)]
    edges: dict[tuple[int, int], Array] = {}
    edge_usages: list[dict[tuple[int, int], Array]] = [{} for _ in range(num_budgets)]
    for edge in problem.edges:
        _add(unaries, edges, edge.a, edge.b, edge.costs)
        if edge.usage is not None:
            for k in range(num_budgets):
                _add(usages[k], edge_usages[k], edge.a, edge.b, edge.usage[k])
    return Core(
        _fold(unaries, edges),
        tuple(_fold(unary, tables) for unary, tables in zip(usages, edge_usages, strict=True)),
        tuple(np.arange(variable.num_options, dtype=np.int64) for variable in problem.variables),
    )


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
