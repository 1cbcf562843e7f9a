"""Find the cheapest choice within a budget: a Lagrangian bound, exact fixing, then an integer program of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from search import integer_program
from search.core import Core
from search.elimination import plan_elimination
from search.lagrangian import Dual, Plane, drop_above, maximize
from search.reductions import EmptyDomainError, drop_dead_ends, reduce_core

RELATIVE_CUTOFF = 1e-12
"""A choice must beat the best known one by this fraction; smaller differences are rounding."""

FRACTION_POWERS = (3, 2, 1, 0)
"""The thresholds, at 1/64, 1/16, 1/4 and all of the distance from the proven bound to the best known choice."""

FEW_COLUMNS = 4_000
"""Programs with at most this many columns are solved at once, without trying lower thresholds first."""


@dataclass(slots=True)
class Search:
    """The state of one search: the best choice so far and the proven lower bound.

    Args:
        objective: maps an assignment (original option indices) to its objective, ``inf`` over budget.
        limit: of the core's budget.

    ``bound`` is the best proven lower bound, and ``planes`` are those of ``lagrangian``.
    """

    objective: Callable[[tuple[int, ...]], float]
    limit: float = np.inf
    planes: list[Plane] = field(default_factory=list)
    best: float = np.inf
    assignment: tuple[int, ...] | None = None
    bound: float = -np.inf

    @property
    def cutoff(self) -> float:
        """Return the objective that a better choice must stay below."""
        return self.best - RELATIVE_CUTOFF * abs(self.best) if np.isfinite(self.best) else np.inf

    def offer(self, core: Core, assignment: Sequence[int]) -> float:
        """Consider a choice among the options of ``core``; return the cutoff."""
        self.consider(core.original(assignment))
        return self.cutoff

    def consider(self, assignment: tuple[int, ...]) -> None:
        """Keep a choice if it is the best so far; of equal ones the first stays."""
        value = self.objective(assignment)
        if value < self.best:
            self.best, self.assignment = value, assignment

    def learn(self, bound: float) -> None:
        """Raise the proven bound: no choice costs less than ``bound``, or than the best known one."""
        self.bound = max(self.bound, min(bound, self.best))


def solve_budgeted(search: Search, core: Core) -> None:
    """Put the optimum of ``core`` within ``search.limit`` into ``search``, unless a better choice is already there.

    Thresholds rise from just above the Lagrangian bound. For each one, options that no cheaper choice can contain are
    dropped. A choice found below the threshold is the optimum. So the work depends on the distance from the bound to
    the optimum, not on how good the best known choice is. A core too large for elimination goes straight to the integer
    program.
    """
    core = reduce_core(core)
    if plan_elimination(core.sizes, core.pairs()).is_affordable:
        dual = maximize(core, search.limit, search.planes, search.offer, search.learn)
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
    """Solve ``core`` as an integer program and offer the best choice that costs less than ``ceiling``.

    The solver's tolerances can accept a choice that exceeds the budget. Such a choice is excluded and the program is
    solved again.
    """
    excluded: list[tuple[int, ...]] = []
    while True:
        assignment = integer_program.solve(core, search.limit, cutoff=ceiling, excluded=excluded)
        if assignment is None:
            return
        search.consider(core.original(assignment))
        if np.isfinite(search.objective(core.original(assignment))):
            return
        excluded.append(assignment)


def _next_threshold(search: Search, dual: Dual, power: int) -> float:
    """Return a cost ``4 ** -power`` of the way from the bound to the cutoff, or further while few columns remain.

    For power 0 return the cutoff, or a cost above every choice if no choice is known.
    """
    top = search.cutoff if np.isfinite(search.cutoff) else _largest(dual.core)
    for larger in range(power + 1):
        threshold = search.bound + (top - search.bound) / 4.0**larger if larger else search.cutoff
        smaller = _below(search, dual, threshold)
        if smaller is None or _num_columns(smaller) <= FEW_COLUMNS:
            break
    return threshold


def _num_columns(core: Core) -> int:
    """Count the columns of the core as an integer program."""
    return sum(core.sizes) + sum(core.sizes[a] * core.sizes[b] for a, b in core.pairs())


def _largest(core: Core) -> float:
    """Return a cost that no allowed choice exceeds."""
    tables = [*core.costs.unaries, *core.costs.edges.values()]
    return float(sum(table[np.isfinite(table)].max() for table in tables if np.isfinite(table).any()))


def _below(search: Search, dual: Dual, threshold: float) -> Core | None:
    """Keep the options of choices below a cost threshold, without dead ends; None if a variable has none."""
    core = drop_above(dual, threshold + dual.multiplier * search.limit)
    if core is None:
        return None
    try:
        return drop_dead_ends(core)
    except EmptyDomainError:
        return None
