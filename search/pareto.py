"""Which labels of each group are not dominated."""

from __future__ import annotations

import numpy as np

from search.core import Indices, Mask
from search.problem import Array

MAX_PIVOTS = 48
"""Pivots per group with two or more budgets; further dominated labels are kept, which costs time but no exactness."""


def undominated(group: Indices, cost: Array, usage: Array) -> Indices:
    """Indices of labels that no other label of their group beats or equals in cost and every usage.

    Exact for one budget; with more, a few dominated labels may remain. Of equal labels the first stays.

    Args:
        group: [n] group of each label.
        cost: [n].
        usage: [n, K].
    """
    order = np.lexsort((*usage.T[::-1], cost, group))
    group, usage = group[order], usage[order]
    if not len(order):
        return order
    if usage.shape[1] == 1:
        return order[_staircase(group, usage[:, 0])]
    return order[_pivoted(group, usage)]


def _staircase(group: Indices, usage: Array) -> Mask:
    """For labels sorted by group and cost: those that use less than every earlier label of their group."""
    rank = np.unique(usage, return_inverse=True)[1].astype(np.int64)
    number = np.concatenate(([0], np.cumsum(group[1:] != group[:-1])))
    # Later groups lie below all earlier ones, so one running minimum serves every group.
    height = rank - number * len(group)
    lowest = np.minimum.accumulate(height)
    keep: Mask = np.ones(len(group), dtype=np.bool_)
    keep[1:] = height[1:] < lowest[:-1]
    return keep


def _pivoted(group: Indices, usage: Array) -> Mask:
    """For labels sorted by group and cost: drop what the first, second, ... surviving label of its group dominates."""
    alive = np.arange(len(group))
    for pivot_number in range(MAX_PIVOTS):
        starts = np.flatnonzero(np.concatenate(([True], group[alive][1:] != group[alive][:-1])))
        lengths = np.diff(np.concatenate((starts, [len(alive)])))
        if pivot_number >= lengths.max():
            break
        pivot = np.repeat(starts + np.minimum(pivot_number, lengths - 1), lengths)
        place = np.arange(len(alive))
        dominated = (place > pivot) & (usage[alive[pivot]] <= usage[alive]).all(axis=1)
        alive = alive[~dominated]
    keep: Mask = np.zeros(len(group), dtype=np.bool_)
    keep[alive] = True
    return keep
