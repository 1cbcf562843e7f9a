"""One option per variable at least cost, under budgets that couple all variables. Exact.

The problem, with x_v the option of variable v:

    minimise    sum_v c_v(x_v) + sum_(v,w) c_vw(x_v, x_w)
    subject to  sum_v u_vk(x_v) + sum_(v,w) u_vwk(x_v, x_w) <= limit_k     for every budget k

``solve`` works in this order, and stops at the first step that proves its answer:

1. ``core.build_core`` merges parallel edges and self loops; ``reductions.reduce_core`` drops options that are
   forbidden, without an allowed partner, or dominated in cost and in the usage of every budget.
2. Without the budgets, ``elimination.eliminate`` gives the optimum

       m_v(S_v) = min over x_v of the sum of all tables in v's bucket

   An optimum that meets the budgets is the answer.
3. The same with the usage of each budget in place of the cost: a least usage above the limit is ``InfeasibleError``.
4. ``lagrangian.maximise``: L(l) = min [cost + sum_k l_k (usage_k - limit_k)], maximised over l >= 0, bounds the
   optimum from below. ``lagrangian.drop_above`` removes option p of v if L with x_v = p fixed reaches a known choice.
5. ``integer_program.solve`` gives what is left to HiGHS; this is where the budget constraint itself is imposed.

Where the tables of an elimination would be too large, the integer program stands in for it, without a Lagrangian.

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

from search.budgeted import search_program, solve_budgeted
from search.core import Core, build_core
from search.elimination import decode, eliminate, plan_elimination
from search.lagrangian import Plane
from search.problem import InfeasibleError, Problem, Solution, evaluate
from search.reductions import EmptyDomainError, reduce_core
from search.state import Search


def solve(problem: Problem) -> Solution:
    """The cheapest choice within all budgets.

    Raises:
        InfeasibleError: no choice is allowed; says which budget fails and by how much, or which variable has no option.
    """
    full = build_core(problem)
    active = [k for k, budget in enumerate(problem.budgets) if np.isfinite(budget.limit)]
    core, removed = Core(full.costs, tuple(full.usages[k] for k in active), full.options).shifted()
    limits = tuple(problem.budgets[k].largest_allowed - part for k, part in zip(active, removed, strict=True))
    search = Search(partial(_cost_if_fits, problem), limits)
    _ignore_budgets(problem, full, active, search)
    if search.assignment is None:
        _find_least_usages(problem, full, active, search)
        solve_budgeted(search, core)
    if search.assignment is None:
        raise InfeasibleError.jointly([problem.budgets[k] for k in active])
    return Solution(search.assignment, *evaluate(problem, search.assignment))


def _ignore_budgets(problem: Problem, full: Core, active: Sequence[int], search: Search) -> None:
    """Step 2: offer the optimum without budgets, and learn its bound and plane."""
    free = Search(lambda assignment: evaluate(problem, assignment)[0], ())
    try:
        _minimise(free, full.alone(full.costs))
    except EmptyDomainError as error:
        raise InfeasibleError.forbidden([problem.variables[error.variable].name]) from None
    if free.assignment is None:
        ends = {end for edge in problem.edges if np.isinf(edge.costs).any() for end in (edge.a, edge.b)}
        raise InfeasibleError.forbidden([problem.variables[v].name for v in sorted(ends)])
    search.consider(free.assignment)
    search.planes.append(_plane(problem, free.assignment, active))
    search.learn(free.best)


def _find_least_usages(problem: Problem, full: Core, active: Sequence[int], search: Search) -> None:
    """Step 3: offer the choice that uses least of each budget.

    Raises:
        InfeasibleError: that is more than its limit.
    """
    for k in active:
        least = Search(partial(_usage_if_allowed, problem, k), ())
        _minimise(least, full.alone(full.usage_only(k)))
        assert least.assignment is not None, "there was an allowed choice without budgets"
        if not problem.budgets[k].allows(least.best):
            raise InfeasibleError.over_budget(problem.budgets[k], least.best, least.assignment)
        search.consider(least.assignment)
        search.planes.append(_plane(problem, least.assignment, active))


def _minimise(search: Search, core: Core) -> None:
    """Offer the optimum of a core without budgets.

    Raises:
        EmptyDomainError: infinite costs leave a variable without options.
    """
    core = reduce_core(core)
    plan = plan_elimination(core.sizes, core.pairs())
    if not plan.is_affordable:
        search_program(search, core, np.inf)
        return
    forward = eliminate(core.costs, plan)
    if np.isfinite(forward.value):
        search.offer(core, decode(forward))


def _fits(problem: Problem, assignment: Sequence[int]) -> bool:
    """Whether a choice keeps within every budget."""
    _, usage = evaluate(problem, assignment)
    return all(budget.allows(used) for budget, used in zip(problem.budgets, usage, strict=True))


def _cost_if_fits(problem: Problem, assignment: Sequence[int]) -> float:
    """The objective, ``inf`` over budget."""
    return evaluate(problem, assignment)[0] if _fits(problem, assignment) else np.inf


def _usage_if_allowed(problem: Problem, budget_index: int, assignment: Sequence[int]) -> float:
    """The usage of one budget, ``inf`` for forbidden choices."""
    objective, usage = evaluate(problem, assignment)
    return usage[budget_index] if np.isfinite(objective) else np.inf


def _plane(problem: Problem, assignment: Sequence[int], active: Sequence[int]) -> Plane:
    """What the dual needs of a choice known before it starts."""
    objective, usage = evaluate(problem, assignment)
    return objective, tuple(usage[k] - problem.budgets[k].largest_allowed for k in active)
