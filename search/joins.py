"""Relational joins of label sets, in numpy: rows of variable choices with cost and usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from search.core import Core, Indices
from search.problem import Array


class TooManyRowsError(Exception):
    """A join would make more rows than allowed; caught inside the package, which then splits the problem."""


@dataclass(frozen=True, slots=True, eq=False)
class Labels:
    """Labels of one variable: its separator's choices by column, cost, usage [n, K], Lagrangian excess over the
    variable's message, the variable's own option, and for each child the index of the child's label."""

    columns: dict[int, Indices]
    cost: Array
    usage: Array
    excess: Array
    option: Indices
    origins: dict[int, Indices]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Labels in the making: choices of ``scope`` by column; ``excess`` is the sum of the joined labels' excesses and
    ``bound`` the least Lagrangian value of any completion (``-inf`` while unknown)."""

    columns: dict[int, Indices]
    cost: Array
    usage: Array
    excess: Array
    bound: Array
    origins: dict[int, Indices]

    @property
    def scope(self) -> tuple[int, ...]:
        """The variables chosen so far."""
        return tuple(self.columns)

    def take(self, index: Indices) -> Rows:
        """Some of the rows, in the order of ``index``; repeats allowed."""
        return Rows(
            {v: column[index] for v, column in self.columns.items()},
            self.cost[index],
            self.usage[index],
            self.excess[index],
            self.bound[index],
            {child: origin[index] for child, origin in self.origins.items()},
        )

    def with_bound(self, bound: Array) -> Rows:
        """The same rows with their bounds known."""
        return replace(self, bound=bound)


def start_rows(core: Core, variable: int) -> Rows:
    """One row per option of a variable."""
    size = core.sizes[variable]
    usage = np.zeros((size, len(core.usages)))
    for k, function in enumerate(core.usages):
        usage[:, k] = function.unaries[variable]
    columns = {variable: np.arange(size, dtype=np.int64)}
    return Rows(columns, core.costs.unaries[variable], usage, np.zeros(size), np.full(size, -np.inf), {})


def attach_edge(core: Core, rows: Rows, a: int, b: int) -> Rows:
    """Add cost and usage of the pair (a, b), if it has any, to rows that choose both."""
    pair = (a, b) if a < b else (b, a)
    place = rows.columns[pair[0]], rows.columns[pair[1]]
    if pair in core.costs.edges:
        rows = replace(rows, cost=rows.cost + core.costs.edges[pair][place])
    used = [k for k, function in enumerate(core.usages) if pair in function.edges]
    if used:
        usage = rows.usage.copy()
        for k in used:
            usage[:, k] += core.usages[k].edges[pair][place]
        rows = replace(rows, usage=usage)
    return rows


def extend(rows: Rows, variable: int, size: int, max_rows: int) -> Rows:
    """Every row with every option of one more variable."""
    count = len(rows.cost)
    if count * size > max_rows:
        raise TooManyRowsError
    longer = rows.take(np.repeat(np.arange(count), size))
    columns = {**longer.columns, variable: np.tile(np.arange(size, dtype=np.int64), count)}
    return replace(longer, columns=columns)


def join(
    rows: Rows,
    child: int,
    labels: Labels,
    separator: Sequence[int],
    sizes: Sequence[int],
    allowance: Array,
    max_rows: int,
) -> Rows:
    """Every row with every child label that agrees on the shared variables and whose excess is below ``allowance``.

    Labels are sorted by (shared choice, excess), so the matches of a row are one range: no other pair is ever formed.
    """
    shared = [v for v in separator if v in rows.columns]
    label_key = _mixed_radix([labels.columns[v] for v in shared], [sizes[v] for v in shared], len(labels.cost))
    row_key = _mixed_radix([rows.columns[v] for v in shared], [sizes[v] for v in shared], len(rows.cost))
    order = np.lexsort((labels.excess, label_key))
    label_key, excess = label_key[order], labels.excess[order]
    start = np.searchsorted(label_key, row_key, side="left").astype(np.int64)
    stop = np.searchsorted(label_key, row_key, side="right").astype(np.int64)
    count = _first_not_below(excess, start, stop, allowance) - start
    total = int(count.sum())
    if total > max_rows:
        raise TooManyRowsError
    row_index = np.repeat(np.arange(len(rows.cost)), count)
    offset = np.arange(total) - np.repeat(np.cumsum(count) - count, count)
    label_index = order[np.repeat(start, count) + offset]
    longer = rows.take(row_index)
    columns = dict(longer.columns)
    columns.update({v: labels.columns[v][label_index] for v in separator if v not in columns})
    return Rows(
        columns,
        longer.cost + labels.cost[label_index],
        longer.usage + labels.usage[label_index],
        longer.excess + labels.excess[label_index],
        longer.bound,
        {**longer.origins, child: label_index},
    )


def _mixed_radix(columns: Sequence[Indices], sizes: Sequence[int], count: int) -> Indices:
    """One integer per row that identifies the columns' values."""
    key = np.zeros(count, dtype=np.int64)
    for column, size in zip(columns, sizes, strict=True):
        key = key * size + column
    return key


def _first_not_below(values: Array, start: Indices, stop: Indices, allowance: Array) -> npt.NDArray[np.int64]:
    """For each range of the piecewise ascending ``values``, the first index whose value is not below the allowance."""
    low, high = start.copy(), stop.copy()
    while (low < high).any():
        middle = (low + high) // 2
        below = (low < high) & (values[np.minimum(middle, len(values) - 1)] < allowance)
        high = np.where((low < high) & ~below, middle, high)
        low = np.where(below, middle + 1, low)
    return low
