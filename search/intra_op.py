"""Choose one option per variable at least cost, under a budget that couples all variables. Exact.

The problem, with x_v the option of variable v:

    minimize    sum_v c_v(x_v) + sum_(v,w) c_vw(x_v, x_w)
    subject to  sum_v u_v(x_v) <= limit

``solve`` runs these steps and stops at the first one that proves its answer:

1. ``core.build_core`` merges parallel edges and self loops; ``reductions.reduce_core`` drops options that are
   forbidden, without an allowed partner, or dominated in cost and in usage.
2. Without the budget, ``elimination.eliminate`` gives the optimum

       m_v(S_v) = min over x_v of the sum of all tables in v's bucket

   An optimum that meets the budget is the answer.
3. The same with the usage in place of the cost. A least usage above the limit raises ``InfeasibleError``.
4. ``lagrangian.maximize``: L(l) = min [cost + l (usage - limit)], maximized over l >= 0, bounds the
   optimum from below. ``lagrangian.drop_above`` removes option p of v if L with x_v = p fixed reaches a known choice.
5. ``integer_program.solve`` gives the rest to HiGHS, which imposes the budget constraint itself.

Where the tables of an elimination would be too large, the integer program replaces it, without a Lagrangian. Without a
budget it solves the core that ``contraction.contract`` leaves.

Exactness. Every step compares float64 sums. A choice is discarded only when its bound comes within a relative 1e-12 of
a known choice, or by HiGHS, which tells objectives apart to 1e-10 of the range between the least of all tables and the
best known choice. Objective and usage of the answer come from ``problem.evaluate``. So the objective is optimal to a
relative 1e-9 for sums without catastrophic cancellation, and a budget is kept to ``problem.USAGE_TOLERANCE``.

Ties. Of equal options the lowest index stays. Elimination decodes the last eliminated variable first and takes the
lowest option. Among assignments of equal cost the first one stays. Nothing depends on randomness, threads or hash
order: equal problems give equal assignments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from search import integer_program
from search.budgeted import Search, solve_budgeted
from search.contraction import contract
from search.core import Core, build_core, shifted, usage_only
from search.elimination import Plan, decode, eliminate, plan_elimination
from search.problem import InfeasibleError, Problem, Solution, evaluate, largest_allowed
from search.reductions import EmptyDomainError, reduce_core


def solve(problem: Problem) -> Solution:
    """Return the cheapest choice within the budget.

    Raises:
        InfeasibleError: no choice is allowed. It names the missing budget, or the variable without options.
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
    """Run step 2: return the optimum without the budget.

    Raises:
        InfeasibleError: infinite costs forbid every choice.
    """
    search = Search(lambda assignment: evaluate(problem, assignment)[0])
    try:
        _minimize(search, full.without_budget())
    except EmptyDomainError as error:
        raise InfeasibleError.forbidden([problem.variables[error.variable].name]) from None
    if search.assignment is None:
        ends = {end for edge in problem.edges if np.isinf(edge.costs).any() for end in (edge.a, edge.b)}
        raise InfeasibleError.forbidden([problem.variables[v].name for v in sorted(ends)])
    return search.assignment


def _leanest(problem: Problem, full: Core) -> tuple[int, ...]:
    """Run step 3: return the choice that uses least of the budget.

    Raises:
            InfeasibleError: even that choice exceeds the limit.
    """
    search = Search(partial(_usage_if_allowed, problem))
    _minimize(search, usage_only(full))
    assert search.assignment is not None, "there was an allowed choice without the budget"
    if not problem.allows(search.best):
        raise InfeasibleError.over_budget(problem.limit, search.best, search.assignment)
    return search.assignment


def _minimize(search: Search, core: Core) -> None:
    """Offer the optimum of a core without a budget.

    Raises:
        EmptyDomainError: infinite costs leave a variable without options.
    """
    core = reduce_core(core)
    plan = plan_elimination(core.sizes, core.pairs())
    assignment = _eliminated(core, plan) if plan.is_affordable else _contracted(core)
    if assignment is not None:
        search.offer(core, assignment)


def _eliminated(core: Core, plan: Plan) -> tuple[int, ...] | None:
    """Return the optimum, or None where infinite costs forbid every choice."""
    forward = eliminate(core.costs, plan)
    return decode(forward) if np.isfinite(forward.value) else None


def _contracted(core: Core) -> tuple[int, ...] | None:
    """Return the same for cores too large to eliminate: contract first, then solve an integer program."""
    contraction = contract(core)
    try:
        smaller = reduce_core(contraction.core)
    except EmptyDomainError:
        return None
    plan = plan_elimination(smaller.sizes, smaller.pairs())
    if plan.is_affordable:
        assignment = _eliminated(smaller, plan)
    else:
        assignment = integer_program.solve(smaller, np.inf, cutoff=np.inf, excluded=())
    return None if assignment is None else contraction.completed(smaller.original(assignment))


def _cost_if_fits(problem: Problem, assignment: Sequence[int]) -> float:
    """Return the objective, ``inf`` over budget."""
    objective, usage = evaluate(problem, assignment)
    return objective if problem.allows(usage) else np.inf


def _usage_if_allowed(problem: Problem, assignment: Sequence[int]) -> float:
    """Return the usage, ``inf`` for forbidden choices."""
    objective, usage = evaluate(problem, assignment)
    return usage if np.isfinite(objective) else np.inf
