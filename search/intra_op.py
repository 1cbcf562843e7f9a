"""One option per variable at least cost, under a budget that couples all variables. Exact.

The problem, with x_v the option of variable v:

    minimise    sum_v c_v(x_v) + sum_(v,w) c_vw(x_v, x_w)
    subject to  sum_v u_v(x_v) <= limit

``solve`` works in this order, and stops at the first step that proves its answer:

1. ``core.build_core`` merges parallel edges and self loops; ``reductions.reduce_core`` drops options that are
   forbidden, without an allowed partner, or dominated in cost and in usage.
2. Without the budget, ``elimination.eliminate`` gives the optimum

       m_v(S_v) = min over x_v of the sum of all tables in v's bucket

   An optimum that meets the budget is the answer.
3. The same with the usage in place of the cost: a least usage above the limit is ``InfeasibleError``.
4. ``lagrangian.maximise``: L(l) = min [cost + l (usage - limit)], maximised over l >= 0, bounds the
   optimum from below. ``lagrangian.drop_above`` removes option p of v if L with x_v = p fixed reaches a known choice.
5. ``integer_program.solve`` gives what is left to HiGHS; this is where the budget constraint itself is imposed.

Where the tables of an elimination would be too large, the integer program stands in for it, without a Lagrangian;
without a budget it gets what ``contraction.contract`` leaves.

Exactness. Every step compares float64 sums; a choice is discarded only when its bound comes within a relative 1e-12 of
a known choice, or by HiGHS, which tells objectives apart to 1e-10 of the range between the least of all tables and the
best known choice. Objective and usage of the answer come from ``problem.evaluate``, so the objective is optimal to a
relative 1e-9 for sums without catastrophic cancellation, and a budget holds to ``problem.USAGE_TOLERANCE``.

Ties. Of equal options the lowest index stays; elimination decodes the last eliminated variable first and takes the
lowest option; among assignments of equal cost the first found stays. There is no randomness, no thread and no hash
order: equal problems give equal assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from search import integer_program
from search.budgeted import solve_budgeted
from search.contraction import contract
from search.core import Core, build_core, shifted, usage_only
from search.elimination import Plan, decode, eliminate, plan_elimination
from search.problem import InfeasibleError, Problem, Solution, evaluate, largest_allowed
from search.reductions import EmptyDomainError, reduce_core
from search.state import Search


def solve(problem: Problem) -> Solution:
    """The cheapest choice within the budget.

    Raises:
        InfeasibleError: no choice is allowed; says by how much the budget fails, or which variable has no option.
    """
    full, search = build_core(problem), Search(partial(_cost_if_fits, problem))
    free = _fastest(problem, full)
    search.consider(free)
    search.learn(evaluate(problem, free)[0])
    if search.assignment is None:
        least = _leanest(problem, full)
        search.consider(least)
        core, removed = shifted(full)
        allowed = largest_allowed(problem.limit)
        search.limit = allowed - removed
        for objective, usage in (evaluate(problem, free), evaluate(problem, least)):
            search.planes.append((objective, usage - allowed))
        solve_budgeted(search, core)
    assert search.assignment is not None, "the leanest choice is within the budget"
    return Solution(search.assignment, *evaluate(problem, search.assignment))


def _fastest(problem: Problem, full: Core) -> tuple[int, ...]:
    """Step 2: the optimum without the budget.

    Raises:
        InfeasibleError: infinite costs forbid every choice.
    """
    search = Search(lambda assignment: evaluate(problem, assignment)[0])
    try:
        _minimise(search, full.without_budget())
    except EmptyDomainError as error:
        raise InfeasibleError.forbidden([problem.variables[error.variable].name]) from None
    if search.assignment is None:
        ends = {end for edge in problem.edges if np.isinf(edge.costs).any() for end in (edge.a, edge.b)}
        raise InfeasibleError.forbidden([problem.variables[v].name for v in sorted(ends)])
    return search.assignment


def _leanest(problem: Problem, full: Core) -> tuple[int, ...]:
    """Step 3: the choice that uses least of the budget.

    Raises:
        InfeasibleError: that is more than the limit.
    """
    search = Search(partial(_usage_if_allowed, problem))
    _minimise(search, usage_only(full))
    assert search.assignment is not None, "there was an allowed choice without the budget"
    if not problem.allows(search.best):
        raise InfeasibleError.over_budget(problem.limit, search.best, search.assignment)
    return search.assignment


def _minimise(search: Search, core: Core) -> None:
    """Offer the optimum of a core without a budget.

    Raises:
        EmptyDomainError: infinite costs leave a variable without options.
    """
    core = reduce_core(core)
    plan = plan_elimination(core.sizes, core.pairs())
    found = _eliminated(core, plan) if plan.is_affordable else _contracted(core)
    if found is not None:
        search.offer(core, found)


def _eliminated(core: Core, plan: Plan) -> tuple[int, ...] | None:
    """The optimum, None where infinite costs forbid every choice."""
    forward = eliminate(core.costs, plan)
    return decode(forward) if np.isfinite(forward.value) else None


def _contracted(core: Core) -> tuple[int, ...] | None:
    """The same where eliminating all variables takes too much: some are, and the integer program finds the rest."""
    contraction = contract(core)
    try:
        smaller = reduce_core(contraction.core)
    except EmptyDomainError:
        return None
    plan = plan_elimination(smaller.sizes, smaller.pairs())
    if plan.is_affordable:
        found = _eliminated(smaller, plan)
    else:
        found = integer_program.solve(smaller, np.inf, cutoff=np.inf, excluded=())
    return None if found is None else contraction.completed(smaller.original(found))


def _cost_if_fits(problem: Problem, assignment: Sequence[int]) -> float:
    """The objective, ``inf`` over budget."""
    objective, usage = evaluate(problem, assignment)
    return objective if problem.allows(usage) else np.inf


def _usage_if_allowed(problem: Problem, assignment: Sequence[int]) -> float:
    """The usage, ``inf`` for forbidden choices."""
    objective, usage = evaluate(problem, assignment)
    return usage if np.isfinite(objective) else np.inf
