"""Derive one graph for every batch size: sizes are affine in the number of rows, so two traces give all others.

Between two graphs of the same model traced with different numbers of rows, every integer either is equal or grows
linearly (a shape [B, S, H], a view to B*S). A number in arithmetic has to be proportional to the rows (a mean's divisor
B*S). B*B or B*S - 1 are not: two sizes would not determine them. Any other difference (another operator, 1 / B) means
that the model is not affine; it is traced anew for each size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.ir.graph import Graph, Node, Parameter, base_name

LEAST_ROWS = 2
"""A batch of one row is traced as it is: sizes of one may be left out or broadcast."""

ARITHMETIC = (
    *("add", "addcdiv", "addcmul", "div", "mul", "pow", "remainder", "rsub", "sub"),
    *("eq", "floor_divide", "fmod", "ge", "gt", "le", "lt", "ne", "true_divide"),
    "draw",
    *("clamp", "clamp_max", "clamp_min", "fill", "full", "full_like", "masked_fill", "new_full", "scalar_tensor"),
    "where",
)
"""Operators that compute with the numbers among their arguments."""


class NotAffineError(ValueError):
    """Two traces differ in more than sizes that grow with the batch."""


class BatchedTrace:
    """`trace(rows) -> Graph`, traced at most twice where the graph is affine in the rows.

    Further sizes are computed from those two; a batch of less than LEAST_ROWS, and any size of a model that is not
    affine, is traced. `estimate` also computes batches below LEAST_ROWS, with the calls of larger batches: good enough
    for a price, not for a program.
    """

    source: Hashable = None

    def __init__(self, trace: Callable[[int], Graph]) -> None:
        self._trace = trace
        self._known: dict[int, Graph] = {}
        self._estimates: dict[int, Graph] = {}
        self._runs: dict[int, bool] = {}
        self._traced: list[int] = []
        self._is_affine = True

    def __call__(self, rows: int) -> Graph:
        if rows not in self._known:
            self._known[rows] = self._make(rows)
        return self._known[rows]

    def traced(self, rows: int) -> Graph:
        """Return the graph of a batch, always by a trace."""
        return self._trace(rows)

    def whole_batch_reason(self, count: int) -> str | None:
        """Return the reason why the batch cannot be cut into `count` micro-batches; None if it can, or if unknown."""
        return None

    def has_first_pass(self, count: int) -> bool:
        """Return whether `count` micro-batches are run forward twice (`Graph.has_first_pass`), where
        they are proven.
        """
        return False

    def estimate(self, rows: int) -> Graph:
        """Return the graph at any number of rows as if it were affine; a trace if only one row was ever requested.

        It does not depend on traces made in between.
        """
        if rows >= LEAST_ROWS:
            return BatchedTrace.__call__(self, rows)
        if rows not in self._estimates:
            try:
                self._estimates[rows] = self._between(rows)
            except NotAffineError:
                self._estimates[rows] = BatchedTrace.__call__(self, rows)
        return self._estimates[rows]

    def can_estimate(self, rows: int) -> bool:
        """Return whether the model runs on so many rows: one whose buffers have a row per row of the batch runs on no
        others.
        """
        if rows not in self._runs:
            try:
                self.estimate(rows)
                self._runs[rows] = True
            except TraceError:
                self._runs[rows] = False
        return self._runs[rows]

    def _between(self, rows: int) -> Graph:
        for more in (LEAST_ROWS, 2 * LEAST_ROWS):
            if len(self._traced) == 1 and more not in self._known:
                BatchedTrace.__call__(self, more)
        if len(self._traced) < 2:
            raise NotAffineError(f"{len(self._traced)} sizes were traced")
        low, high = sorted(self._traced)
        _check_tables(self._known[low], self._known[high])
        graph: Graph = at_rows(self._known[low], low, self._known[high], high, rows)
        return graph

    def _make(self, rows: int) -> Graph:
        if len(self._traced) == 2 and self._is_affine and rows >= LEAST_ROWS:
            try:
                return self._between(rows)
            except NotAffineError:
                self._is_affine = False
        graph = self._trace(rows)
        if rows >= LEAST_ROWS and len(self._traced) < 2:
            self._traced.append(rows)
        return graph


def at_rows(low: Any, low_rows: int, high: Any, high_rows: int, rows: int) -> Any:
    """Return the structure between (or beyond) `low`, traced with `low_rows`, and `high`. Raises NotAffineError."""
    if low is high or (type(low) is type(high) and low == high):
        return low
    if type(low) is not type(high):
        raise NotAffineError(f"{low!r} with {low_rows} rows, {high!r} with {high_rows}")
    if isinstance(low, Node):
        _check_numbers(low, low_rows, high, high_rows)
    if dataclasses.is_dataclass(low) and not isinstance(low, type):
        values = {
            f.name: at_rows(getattr(low, f.name), low_rows, getattr(high, f.name), high_rows, rows)
            for f in dataclasses.fields(low)
            if f.init
        }
        return type(low)(**values)
    if isinstance(low, tuple) and len(low) == len(high):
        return tuple(at_rows(a, low_rows, b, high_rows, rows) for a, b in zip(low, high, strict=True))
    if isinstance(low, int) and not isinstance(low, bool):
        grown, remainder = divmod((high - low) * (rows - low_rows), high_rows - low_rows)
        if not remainder:
            return low + grown
    if isinstance(low, float) and low * high_rows == high * low_rows:
        return low / low_rows * rows
    raise NotAffineError(f"{low!r} with {low_rows} rows, {high!r} with {high_rows}")


def _check_tables(low: Any, high: Any) -> None:
    """Raise NotAffineError for a tensor that forward makes whose values change with more rows."""
    others = {table.name: table.value for table in _tables(high)}
    for table in _tables(low):
        other = others.get(table.name)
        if table.value is not None and other is not None and not torch.equal(table.value, other):
            raise NotAffineError(f"{table.name} is another table with another number of rows")


def _tables(graph: Any) -> tuple[Parameter, ...]:
    return graph.parameters if isinstance(graph, Graph) else ()


def _check_numbers(low: Node, low_rows: int, high: Node, high_rows: int) -> None:
    """Raise NotAffineError for a number in arithmetic that differs and is not proportional to the rows."""
    if base_name(low.op) not in ARITHMETIC:
        return
    ones, others = (*low.args, *dict(low.kwargs).values()), (*high.args, *dict(high.kwargs).values())
    for one, other in zip(ones, others, strict=False):
        are_numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
        if are_numbers and one != other and one * high_rows != other * low_rows:
            raise NotAffineError(f"{low.name} has {one} with {low_rows} rows, {other} with {high_rows}")
