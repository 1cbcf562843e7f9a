"""Every way to run a small stage, as arrays: for stages of so few units that counting them all is the fastest.

Shape legend: Q ways (one count per point and class), C classes, K points of all classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from search.problem import Array
from search.stage_lp import Indices

MAX_WAYS = 4096
"""Ways to run a stage that are enumerated at most; stages with more are left to ``stage_knapsack``."""


def num_ways(sizes: Sequence[int], num_points: Sequence[int]) -> int:
    """Q: the product of the multiset coefficients."""
    return math.prod(math.comb(n + k - 1, n) for n, k in zip(sizes, num_points, strict=True) if n)


@lru_cache(maxsize=256)
def multisets(size: int, num_points: int) -> Indices:
    """[Q, k] counts of k points that place ``size`` units of one class; read-only."""
    rows = [list(row) for row in itertools.combinations_with_replacement(range(num_points), size)]
    counts = np.zeros((len(rows), num_points), dtype=np.int64)
    if size:
        np.add.at(counts, (np.repeat(np.arange(len(rows)), size), np.array(rows).reshape(-1)), 1)
    counts.setflags(write=False)
    return counts


def combine(parts: Sequence[Indices]) -> Indices:
    """[Q, K]: every combination of the ways of each class, points side by side."""
    result = parts[0]
    for part in parts[1:]:
        result = np.hstack([np.repeat(result, len(part), axis=0), np.tile(part, (len(result), 1))])
    return result


def totals(counts: Indices, figures: Array) -> Array:
    """[7, Q]: fill, steady, step, fixed, micro and deferred bytes summed, the transient's largest.

    Args:
        counts: [Q, K].
        figures: [K, 7] of the points.
    """
    sums = counts @ figures[:, :6]
    largest = np.where(counts > 0, figures[:, 6], 0.0).max(axis=1)
    return np.concatenate([sums.T, largest[None]])
