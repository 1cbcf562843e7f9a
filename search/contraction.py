"""Eliminate variables with at most two neighbors from a core without a budget. The rest is still pairwise.

Eliminating a variable v with the neighbors a and b adds a table on the pair (a, b):

    c'_ab(x_a, x_b) = c_ab(x_a, x_b) + min over x_v of [c_v(x_v) + c_va(x_v, x_a) + c_vb(x_v, x_b)]

With one neighbor it adds a vector, with none nothing. This repeats until every variable has at least three neighbors.
Chains, trees and unrolled loops shrink to the variables where they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.core import Core, Pairwise
from search.problem import Array

MOST_NEIGHBORS = 2
"""The most neighbors of an eliminated variable. Three would leave a table on three variables."""


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """An eliminated variable. ``table`` is the minimized sum; the variable's own axis is last."""

    variable: int
    neighbors: tuple[int, ...]
    table: Array


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """A smaller core with the optimum of a larger one. ``kept`` are the variables of the larger core that remain."""

    core: Core
    kept: tuple[int, ...]
    removed: tuple[Removed, ...]

    def completed(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Extend a choice of the smaller core by the best options of eliminated variables; ties go to the lowest."""
        chosen = dict(zip(self.kept, assignment, strict=True))
        for variable in reversed(self.removed):
            chosen[variable.variable] = int(np.argmin(variable.table[tuple(chosen[v] for v in variable.neighbors)]))
        return tuple(chosen[v] for v in range(len(chosen)))


def contract(core: Core) -> Contraction:
    """Eliminate all variables with few neighbors, lowest index first. The core must have no budget."""
    assert core.usage is None
    unaries, tables = list(core.costs.unaries), dict(core.costs.edges)
    around = [set(others) for others in core.costs.neighbors()]
    removed: dict[int, Removed] = {}
    open_ = list(reversed(range(len(unaries))))
    while open_:
        v = open_.pop()
        if v in removed or len(around[v]) > MOST_NEIGHBORS:
            continue
        neighbors = tuple(sorted(around[v]))
        total = unaries[v]
        for position, w in enumerate(neighbors):
            table = tables.pop((w, v)) if w < v else tables.pop((v, w)).T
            total = total + np.expand_dims(table, tuple(i for i in range(len(neighbors)) if i != position))
            around[w].discard(v)
        removed[v] = Removed(v, neighbors, total)
        least = total.min(axis=-1)
        if len(neighbors) == 1:
            unaries[neighbors[0]] = unaries[neighbors[0]] + least
        elif neighbors:
            a, b = neighbors
            tables[a, b] = tables[a, b] + least if (a, b) in tables else least
            around[a].add(b)
            around[b].add(a)
        open_ += neighbors
    kept = tuple(v for v in range(len(unaries)) if v not in removed)
    place = {v: index for index, v in enumerate(kept)}
    edges = {(place[a], place[b]): table for (a, b), table in tables.items()}
    options = tuple(np.arange(len(unaries[v]), dtype=np.int64) for v in kept)
    smaller = Core(Pairwise(tuple(unaries[v] for v in kept), edges), None, options)
    return Contraction(smaller, kept, tuple(removed.values()))
