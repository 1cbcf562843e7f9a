"""Variables with at most two neighbours, minimised out of a core without a budget: what is left is pairwise still.

A variable v with the neighbours a and b leaves a table on the pair of these, with one neighbour a vector, with none
nothing:

    c'_ab(x_a, x_b) = c_ab(x_a, x_b) + min over x_v of [c_v(x_v) + c_va(x_v, x_a) + c_vb(x_v, x_b)]

until every variable has at least three. Chains, trees and loops that are unrolled shrink to where they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.core import Core, Pairwise
from search.problem import Array

MOST_NEIGHBOURS = 2
"""Of a variable that is minimised out: more would leave a table on three."""


@dataclass(frozen=True, slots=True, eq=False)
class Removed:
    """A variable that was minimised out: ``table`` has what is minimised, over its neighbours' options and then its
    own."""

    variable: int
    neighbours: tuple[int, ...]
    table: Array


@dataclass(frozen=True, slots=True, eq=False)
class Contraction:
    """A smaller core with the optimum of a larger one. ``kept`` are the larger one's variables that it has."""

    core: Core
    kept: tuple[int, ...]
    removed: tuple[Removed, ...]

    def completed(self, assignment: Sequence[int]) -> tuple[int, ...]:
        """Choices of the smaller core with the best ones of all other variables; ties go to the lowest option."""
        chosen = dict(zip(self.kept, assignment, strict=True))
        for each in reversed(self.removed):
            chosen[each.variable] = int(np.argmin(each.table[tuple(chosen[v] for v in each.neighbours)]))
        return tuple(chosen[v] for v in range(len(chosen)))


def contract(core: Core) -> Contraction:
    """Minimise out what may be, the variables of the lowest index first. A core with a budget is not to be given."""
    assert core.usage is None
    unaries, tables = list(core.costs.unaries), dict(core.costs.edges)
    around = [set(others) for others in core.costs.neighbours()]
    removed: dict[int, Removed] = {}
    open_ = list(reversed(range(len(unaries))))
    while open_:
        v = open_.pop()
        if v in removed or len(around[v]) > MOST_NEIGHBOURS:
            continue
        neighbours = tuple(sorted(around[v]))
        total = unaries[v]
        for position, w in enumerate(neighbours):
            table = tables.pop((w, v)) if w < v else tables.pop((v, w)).T
            total = total + np.expand_dims(table, tuple(i for i in range(len(neighbours)) if i != position))
            around[w].discard(v)
        removed[v] = Removed(v, neighbours, total)
        least = total.min(axis=-1)
        if len(neighbours) == 1:
            unaries[neighbours[0]] = unaries[neighbours[0]] + least
        elif neighbours:
            a, b = neighbours
            tables[a, b] = tables[a, b] + least if (a, b) in tables else least
            around[a].add(b)
            around[b].add(a)
        open_ += neighbours
    kept = tuple(v for v in range(len(unaries)) if v not in removed)
    place = {v: index for index, v in enumerate(kept)}
    edges = {(place[a], place[b]): table for (a, b), table in tables.items()}
    options = tuple(np.arange(len(unaries[v]), dtype=np.int64) for v in kept)
    smaller = Core(Pairwise(tuple(unaries[v] for v in kept), edges), None, options)
    return Contraction(smaller, kept, tuple(removed.values()))
