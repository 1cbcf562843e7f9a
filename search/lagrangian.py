"""The Lagrangian relaxation of the budget: a lower bound, and assignments near the optimum.

    L(l) = min over assignments of [cost + l (usage - limit)],   l >= 0

is a lower bound for every l. It is concave and piecewise linear. Each evaluation (one elimination) yields a choice and
with it a plane above L. Kelley's cutting-plane method (J. Kelley, SIAM J. 8 (1960)) maximizes the minimum of the
planes, a linear program in two variables, until it meets L.
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
"""Upper limit of the scaled multiplier; at 1 it weighs the budget's whole excess like the whole range of costs."""

MIN_SLOPE = 1e-9
"""Scaled slopes below this are rounding; left in, they unsettle the linear solver."""

Plane = tuple[float, float]
"""A choice seen by the dual: its cost, and its usage minus the limit."""


@dataclass(frozen=True, slots=True, eq=False)
class Dual:
    """The best multiplier and the bound L there.

    ``margins[v][x]`` is the optimum of the Lagrangian (without its constant) with option x of v fixed.
    """

    core: Core
    multiplier: float
    value: float
    margins: tuple[Array, ...]


def maximize(
    core: Core,
    limit: float,
    planes: list[Plane],
    offer: Callable[[Core, tuple[int, ...]], float],
    learn: Callable[[float], None],
) -> Dual | None:
    """Maximize L; return None when the bound reaches the cutoff.

    Args:
        core: with a budget.
        limit: of the budget.
        planes: known planes; new ones are appended.
        offer: receives each new assignment and returns the cutoff, above which assignments are ignored.
        learn: receives each new lower bound.
    """
    plan = plan_elimination(core.sizes, core.pairs())
    multiplier, best_value = 0.0, -np.inf
    best: tuple[float, Elimination] | None = None
    for _ in range(MAX_ITERATIONS):
        forward = eliminate(core.weighted(multiplier), plan)
        assignment = decode(forward)
        cutoff = offer(core, assignment)
        value = forward.value - multiplier * limit
        if best is None or value > best_value:
            best_value, best = value, (multiplier, forward)
            learn(value)
        if best_value >= cutoff:
            return None
        planes.append(plane(core, assignment, limit))
        next_point = best_multiplier(planes)
        if next_point is None or next_point[0] == multiplier:
            break
        multiplier, ceiling = next_point
        settled = RELATIVE_TOLERANCE * abs(ceiling)
        if np.isfinite(cutoff):
            settled = max(settled, GAP_FRACTION * (cutoff - best_value))
        if not ceiling - best_value > settled:
            break
        del forward  # Keep at most two sets of messages in memory.
    assert best is not None
    multiplier, forward = best
    margins = marginals(forward, completions(forward))
    return Dual(core, multiplier, best_value, margins)


def drop_above(dual: Dual, threshold: float) -> Core | None:
    """Drop options whose Lagrangian margin is not below ``threshold``; return None if a variable has none left."""
    masks = [margin < threshold for margin in dual.margins]
    return dual.core.keep(masks) if all(mask.any() for mask in masks) else None


def plane(core: Core, assignment: Sequence[int], limit: float) -> Plane:
    """Return the plane of one choice."""
    assert core.usage is not None
    cost = sum(float(unary[choice]) for unary, choice in zip(core.costs.unaries, assignment, strict=True))
    cost += sum(float(table[assignment[a], assignment[b]]) for (a, b), table in core.costs.edges.items())
    return cost, sum(float(values[choice]) for values, choice in zip(core.usage, assignment, strict=True)) - limit


def best_multiplier(planes: Sequence[Plane]) -> tuple[float, float] | None:
    """Return the multiplier that maximizes the least plane, and that maximum; None if the linear solver gives up.

    Costs and excesses are scaled to numbers near one for the solver.
    """
    costs, excess = np.array(planes).T
    base, cost_scale = float(costs.min()), float(np.ptp(costs)) or 1.0
    usage_scale = float(np.abs(excess).max()) or 1.0
    slopes = excess / usage_scale
    slopes[np.abs(slopes) < MIN_SLOPE] = 0.0
    # Imported here: plans without a memory budget, and machines that only run programs, do not need it.
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("GLOP")
    height = solver.NumVar(-solver.infinity(), solver.infinity(), "height")
    weight = solver.NumVar(0.0, BOX, "multiplier")
    for cost, slope in zip((costs - base) / cost_scale, slopes.tolist(), strict=True):
        solver.Add(height - slope * weight <= float(cost))
    solver.Maximize(height)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    scaled = max(0.0, weight.solution_value())
    # This multiplier is valid whatever the solver's tolerances, and the ceiling only decides when to stop.
    ceiling = float(((costs - base) / cost_scale + slopes * scaled).min()) * cost_scale + base
    return scaled * cost_scale / usage_scale, ceiling
