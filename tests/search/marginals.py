"""Min-marginals of a whole problem: a route to the optimum without budgets that reduces and bounds nothing."""

from __future__ import annotations

from search import Problem
from search.core import build_core
from search.elimination import completions, eliminate, marginals, plan_elimination
from search.problem import Array


def min_marginals(problem: Problem) -> tuple[Array, ...]:
    """For each variable, [n]: the least objective in seconds with that option fixed, ignoring the budget.

    ``inf`` where infinite costs leave no choice with that option.
    """
    core = build_core(problem)
    forward = eliminate(core.costs, plan_elimination(core.costs.sizes, sorted(core.costs.edges)))
    return marginals(forward, completions(forward))
