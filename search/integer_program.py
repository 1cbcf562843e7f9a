"""A core as an integer program, solved by HiGHS through OR-tools' MathOpt.

z_vi = 1 where variable v takes option i. y_ij is the share of the pair (i, j) of an edge (v, w).

    minimize    sum c_vi z_vi + sum c_ij y_ij
    subject to  sum_i z_vi = 1                                     for every variable v         (``_choose_one``)
                sum_j y_ij = z_vi,  sum_i y_ij = z_wj              for every edge (v, w)        (``_tie_pairs``)
                sum u_vi z_vi <= limit                             of the budget, if any        (``_keep_within``)
                sum_v z_v,x(v) <= number of variables - 1          for every excluded choice x  (``_exclude``)
                z_vi 0 or 1,  y >= 0

Where z is integral, the marginals leave one y per edge, that of the chosen pair. Pairs of infinite cost have no
column. A column that alone exceeds the budget or the cutoff has the upper bound 0. Costs and usage are measured from
the least entry of their table. They are scaled so that the solver's absolute tolerances are small against relevant
differences.

Shape legend: C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from search.core import Core, Indices, Mask
from search.problem import Array

COST_SPAN = 1e4
"""Range to which costs are scaled. The solver tells objectives apart to 1e-6, hence to 1e-10 of the range."""

USAGE_SPAN = 1e3
"""Range to which the budget's room is scaled. The solver keeps rows to 1e-6, hence the budget to 1e-9 of its room."""

HIGHS_OPTIONS = {"int_options": {"threads": 1}, "string_options": {"parallel": "off"}}
"""One thread: a process forked later would otherwise wait for threads that it does not have."""


