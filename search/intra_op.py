"""One option per variable at least cost, under budgets that couple all variables. Exact.

The problem, with x_v the option of variable v:

    minimise    sum_v c_v(x_v) + sum_(v,w) c_vw(x_v, x_w)
    subject to  sum_v u_vk(x_v) + sum_(v,w) u_vwk(x_v, x_w) <= limit_k     for every budget k

``solve`` works in this order, and stops at the first step that proves its answer:

1. ``core.build_core`` merges parallel edges and self loops; ``reductions.reduce_core`` drops options that are
   forbidden, without an allowed partner, or dominated in cost and in the usage of every budget.
2. Without the budgets, ``elimination.eliminate`` gives the optimum

       m_v(S_v) = min over x_v of the sum of all tables in v's bucket

   If its tables are large, ``weak.relax_weakly`` (``condense``, then ``bounds.dual_ascent``) first drops every option
   whose bound reaches a known choice, and if they do not fit at all, ``branching`` splits variables. An optimum that
   meets the budgets is the answer.
3. ``min_usage`` per budget: a least usage above the limit is ``InfeasibleError``.
4. ``lagrangian.maximise``: L(l) = min [cost + sum_k l_k (usage_k - limit_k)], maximised over l >= 0, bounds the
   optimum from below. ``lagrangian.drop_above`` removes option p of v if L with x_v = p fixed reaches a known choice.
5. ``labels.eliminate_labels`` repeats the elimination with sets of Pareto-optimal (cost, usage) labels instead of
   minima; this is where the budget constraint itself is imposed (``labels._close``). Sets that outgrow memory make
   ``branching`` split a variable.

Exactness. Every step compares float64 sums; a choice is discarded only when its bound comes within a relative 1e-12 of
a known choice. Objective and usage of the answer come from ``problem.evaluate``, so the objective is optimal to a
relative 1e-9 for sums without catastrophic cancellation, and a budget holds to ``problem.USAGE_TOLERANCE``.

Ties. Of equal options the lowest index stays; elimination decodes the last eliminated variable first and takes the
lowest option; among choices of equal cost the first found stays. There is no randomness, no thread and no hash order:
equal problems give equal choices (unless a time limit strikes).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from search.branching import MAX_MESSAGE_CELLS, MAX_TOTAL_CELLS, branch_and_bound
from search.core import Core, build_core
from search.deadline import deadline
from search.elimination import Check, completions, eliminate, marginals, plan_elimination
from search.lagrangian import Plane
from search.problem import (
    Array,
    InfeasibleError,
    Problem,
    Solution,
    TimeLimitError,
    evaluate,
)
from search.state import Outcome, Search


def solve(problem: Problem, *, time_limit_seconds: float | None = None) -> Solution:
    """The cheapest choice within all budgets.

    Args:
        problem: what to solve.
        time_limit_seconds: None means until proven. When it strikes, the best choice known is returned with its true
            ``lower_bound`` and "time limit" in ``method``.

    Raises:
        InfeasibleError: no choice is allowed; says which budget fails and by how much, or which variable has no option.
        TimeLimitError: the limit struck before any allowed choice was known.
    """
    check = deadline(time_limit_seconds)
    core = build_core(problem)
    free = Search(lambda choices: evaluate(problem, choices)[0], (), check)
    outcome = branch_and_bound(free, core.alone(core.costs))
    if free.choices is None and outcome.proven:
        raise _forbidden(problem, outcome)
    if outcome.proven and free.choices is not None and _fits(problem, free.choices):
        return _solution(problem, free.choices, "elimination", outcome, free)
    return _solve_constrained(problem, core, free, outcome, check)


def _solve_constrained(problem: Problem, full: Core, free: Search, relaxed: Outcome, check: Check) -> Solution:
    """Steps 3 to 5, after the optimum without budgets broke one (or the time limit struck)."""
    active = [k for k, budget in enumerate(problem.budgets) if np.isfinite(budget.limit)]
    core, removed = Core(full.costs, tuple(full.usages[k] for k in active), full.options).shifted()
    limits = tuple(problem.budgets[k].largest_allowed - part for k, part in zip(active, removed, strict=True))
    search = Search(partial(_cost_if_fits, problem), limits, check)
    if free.choices is not None:
        search.consider(free.choices)
        search.planes.append(_plane(problem, free.choices, active))
    if not relaxed.proven:
        return _interrupted(problem, search, relaxed)
    for k in active:
        least = Search(partial(_usage_if_allowed, problem, k), (), check)
        proven = branch_and_bound(least, full.alone(full.usage_only(k))).proven
        if least.choices is None:
            continue
        if proven and not problem.budgets[k].allows(least.best):
            raise InfeasibleError.over_budget(problem.budgets[k], least.best, least.choices)
        search.consider(least.choices)
        search.planes.append(_plane(problem, least.choices, active))
    outcome = branch_and_bound(search, core)
    if not outcome.proven:
        return _interrupted(problem, search, Outcome(max(relaxed.lower_bound, outcome.lower_bound), False))
    if search.choices is None:
        raise InfeasibleError.jointly([problem.budgets[k] for k in active])
    return _solution(problem, search.choices, "lagrangian and labels", outcome, search)


def min_usage(problem: Problem, budget_index: int) -> Solution:
    """The choice that uses least of one budget, whatever the other budgets say.

    ``solution.usage[budget_index]`` is that least usage in bytes and ``lower_bound`` its proof, in bytes too;
    ``objective`` is what the choice costs, in seconds (not minimised).

    Raises:
        InfeasibleError: infinite costs forbid every choice.
        ValueError: no such budget.
    """
    if not 0 <= budget_index < len(problem.budgets):
        raise ValueError(f"no budget {budget_index}, there are {len(problem.budgets)}")
    full = build_core(problem)
    search = Search(partial(_usage_if_allowed, problem, budget_index), (), deadline(None))
    outcome = branch_and_bound(search, full.alone(full.usage_only(budget_index)))
    if search.choices is None:
        raise _forbidden(problem, outcome)
    return _solution(problem, search.choices, "elimination of usage", outcome, search)


def min_marginals(problem: Problem) -> tuple[Array, ...]:
    """For each variable, [n]: the least objective in seconds with that option fixed, ignoring budgets.

    ``inf`` where infinite costs leave no choice with that option. The minimum of each array is the optimum; the
    differences are what a runner-up costs. Nothing is dropped beforehand, so this takes about three eliminations of the
    whole problem; if its tables do not fit, every option is solved by itself.
    """
    core = build_core(problem)
    plan = plan_elimination(core.costs.sizes, sorted(core.costs.edges))
    if plan.message_cells > MAX_MESSAGE_CELLS or plan.total_cells > MAX_TOTAL_CELLS:
        return tuple(_margin_by_options(problem, core, v) for v in range(len(core.sizes)))
    check = deadline(None)
    forward = eliminate(core.costs, plan, check)
    return marginals(forward, completions(forward, check), check)


def _margin_by_options(problem: Problem, core: Core, variable: int) -> Array:
    """The min-marginals of one variable, each from a solve of its own."""
    found = np.full(core.sizes[variable], np.inf)
    for option in range(core.sizes[variable]):
        masks = [np.ones(size, dtype=np.bool_) for size in core.sizes]
        masks[variable] = np.arange(core.sizes[variable]) == option
        search = Search(lambda choices: evaluate(problem, choices)[0], (), deadline(None))
        branch_and_bound(search, core.alone(core.costs).keep(masks))
        found[option] = search.best
    return found


def _fits(problem: Problem, choices: Sequence[int]) -> bool:
    """Whether a choice keeps within every budget."""
    _, usage = evaluate(problem, choices)
    return all(budget.allows(used) for budget, used in zip(problem.budgets, usage, strict=True))


def _cost_if_fits(problem: Problem, choices: Sequence[int]) -> float:
    """The objective, ``inf`` over budget."""
    return evaluate(problem, choices)[0] if _fits(problem, choices) else np.inf


def _usage_if_allowed(problem: Problem, budget_index: int, choices: Sequence[int]) -> float:
    """The usage of one budget, ``inf`` for forbidden choices."""
    objective, usage = evaluate(problem, choices)
    return usage[budget_index] if np.isfinite(objective) else np.inf


def _plane(problem: Problem, choices: Sequence[int], active: Sequence[int]) -> Plane:
    """What the dual needs of a choice known before it starts."""
    objective, usage = evaluate(problem, choices)
    return objective, tuple(usage[k] - problem.budgets[k].largest_allowed for k in active)


def _forbidden(problem: Problem, outcome: Outcome) -> InfeasibleError:
    """The error when infinite costs leave nothing, naming where it was noticed."""
    if outcome.empty is not None:
        return InfeasibleError.forbidden([problem.variables[outcome.empty].name])
    ends = {end for edge in problem.edges if np.isinf(edge.costs).any() for end in (edge.a, edge.b)}
    return InfeasibleError.forbidden([problem.variables[v].name for v in sorted(ends)])


def _interrupted(problem: Problem, search: Search, outcome: Outcome) -> Solution:
    """The incumbent, or an error without one."""
    if search.choices is None:
        raise TimeLimitError(f"the time limit passed before any allowed choice was known, {search.num_nodes} nodes")
    return _solution(problem, search.choices, "incumbent at time limit", outcome, search)


def _solution(problem: Problem, choices: tuple[int, ...], method: str, outcome: Outcome, search: Search) -> Solution:
    """The public result."""
    objective, usage = evaluate(problem, choices)
    branched = " and branching" if search.num_nodes > 1 else ""
    statistics = {
        "num_nodes": float(search.num_nodes),
        "num_eliminations": float(search.num_eliminations),
        "num_planes": float(len(search.planes)),
        "num_labels": float(search.num_labels),
        "core_options": float(search.core_options),
        "max_table_cells": search.max_table_cells,
    }
    return Solution(choices, objective, usage, method + branched, outcome.lower_bound, statistics)
