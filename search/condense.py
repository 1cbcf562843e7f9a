"""Exact elimination of the variables that are easy to eliminate; what remains is again a function of pairs.

A variable whose separator has at most two variables leaves a message on at most two variables: an edge table, a unary
vector or a constant. Eliminating all of those (chains, side branches, series-parallel parts) keeps the problem
pairwise, makes it several times smaller, and makes the bound of ``bounds.dual_ascent`` on the rest much tighter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.core import Pairwise
from search.elimination import Check, Factor, project
from search.problem import Array

MAX_BUCKET_CELLS = 2e6


@dataclass(frozen=True, slots=True, eq=False)
class Condensed:
    """``function`` depends on the variables ``remaining`` (renumbered 0, 1, ...); the others are in ``eliminated``.

    ``eliminated`` lists (variable, its bucket) in elimination order.
    """

    function: Pairwise
    remaining: tuple[int, ...]
    eliminated: tuple[tuple[int, tuple[Factor, ...]], ...]

    def lift(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Choices of all variables from choices of the remaining ones; ties go to the lowest option."""
        full = dict(zip(self.remaining, choices, strict=True))
        for variable, bucket in reversed(self.eliminated):
            total: Array = np.zeros(())
            for factor in bucket:
                total = total + factor.array[tuple(full.get(v, slice(None)) for v in factor.scope)]
            full[variable] = int(np.argmin(total))
        return tuple(full[v] for v in range(len(full)))


def condense(function: Pairwise, check: Check) -> Condensed:
    """Eliminate, smallest bucket first, while a variable has at most two neighbours and a small bucket."""
    sizes = function.sizes
    unaries, edges = dict(enumerate(function.unaries)), dict(function.edges)
    adjacent = {v: set(others) for v, others in enumerate(function.neighbours())}
    eliminated: list[tuple[int, tuple[Factor, ...]]] = []
    while len(adjacent) > 1:
        candidates = [
            (float(np.prod([float(sizes[u]) for u in (v, *others)])), v)
            for v, others in adjacent.items()
            if len(others) <= 2
        ]
        if not candidates or min(candidates)[0] > MAX_BUCKET_CELLS:
            break
        variable = min(candidates)[1]
        separator = tuple(sorted(adjacent.pop(variable)))
        bucket = [Factor((variable,), unaries.pop(variable))]
        for other in separator:
            pair = (variable, other) if variable < other else (other, variable)
            bucket.append(Factor(pair, edges.pop(pair)))
            adjacent[other].discard(variable)
        message = project(bucket, separator, sizes, check).array
        if len(separator) == 2:
            a, b = separator
            edges[a, b] = edges[a, b] + message if (a, b) in edges else message
            adjacent[a].add(b)
            adjacent[b].add(a)
        else:
            receiver = separator[0] if separator else min(adjacent)
            unaries[receiver] = unaries[receiver] + message
        eliminated.append((variable, tuple(bucket)))
    remaining = tuple(sorted(adjacent))
    place = {v: index for index, v in enumerate(remaining)}
    renumbered = {(place[a], place[b]): table for (a, b), table in sorted(edges.items())}
    return Condensed(Pairwise(tuple(unaries[v] for v in remaining), renumbered), remaining, tuple(eliminated))
