"""Exact elimination under budgets: messages are sets of (cost, usage) labels instead of single costs.

A label of variable v is one choice for v's subtree, given the separator S_v: its cost, its usage of each budget, and
pointers to the labels it was made of. Four exact rules keep the sets small:

* bound: with multipliers l, cost + l.usage of the label plus the Lagrangian completion r_v(S_v) must stay below the
  threshold plus l.limits, or no completion within the budgets costs less than the threshold;
* cost: the label's cost plus the least cost of any completion must stay below the cost threshold;
* usage: the label's usage of each budget plus the least usage of any completion must fit the limit;
* Pareto: of two labels with one separator choice, one that costs and uses no less than the other is dropped.

This is the label-setting method for resource-constrained paths (M. Desrochers, F. Soumis 1988), with paths replaced by
the bucket tree of ``elimination`` and the bound by the exact min-marginals of the Lagrangian relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.core import Core, Indices
from search.elimination import Check, Elimination, Factor, project
from search.joins import Labels, Rows, attach_edge, extend, join, start_rows
from search.pareto import undominated
from search.problem import Array

MAX_PREFIX_CELLS = 2e6
"""Partial scopes are bounded too, if the bucket's table has at most this many cells (it is summed once per scope)."""


@dataclass(frozen=True, slots=True, eq=False)
class Relaxation:
    """The Lagrangian relaxation at some multipliers, solved forwards and backwards, and the least usages.

    ``threshold`` is that of the Lagrangian: cost threshold + multipliers . limits. ``cost_rests`` are completions
    of the least cost and ``usage_rests[k]`` of the least usage of budget k, all on the same plan.
    """

    multipliers: Array
    forward: Elimination
    rests: tuple[Factor, ...]
    cost_rests: tuple[Factor, ...]
    usage_rests: tuple[tuple[Factor, ...], ...]
    largest_allowed: tuple[float, ...]
    threshold: float
    cost_threshold: float


def eliminate_labels(
    core: Core, relaxation: Relaxation, max_rows: int, check: Check
) -> tuple[tuple[int, ...] | None, int]:
    """The cheapest choice below the threshold within the budgets, or None if there is none; and the label count.

    Raises:
        joins.TooManyRowsError: a label set outgrew ``max_rows``.
    """
    plan = relaxation.forward.plan
    children = plan.children()
    labels: list[Labels | None] = [None] * len(plan.order)
    num_labels = 0
    for variable in plan.order:
        inputs = {child: made for child in children[variable] if (made := labels[child]) is not None}
        rows = _bucket_rows(core, relaxation, variable, inputs, max_rows, check)
        made = _close(relaxation, variable, rows)
        if not len(made.cost):
            return None, num_labels
        labels[variable] = made
        num_labels += len(made.cost)
        check()
    last = labels[plan.order[-1]]
    assert last is not None
    return _decode(labels, plan.order[-1], int(np.lexsort((*last.usage.T, last.cost))[0])), num_labels


def _bucket_rows(
    core: Core, relaxation: Relaxation, variable: int, inputs: dict[int, Labels], max_rows: int, check: Check
) -> Rows:
    """All rows of the bucket of ``variable`` that the bound lets through: choices of v, S_v and child labels."""
    forward = relaxation.forward
    separator, sizes = forward.plan.separators[variable], forward.sizes
    rows = start_rows(core, variable)
    cells = sizes[variable] * float(np.prod([float(sizes[v]) for v in separator]))
    # Children with few labels first: they restrict the rows most.
    for child in sorted(inputs, key=lambda child: (len(inputs[child].cost), child)):
        rows = _bounded(relaxation, variable, rows, cells, check)
        allowance = relaxation.threshold - rows.bound
        before = rows.scope
        rows = join(rows, child, inputs[child], forward.plan.separators[child], sizes, allowance, max_rows)
        for other in rows.scope:
            if other not in before:
                rows = attach_edge(core, rows, variable, other)
    for other in separator:
        if other not in rows.scope:
            rows = _bounded(relaxation, variable, rows, cells, check)
            rows = attach_edge(core, extend(rows, other, sizes[other], max_rows), variable, other)
    return rows


def _bounded(relaxation: Relaxation, variable: int, rows: Rows, cells: float, check: Check) -> Rows:
    """Rows of a partial scope that may still stay below the threshold; sets their ``bound`` (without excess)."""
    if cells > MAX_PREFIX_CELLS:
        return rows
    forward = relaxation.forward
    factors = [*forward.buckets[variable], relaxation.rests[variable]]
    best = project(factors, rows.scope, forward.sizes, check).array
    bound = best[tuple(rows.columns[v] for v in rows.scope)] + rows.excess
    return rows.with_bound(bound).take(np.flatnonzero(bound < relaxation.threshold))


def _close(relaxation: Relaxation, variable: int, rows: Rows) -> Labels:
    """Apply the rules to complete rows and make them the labels of ``variable``."""
    separator = relaxation.forward.plan.separators[variable]
    place = tuple(rows.columns[v] for v in separator)
    lagrangian = rows.cost + rows.usage @ relaxation.multipliers
    keep = np.isfinite(rows.cost)
    keep &= lagrangian + relaxation.rests[variable].array[place] < relaxation.threshold
    keep &= rows.cost + relaxation.cost_rests[variable].array[place] < relaxation.cost_threshold
    for k, limit in enumerate(relaxation.largest_allowed):
        keep &= rows.usage[:, k] + relaxation.usage_rests[k][variable].array[place] <= limit
    kept = np.flatnonzero(keep)
    key = _keys(rows, separator, relaxation.forward.sizes)
    kept = kept[undominated(key[kept], rows.cost[kept], rows.usage[kept])]
    rows, key, lagrangian = rows.take(kept), key[kept], lagrangian[kept]
    message = relaxation.forward.messages[variable].array
    excess = lagrangian - message[tuple(rows.columns[v] for v in separator)]
    columns = {v: rows.columns[v] for v in separator}
    return Labels(columns, rows.cost, rows.usage, excess, rows.columns[variable], rows.origins)


def _keys(rows: Rows, separator: Sequence[int], sizes: Sequence[int]) -> Indices:
    """One integer per choice of the separator."""
    key = np.zeros(len(rows.cost), dtype=np.int64)
    for v in separator:
        key = key * sizes[v] + rows.columns[v]
    return key


def _decode(labels: Sequence[Labels | None], last: int, index: int) -> tuple[int, ...]:
    """Follow the pointers of one label of the last variable."""
    choices = [0] * len(labels)
    open_labels = [(last, index)]
    while open_labels:
        variable, index = open_labels.pop()
        made = labels[variable]
        assert made is not None
        choices[variable] = int(made.option[index])
        open_labels.extend((child, int(origin[index])) for child, origin in made.origins.items())
    return tuple(choices)
