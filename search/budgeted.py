"""One node of the search under budgets: Lagrangian bound, reduced-cost fixing, then labels below a threshold."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from search.core import Core
from search.elimination import completions, eliminate, plan_elimination
from search.joins import TooManyRowsError
from search.labels import Relaxation, eliminate_labels
from search.lagrangian import Dual, drop_above, maximise
from search.problem import Array
from search.reductions import EmptyDomainError, drop_dead_ends
from search.state import Node, Search

MAX_ROWS = 2_000_000
"""Rows of one join: about 200 MB with their columns."""

EXPENSIVE_CELLS = 3e7
"""About 0.05 s per elimination, of which the dual alone takes some ten."""

MIN_SAVING = 4.0
FIRST_COARSE_FRACTION = 1 / 16
COARSE_GAP_FRACTIONS = (0.5, 0.05)
FIRST_FRACTION = 1 / 64
FRACTION_GROWTH = 4.0
FIRST_RELATIVE_STEP = 1e-3
STEP_GROWTH = 8.0


def solve_budgeted(search: Search, node: Node) -> tuple[Array, ...] | None:
    """Search ``node.core`` completely, or return margins to split it by (``node`` is then tightened).

    When one elimination of the node is expensive, multipliers near the best must do at first, and the options that pass
    a threshold a little above their bound are searched by themselves: usually few, and if they hold a choice below the
    threshold, theirs is the optimum. So expensive relaxations are solved few times, their cheap remainder many times.
    """
    plan = plan_elimination(node.core.sizes, node.core.pairs())
    if plan.total_cells > EXPENSIVE_CELLS:
        for gap_fraction in COARSE_GAP_FRACTIONS:
            if _search_coarsely(search, node, gap_fraction, plan.total_cells / MIN_SAVING):
                return None
    return _search_below(search, node, np.inf)


def _search_coarsely(search: Search, node: Node, gap_fraction: float, max_cells: float) -> bool:
    """Whether the node could be settled with coarse multipliers and cores of at most ``max_cells``."""

    def learn(value: float) -> None:
        node.bound = max(node.bound, value)

    dual = maximise(
        node.core, search.limits, node.multipliers, search.planes, search.offer, learn, search.check, gap_fraction
    )
    if dual is None:
        return True
    node.multipliers = dual.multipliers
    for threshold in _thresholds(dual.core, dual.value, search.cutoff, FIRST_COARSE_FRACTION):
        smaller = _below(dual, threshold + float(np.dot(dual.multipliers, search.limits)))
        if smaller is not None:
            if plan_elimination(smaller.sizes, smaller.pairs()).total_cells > max_cells:
                return False
            if _search_below(search, Node(smaller, dual.value, dual.multipliers), threshold) is not None:
                return False
            if search.best <= threshold:
                return True
        learn(threshold)
        if node.bound >= search.cutoff:
            return True
    return True


def _search_below(search: Search, node: Node, ceiling: float) -> tuple[Array, ...] | None:
    """Find the node's optimum if it lies below the ceiling and below the cutoff; margins if label sets grow too large.

    Thresholds rise from just above the Lagrangian bound: options and labels that no choice below the threshold can
    contain are dropped, and if a choice below it turns up, it is the optimum. So the work depends on the distance
    from the bound to the optimum, not on how good the incumbent is.
    """

    def offer(core: Core, choices: tuple[int, ...]) -> float:
        return min(search.offer(core, choices), ceiling)

    def learn(value: float) -> None:
        node.bound = max(node.bound, value)

    dual = maximise(node.core, search.limits, node.multipliers, search.planes, offer, learn, search.check)
    if dual is None:
        return None
    node.multipliers = dual.multipliers
    for threshold in _thresholds(dual.core, dual.value, min(search.cutoff, ceiling), FIRST_FRACTION):
        try:
            choices = _best_below(search, dual, threshold)
        except TooManyRowsError:
            offset = float(np.dot(dual.multipliers, search.limits))
            masks = [margin < min(search.cutoff, ceiling) + offset for margin in dual.margins]
            node.core = dual.core.keep(masks)
            return tuple(margin[mask] for margin, mask in zip(dual.margins, masks, strict=True))
        if choices is not None:
            search.consider(choices)
            return None
        learn(threshold)
    return None


def _thresholds(core: Core, bound: float, cutoff: float, fraction: float) -> Iterator[float]:
    """Rising cost thresholds; the last one is the cutoff, or above every allowed choice if none is known."""
    if np.isfinite(cutoff):
        while fraction < 1.0:
            yield bound + fraction * (cutoff - bound)
            fraction *= FRACTION_GROWTH
    else:
        ceiling = _largest(core)
        step = FIRST_RELATIVE_STEP * max(abs(bound), 1e-6 * abs(ceiling))
        while 0.0 < step < ceiling - bound:
            yield bound + step
            step *= STEP_GROWTH
    yield cutoff


def _largest(core: Core) -> float:
    """No allowed choice costs more."""
    tables = [*core.costs.unaries, *core.costs.edges.values()]
    return float(sum(table[np.isfinite(table)].max() for table in tables if np.isfinite(table).any()))


def _below(dual: Dual, lagrangian_threshold: float) -> Core | None:
    """The options that pass a threshold, without dead ends; None if a variable has none."""
    core = drop_above(dual, lagrangian_threshold)
    if core is None:
        return None
    try:
        return drop_dead_ends(core)
    except EmptyDomainError:
        return None


def _best_below(search: Search, dual: Dual, threshold: float) -> tuple[int, ...] | None:
    """The cheapest choice of the node below a cost threshold within the budgets, as original option indices."""
    lagrangian_threshold = threshold + float(np.dot(dual.multipliers, search.limits))
    core = _below(dual, lagrangian_threshold)
    if core is None:
        return None
    plan = plan_elimination(core.sizes, core.pairs())
    forward = eliminate(core.weighted(dual.multipliers), plan, search.check)
    usage_rests = []
    for k in range(len(search.limits)):
        usage = eliminate(core.usage_only(k), plan, search.check)
        if not usage.value <= search.limits[k]:
            return None
        usage_rests.append(completions(usage, search.check))
    search.num_eliminations += 2 + len(search.limits)
    search.core_options = max(search.core_options, sum(core.sizes))
    relaxation = Relaxation(
        multipliers=np.array(dual.multipliers),
        forward=forward,
        rests=completions(forward, search.check),
        cost_rests=completions(eliminate(core.costs, plan, search.check), search.check),
        usage_rests=tuple(usage_rests),
        largest_allowed=search.limits,
        threshold=lagrangian_threshold,
        cost_threshold=threshold,
    )
    choices, num_labels = eliminate_labels(core, relaxation, MAX_ROWS, search.check)
    search.num_labels += num_labels
    return None if choices is None else core.original(choices)
