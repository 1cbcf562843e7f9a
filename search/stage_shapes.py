"""The shapes of a chain's stages: the units and boundaries that determine a stage's cost, each shape once.

Problems that differ only in seconds and bytes have the same shapes, so shapes are cached between problems. Shape
legend: S shapes, N units, L the longest stage, C classes, T tied parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from search.problem import Array
from search.stage_lp import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Shapes:
    """The distinct shapes of stages, as read-only arrays.

    shape_of: [N, L] the shape of the stage by its first unit and its length minus one, -1 where there is none.
    counts: [S, C] units of each class. busy: [S] seconds of its boundaries. second_alone, one_alone: [S, T] whether the
    stage has the second unit of a tied parameter without the first, and exactly one of both units, as 0 or 1.
    """

    shape_of: Indices
    counts: Indices
    busy: Array
    second_alone: Array
    one_alone: Array


@lru_cache(maxsize=256)
def shapes_of(
    units: tuple[str, ...],
    longest: int,
    busy: tuple[tuple[float, ...], tuple[float, ...]],
    usable: tuple[bool, ...],
    tied: tuple[tuple[int, int], ...],
    uncut: tuple[int, ...] = (),
) -> Shapes:
    """Return the shapes of all intervals of up to `longest` units.

    busy: [N + 1] seconds of the boundary before each unit as a stage's first and as its last boundary. usable: whether
    a class (in order of appearance) can run at all; a stage with an unusable class has no shape. uncut: units at which
    no stage may begin or end; an interval that does has no shape.
    """
    num_units = len(units)
    start = np.repeat(np.arange(num_units), longest)
    end = start + np.tile(np.arange(1, longest + 1), num_units)
    inside = np.flatnonzero(end <= num_units)
    start, end = start[inside], end[inside]
    columns: list[Array] = []
    valid = ~(np.isin(start, uncut) | np.isin(end, uncut))
    for kind, is_usable in zip(dict.fromkeys(units), usable, strict=True):
        total = np.append(0, np.cumsum([name == kind for name in units]))
        columns.append((total[end] - total[start]).astype(np.float64))
        valid &= (columns[-1] == 0) | is_usable
    columns.append(np.array(busy[0])[start] + np.array(busy[1])[end])
    for first, second in tied:
        has_first, has_second = ((start <= unit) & (unit < end) for unit in (first, second))
        columns += [(has_second & ~has_first).astype(np.float64), (has_second != has_first).astype(np.float64)]
    code = np.zeros(len(start), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        # Folded again each time, so that the code stays below the number of intervals squared.
        code = np.unique(code * len(values) + inverse.reshape(-1), return_inverse=True)[1].reshape(-1)
    _, first_of, inverse = np.unique(code[valid], return_index=True, return_inverse=True)
    chosen = np.flatnonzero(valid)[first_of]
    shape_of = np.full((num_units, longest), -1, dtype=np.int64)
    shape_of.reshape(-1)[inside[valid]] = inverse.reshape(-1)
    table = np.array([column[chosen] for column in columns])
    num_classes = len(usable)
    counts = table[:num_classes].T.astype(np.int64).reshape(-1, num_classes)
    shapes = Shapes(
        shape_of=shape_of,
        counts=counts,
        busy=table[num_classes],
        second_alone=table[num_classes + 1 :: 2].T,
        one_alone=table[num_classes + 2 :: 2].T,
    )
    for array in (shapes.shape_of, shapes.counts, shapes.busy, shapes.second_alone, shapes.one_alone):
        array.setflags(write=False)
    return shapes
