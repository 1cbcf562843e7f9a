"""A cheap lower bound for functions whose tables are too large to eliminate, and a cheap good choice.

Block-coordinate ascent on the dual of the local-polytope relaxation, in the sequential form of TRW-S (V. Kolmogorov,
"Convergent tree-reweighted message passing", IEEE PAMI 28 (2006)): costs are moved between a variable and its edges,
which leaves the objective of every choice unchanged, and what all options of a variable share goes to the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search.core import Pairwise
from search.elimination import Check
from search.problem import Array

MAX_SWEEPS = 40
MIN_RELATIVE_GAIN = 1e-5


@dataclass(frozen=True, slots=True, eq=False)
class DualBound:
    """``value`` bounds the function from below; ``marginals[v][x]`` bounds it with option x of v fixed.

    ``choices`` is a choice read off the reparametrised costs, not necessarily allowed.
    """

    value: float
    marginals: tuple[Array, ...]
    choices: tuple[int, ...]


def dual_ascent(function: Pairwise, check: Check) -> DualBound:
    """Ascend until a sweep gains little. The function must have no dead ends (every row has a finite entry)."""
    unaries = [unary.copy() for unary in function.unaries]
    tables = {pair: table.copy() for pair, table in function.edges.items()}
    neighbours = function.neighbours()
    order, value, first_gain = list(range(len(unaries))), 0.0, 0.0
    for sweep in range(MAX_SWEEPS):
        gain = 0.0
        for v in order:
            gain += _collect(unaries, tables, v, neighbours[v])
            ahead = [w for w in neighbours[v] if (w > v) == (sweep % 2 == 0)]
            share = 1.0 / max(len(ahead), len(neighbours[v]) - len(ahead), 1)
            for w in ahead:
                _oriented(tables, v, w)[...] += (share * unaries[v])[:, None]
            unaries[v] = unaries[v] * max(0.0, 1.0 - share * len(ahead)) if ahead else unaries[v]
        check()
        value += gain
        first_gain = max(first_gain, gain)
        order.reverse()
        if sweep >= 4 and gain <= MIN_RELATIVE_GAIN * max(first_gain, abs(value)):
            break
    value += sum(_normalise(table) for table in tables.values())
    value += sum(_normalise(unary) for unary in unaries)
    margins = [
        value + unaries[v] + sum((_oriented(tables, v, w).min(axis=1) for w in neighbours[v]), np.zeros(()))
        for v in range(len(unaries))
    ]
    return DualBound(value, tuple(margins), _read_choices(unaries, tables, neighbours))


def _oriented(tables: dict[tuple[int, int], Array], v: int, w: int) -> Array:
    """A writable view of the table of a pair with ``v`` first."""
    return tables[v, w] if v < w else tables[w, v].T


def _collect(unaries: list[Array], tables: dict[tuple[int, int], Array], v: int, neighbours: tuple[int, ...]) -> float:
    """Move each edge's row minima into v, then v's minimum out; returns that minimum."""
    for w in neighbours:
        table = _oriented(tables, v, w)
        lows = table.min(axis=1)
        table -= lows[:, None]
        unaries[v] = unaries[v] + lows
    return _normalise(unaries[v])


def _normalise(array: Array) -> float:
    """Subtract the minimum in place and return it."""
    low = float(array.min())
    array -= low
    return low


def _read_choices(
    unaries: list[Array], tables: dict[tuple[int, int], Array], neighbours: tuple[tuple[int, ...], ...]
) -> tuple[int, ...]:
    """Choose variable by variable, each given those chosen before it."""
    choices: list[int] = []
    for v, unary in enumerate(unaries):
        total = unary
        for w in neighbours[v]:
            table = _oriented(tables, v, w)
            total = total + (table[:, choices[w]] if w < v else table.min(axis=1))
        choices.append(int(np.argmin(total)))
    return tuple(choices)