ONE = np.ones(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """All columns, table by table, measured from the least entry of their table.

    ``places[t]`` are the columns of table t. ``pairs[t]`` are the options (i, j) of an edge's columns. ``base`` [2] is
    the sum of the least costs and the sum of the least usages of all tables.
    """

    costs_C: Array
    usage_C: Array
    places: tuple[Indices, ...]
    pairs: tuple[tuple[Indices, Indices], ...]
    base: Array


@dataclass(slots=True)
class _Rows:
    """Rows under construction: their bounds, and the cells (row, column, value) of the matrix."""

    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    cells: list[tuple[Indices, Indices, Array]] = field(default_factory=list)

    def add(self, count: int, low: float, high: float) -> Indices:
        """Add empty rows with the same bounds."""
        first = len(self.lows)
        self.lows += [low] * count
        self.highs += [high] * count
        return np.arange(first, first + count)

    def put(self, rows: Indices, columns: Indices, values: Array) -> None:
        """Set cells; the three arrays are broadcast to one shape."""
        rows, columns, values = np.broadcast_arrays(rows, columns, values)
        self.cells.append((rows, columns, values))


def solve(
    core: Core,
    limit: float,
    *,
    cutoff: float,
    excluded: Sequence[tuple[int, ...]],
) -> tuple[int, ...] | None:
    """Return the cheapest choice of a core within its budget, or None if none costs less than the cutoff.

    Because of the solver's tolerances the choice may exceed the budget by a billionth of its room.

    Args:
        core: every variable has an option, and no option has infinite cost.
        limit: of the budget, in bytes.
        cutoff: assignments that do not cost less may be missed.
        excluded: assignments that must not be returned.

    Raises:
        RuntimeError: the solver gave up.
    """
    columns = _columns(core)
    room = np.array([cutoff, limit]) - columns.base
    if (room < 0.0).any():
        return None
    rows = _Rows()
    _choose_one(rows, columns, len(core.sizes))
    _tie_pairs(rows, columns, core)
    if core.usage is not None:
        _keep_within(rows, columns, float(room[1]))
    _exclude(rows, columns, excluded)
    span = min(room[0], sum(float(columns.costs_C[place].max()) for place in columns.places)) or 1.0
    fits_C = (columns.costs_C <= room[0]) & (columns.usage_C <= room[1])
    costs_C = np.where(fits_C, columns.costs_C, 0.0) * (COST_SPAN / span)
    cutoff = float(room[0]) * (COST_SPAN / span)
    values_C = _run_highs(rows, costs_C, fits_C=fits_C, num_whole=sum(core.sizes), cutoff=cutoff)
    if values_C is None:
        return None
    return tuple(int(np.argmax(values_C[place])) for place in columns.places[: len(core.sizes)])


def _columns(core: Core) -> _Columns:
    """Build a column per option and per pair of finite cost."""
    usages = core.usage or [np.zeros(size) for size in core.sizes]
    tables = [np.stack(both) for both in zip(core.costs.unaries, usages, strict=True)]
    pairs: list[tuple[Indices, Indices]] = []
    for a, b in core.pairs():
        costs = core.costs.edges[a, b]
        first, second = np.nonzero(np.isfinite(costs))
        pairs.append((first, second))
        tables.append(np.stack([costs[first, second], np.zeros(len(first))]))
    lows = [table.min(axis=1, keepdims=True) for table in tables]
    shifted = np.hstack([table - low for table, low in zip(tables, lows, strict=True)])
    ends = np.cumsum([table.shape[1] for table in tables])
    places = tuple(np.arange(end - table.shape[1], end) for end, table in zip(ends, tables, strict=True))
    return _Columns(
        costs_C=shifted[0],
        usage_C=shifted[1],
        places=places,
        pairs=tuple(pairs),
        base=np.sum(lows, axis=0)[:, 0],
    )


def _choose_one(rows: _Rows, columns: _Columns, num_variables: int) -> None:
    """Require every variable to take exactly one option."""
    for row, place in zip(rows.add(num_variables, 1.0, 1.0), columns.places, strict=False):
        rows.put(row, place, ONE)


def _tie_pairs(rows: _Rows, columns: _Columns, core: Core) -> None:
    """Require the pairs of an edge with option i to add up to z_i, at both ends."""
    edges = zip(core.pairs(), columns.pairs, columns.places[len(core.sizes) :], strict=True)
    for ends, options, place in edges:
        for end, option in zip(ends, options, strict=True):
            sums = rows.add(core.sizes[end], 0.0, 0.0)
            rows.put(sums, columns.places[end], -ONE)
            rows.put(sums[option], place, ONE)


def _keep_within(rows: _Rows, columns: _Columns, room: float) -> None:
    """Keep the usage within the budget's room. Columns that exceed it alone are fixed to 0 and need no cell."""
    used = np.flatnonzero((columns.usage_C > 0.0) & (columns.usage_C <= room))
    rows.put(rows.add(1, -np.inf, USAGE_SPAN), used, columns.usage_C[used] * (USAGE_SPAN / (room or 1.0)))


def _exclude(rows: _Rows, columns: _Columns, excluded: Sequence[tuple[int, ...]]) -> None:
    """Require at least one variable to differ from each excluded choice."""
    for row, assignment in zip(rows.add(len(excluded), -np.inf, 0.0), excluded, strict=True):
        rows.highs[row] = len(assignment) - 1.0
        rows.put(row, np.array([place[choice] for place, choice in zip(columns.places, assignment, strict=False)]), ONE)


def _run_highs(rows: _Rows, costs_C: Array, *, fits_C: Mask, num_whole: int, cutoff: float) -> Array | None:
    """Run HiGHS and return the values of the columns; None if there is no solution.

    The first ``num_whole`` columns are 0 or 1, the others at least 0. Solutions above the cutoff are not searched.
    """
    # Imported here: it takes 0.3 CPU-seconds, and most plans do not need it.
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt
    from ortools.math_opt.solvers import highs_pb2

    columns = np.arange(len(costs_C))
    model = model_pb2.ModelProto()
    model.variables.ids.extend(columns)
    model.variables.lower_bounds.extend(np.zeros(len(columns)))
    model.variables.upper_bounds.extend(fits_C.astype(np.float64))
    model.variables.integers.extend(columns < num_whole)
    model.objective.linear_coefficients.ids.extend(columns)
    model.objective.linear_coefficients.values.extend(costs_C)
    model.linear_constraints.ids.extend(range(len(rows.lows)))
    model.linear_constraints.lower_bounds.extend(rows.lows)
    model.linear_constraints.upper_bounds.extend(rows.highs)
    row_ids, column_ids, values = (np.concatenate(parts) for parts in zip(*rows.cells, strict=True))
    order = np.lexsort((column_ids, row_ids))
    model.linear_constraint_matrix.row_ids.extend(row_ids[order])
    model.linear_constraint_matrix.column_ids.extend(column_ids[order])
    model.linear_constraint_matrix.coefficients.extend(values[order])
    # HiGHS ignores MathOpt's cutoff_limit; its branch and bound takes this option as the initial upper limit.
    options = highs_pb2.HighsOptionsProto(**HIGHS_OPTIONS, double_options={"objective_bound": cutoff})
    parameters = mathopt.SolveParameters(relative_gap_tolerance=0.0, absolute_gap_tolerance=0.0, highs=options)
    result = mathopt.solve(mathopt.Model.from_model_proto(model), mathopt.SolverType.HIGHS, params=parameters)
    reason, reasons = result.termination.reason, mathopt.TerminationReason
    if reason in (reasons.INFEASIBLE, reasons.INFEASIBLE_OR_UNBOUNDED):
        return None
    if reason != reasons.OPTIMAL:
        raise RuntimeError(f"HiGHS gave up: {result.termination}")
    return np.array(list(result.variable_values().values()))
