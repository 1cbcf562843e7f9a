"""Bounds and incumbents for problems whose exact elimination is expensive, at a fraction of its price.

The easy variables are eliminated exactly (``condense``), the rest is bounded by ``bounds.dual_ascent`` and decoded, and
the choice is improved by ``descent``, with growing multipliers until it keeps within the budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.bounds import dual_ascent
from search.condense import condense
from search.core import Core
from search.descent import descend
from search.lagrangian import Plane, best_multipliers, plane
from search.problem import Array
from search.state import Search

MAX_ITERATIONS = 12
CONVERGED = 1e-3
REPAIR_FACTORS = (1.0, 1.1, 1.3, 2.0, 4.0, 16.0)


@dataclass(frozen=True, slots=True, eq=False)
class WeakRelaxation:
    """A lower bound, also per option (``-inf`` for variables without one), and the choice read off it."""

    value: float
    margins: tuple[Array, ...]
    choices: tuple[int, ...]


def relax_weakly(search: Search, core: Core, multipliers: Sequence[float]) -> WeakRelaxation:
    """Bound the Lagrangian at fixed multipliers from below, and offer a choice near it. ``core`` has no dead ends."""
    offset = float(np.dot(multipliers, search.limits))
    condensed = condense(core.weighted(multipliers), search.check)
    dual = dual_ascent(condensed.function, search.check)
    margins: list[Array] = [np.full(size, -np.inf) for size in core.sizes]
    for variable, margin in zip(condensed.remaining, dual.marginals, strict=True):
        margins[variable] = margin - offset
    choices = condensed.lift(dual.choices)
    _offer_repaired(search, core, multipliers, choices)
    return WeakRelaxation(dual.value - offset, tuple(margins), choices)


def maximise_weakly(search: Search, core: Core, start: Sequence[float]) -> tuple[float, ...]:
    """Multipliers near the best, by Kelley's method on choices that are only nearly optimal for the Lagrangian.

    Any multipliers give valid bounds, so nothing exact depends on the result.
    """
    multipliers = tuple(start)
    planes: list[Plane] = list(search.planes)
    for _ in range(MAX_ITERATIONS):
        found = best_multipliers(planes, len(search.limits)) if planes else (multipliers, np.inf)
        if found is None or np.allclose(found[0], multipliers, rtol=CONVERGED, atol=0.0) and len(planes) > 3:
            break
        multipliers = found[0]
        relaxed = relax_weakly(search, core, multipliers)
        better = descend(core.alone(core.weighted(multipliers)), relaxed.choices, ())
        planes.append(plane(core, better, search.limits))
    search.planes.extend(planes[len(search.planes) :])
    return multipliers


def _offer_repaired(search: Search, core: Core, multipliers: Sequence[float], choices: tuple[int, ...]) -> None:
    """Improve a choice within the budgets, weighing usage more and more until it keeps within them."""
    for factor in REPAIR_FACTORS if search.limits else ():
        weights = [factor * multiplier for multiplier in multipliers]
        choices = descend(core.alone(core.weighted(weights)), choices, ())
        over = plane(core, choices, search.limits)[1]
        if all(excess <= 0.0 for excess in over):
            break
    search.offer(core, descend(core, choices, search.limits))
