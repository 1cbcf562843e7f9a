"""The cheapest choice within the budget: Lagrangian bound, exact fixing, and an integer program of what remains."""

from __future__ import annotations

import numpy as np

from search import integer_program
from search.core import Core
from search.elimination import plan_elimination
from search.lagrangian import Dual, drop_above, maximise
from search.reductions import EmptyDomainError, drop_dead_ends, reduce_core
from search.state import Search

FRACTION_POWERS = (3, 2, 1, 0)
"""Thresholds lie at 1/64, 1/16, 1/4 and all of the way from what is proven to the best choice known."""

FEW_COLUMNS = 4_000
"""A program of so few columns is solved at once, without lower thresholds before it."""


def solve_budgeted(search: Search, core: Core) -> None:
    """The optimum of ``core`` within ``search.limit`` goes into ``search``, unless a better choice is there already.

    Thresholds rise from just above the Lagrangian bound: options that no choice below the threshold can contain are
    dropped, and if a choice below it turns up, it is the optimum. So the work depends on the distance from the bound to
    the optimum, not on how good the best choice known is. Cores that elimination has no memory for go to the solver
    as they are.
    """
    core = reduce_core(core)
    if plan_elimination(core.sizes, core.pairs()).is_affordable:
        dual = maximise(core, search.limit, search.planes, search.offer, search.learn)
        for power in FRACTION_POWERS:
            if dual is None or search.bound >= search.cutoff:
                break
            threshold = _next_threshold(search, dual, power)
            smaller = _below(search, dual, threshold)
            if smaller is not None:
                search_program(search, smaller, min(threshold, search.cutoff))
            search.learn(threshold)
    else:
        search_program(search, core, search.cutoff)


def search_program(search: Search, core: Core, ceiling: float) -> None:
    """Offer the best choice of ``core`` that costs less than ``ceiling``, found as an integer program.

    What the solver takes to be within the budget by its tolerances, and is not, is excluded and searched anew.
    """
    excluded: list[tuple[int, ...]] = []
    while True:
        found = integer_program.solve(core, search.limit, cutoff=ceiling, excluded=excluded)
        if found is None:
            return
        search.consider(core.original(found))
        if np.isfinite(search.objective(core.original(found))):
            return
        excluded.append(found)


def _next_threshold(search: Search, dual: Dual, power: int) -> float:
    """A cost above the bound, ``4 ** -power`` of the way to the cutoff; further if that still leaves few columns.

    The cutoff, or above every choice if none is known, for power 0.
    """
    top = search.cutoff if np.isfinite(search.cutoff) else _largest(dual.core)
    for larger in range(power + 1):
        threshold = search.bound + (top - search.bound) / 4.0**larger if larger else search.cutoff
        smaller = _below(search, dual, threshold)
        if smaller is None or _num_columns(smaller) <= FEW_COLUMNS:
            break
    return threshold


def _num_columns(core: Core) -> int:
    """Columns of the core as an integer program."""
    return sum(core.sizes) + sum(core.sizes[a] * core.sizes[b] for a, b in core.pairs())


def _largest(core: Core) -> float:
    """No allowed choice costs more."""
    tables = [*core.costs.unaries, *core.costs.edges.values()]
    return float(sum(table[np.isfinite(table)].max() for table in tables if np.isfinite(table).any()))


def _below(search: Search, dual: Dual, threshold: float) -> Core | None:
    """The options that a choice below a cost threshold may have, without dead ends; None if a variable has none."""
    core = drop_above(dual, threshold + dual.multiplier * search.limit)
    if core is None:
        return None
    try:
        return drop_dead_ends(core)
    except EmptyDomainError:
        return None
