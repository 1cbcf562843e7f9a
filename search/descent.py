"""Coordinate descent: improve an allowed choice one variable at a time. Gives incumbents, never bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.core import Core, Pairwise
from search.problem import Array

MAX_SWEEPS = 20


def descend(core: Core, choices: Sequence[int], largest_allowed: Sequence[float]) -> tuple[int, ...]:
    """Move each variable to its cheapest option that keeps every usage within its limit, until nothing improves.

    ``choices`` may exceed a limit or contain a forbidden option; options that do are left when a move allows it.
    """
    current = list(choices)
    functions = (core.costs, *core.usages)
    neighbours = [function.neighbours() for function in functions]
    used = [_total(usage, current) for usage in core.usages]
    for _ in range(MAX_SWEEPS):
        moved = False
        for v in range(len(current)):
            rows = [_conditional(f, near[v], v, current) for f, near in zip(functions, neighbours, strict=True)]
            cost = rows[0].copy()
            for row, total, limit in zip(rows[1:], used, largest_allowed, strict=True):
                cost[total - row[current[v]] + row > limit] = np.inf
            best = int(np.argmin(cost))
            if cost[best] < cost[current[v]]:
                used = [total - row[current[v]] + row[best] for row, total in zip(rows[1:], used, strict=True)]
                current[v], moved = best, True
        if not moved:
            break
    return tuple(current)


def _conditional(function: Pairwise, neighbours: Sequence[int], v: int, choices: Sequence[int]) -> Array:
    """The part of the function that depends on v, for each option of v, the others as chosen."""
    total = function.unaries[v]
    for w in neighbours:
        total = total + function.table(v, w)[:, choices[w]]
    return total


def _total(function: Pairwise, choices: Sequence[int]) -> float:
    """The function's value."""
    total = sum(float(unary[choice]) for unary, choice in zip(function.unaries, choices, strict=True))
    return total + sum(float(table[choices[a], choices[b]]) for (a, b), table in function.edges.items())
