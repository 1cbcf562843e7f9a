"""The Lagrangian relaxation of the budgets: a lower bound, and assignments near the optimum.

    L(l) = min over assignments of [cost + sum_k l_k (usage_k - limit_k)],   l >= 0

is a lower bound for every l. It is concave and piecewise linear; each evaluation (one elimination) yields a choice and
with it a plane above L. Kelley's cutting-plane method (J. Kelley, SIAM J. 8 (1960)) maximises the minimum of the
planes, a linear program in K + 1 variables, until it meets L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from search.core import Core
from search.elimination import (
    Elimination,
    completions,
    decode,
    eliminate,
    marginals,
    plan_elimination,
)
from search.problem import Array

MAX_ITERATIONS = 60
RELATIVE_TOLERANCE = 1e-10
GAP_FRACTION = 0.01
"""Stop once the bound can rise by no more than this fraction of the distance to the best known choice."""

BOX = 1e4
"""Upper limit of the scaled multipliers; at 1 they weigh a budget's whole excess like the whole range of costs."""

MIN_SLOPE = 1e-9
"""Scaled slopes below this are rounding; left in, they unsettle the linear solver."""

Plane = tuple[float, tuple[float, ...]]
"""A choice as the dual sees it: its cost and its usage minus limit per budget."""


@dataclass(frozen=True, slots=True, eq=False)
class Dual:
    """The best multipliers found and the bound L there.

    ``margins[v][x]`` is the optimum of the Lagrangian (without its constant) with option x of v fixed.
    """

    core: Core
    multipliers: tuple[float, ...]
    value: float
    margins: tuple[Array, ...]


def maximise(
    core: Core,
    limits: Sequence[float],
    planes: list[Plane],
    offer: Callable[[Core, tuple[int, ...]], float],
    learn: Callable[[float], None],
) -> Dual | None:
    """Maximise L; None when the bound reaches the cutoff.

    Args:
        core: at least one budget.
        limits: per budget.
        planes: planes known already; those found are appended.
        offer: is given each assignment found and returns the cutoff: assignments that do not cost less are of no
        interest.
        learn: is told each new lower bound.
    """
    plan = plan_elimination(core.sizes, core.pairs())
    multipliers, best_value = (0.0,) * len(limits), -np.inf
    best: tuple[tuple[float, ...], Elimination] | None = None
    for _ in range(MAX_ITERATIONS):
        forward = eliminate(core.weighted(multipliers), plan)
        assignment = decode(forward)
        cutoff = offer(core, assignment)
        value = forward.value - float(np.dot(multipliers, limits))
        if best is None or value > best_value:
            best_value, best = value, (multipliers, forward)
            learn(value)
        if best_value >= cutoff:
            return None
        planes.append(plane(core, assignment, limits))
        found = best_multipliers(planes, len(limits))
        if found is None or found[0] == multipliers:
            break
        multipliers, ceiling = found
        settled = RELATIVE_TOLERANCE * abs(ceiling)
        if np.isfinite(cutoff):
            settled = max(settled, GAP_FRACTION * (cutoff - best_value))
        if not ceiling - best_value > settled:
            break
        del forward  # Two sets of messages at once are enough.
    assert best is not None
    multipliers, forward = best
    margins = marginals(forward, completions(forward))
    return Dual(core, multipliers, best_value, margins)


def drop_above(dual: Dual, threshold: float) -> Core | None:
    """The core without options whose Lagrangian margin is not below ``threshold``; None if a variable has none."""
    masks = [margin < threshold for margin in dual.margins]
    return dual.core.keep(masks) if all(mask.any() for mask in masks) else None


def plane(core: Core, assignment: Sequence[int], limits: Sequence[float]) -> Plane:
    """The plane of one choice."""
    totals: list[float] = []
    for function in (core.costs, *core.usages):
        total = sum(float(unary[choice]) for unary, choice in zip(function.unaries, assignment, strict=True))
        total += sum(float(table[assignment[a], assignment[b]]) for (a, b), table in function.edges.items())
        totals.append(total)
    return totals[0], tuple(used - limit for used, limit in zip(totals[1:], limits, strict=True))


def best_multipliers(planes: Sequence[Plane], num_budgets: int) -> tuple[tuple[float, ...], float] | None:
    """Multipliers that maximise the least plane, and that maximum; None if the linear solver gives up.

    Costs and excesses are scaled so that the solver sees numbers near one.
    """
    costs = np.array([plane[0] for plane in planes])
    excess = np.array([plane[1] for plane in planes])
    base, cost_scale = float(costs.min()), float(np.ptp(costs)) or 1.0
    usage_scale = np.abs(excess).max(axis=0)
    usage_scale[usage_scale == 0.0] = 1.0
    slopes_SK = excess / usage_scale  # S planes, K budgets
    slopes_SK[np.abs(slopes_SK) < MIN_SLOPE] = 0.0
    # Imported here: plans without a memory budget do without it, and so may machines that only run programs.
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    height = solver.NumVar(-solver.infinity(), solver.infinity(), "height")
    weights = [solver.NumVar(0.0, BOX, f"multiplier_{k}") for k in range(num_budgets)]
    for cost, over in zip((costs - base) / cost_scale, slopes_SK, strict=True):
        slopes = zip(over.tolist(), weights, strict=True)
        solver.Add(height - sum(slope * weight for slope, weight in slopes) <= float(cost))
    solver.Maximize(height)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    scaled = np.array([max(0.0, weight.solution_value()) for weight in weights])
    # Whatever the solver's tolerances did, these are valid multipliers, and the ceiling only decides when to stop.
    ceiling = float(((costs - base) / cost_scale + slopes_SK @ scaled).min()) * cost_scale + base
    return tuple(float(value) for value in scaled * cost_scale / usage_scale), ceiling
