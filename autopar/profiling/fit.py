"""What every fit shares: its loss and its search.

A fit minimises the mean of h(log(predicted / measured)), through the functions that will predict: relative, because
times span four decades, and h is quadratic only up to OUTLIER (P. Huber, 1964), because one disturbed time must not
bend the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

OUTLIER = 0.2
Parameters = Mapping[str, float]


def distance(predicted: float, seconds: float) -> float:
    """The smooth form of Huber's loss, of log(predicted / seconds)."""
    return math.hypot(1.0, math.log(predicted / seconds) / OUTLIER) - 1.0


def descend(error: Callable[[Parameters], float], start: Parameters) -> dict[str, float]:
    """Coordinate descent over the logarithms of positive parameters, halving the step where no move helps.

    R. Hooke, T. Jeeves, "Direct search solution of numerical and statistical problems", JACM 8 (1961).
    """
    best, lowest, factor = dict(start), error(start), 4.0
    while factor > 1.005:
        improved = False
        for name in best:
            for step in (factor, 1 / factor):
                candidate = {**best, name: best[name] * step}
                if (value := error(candidate)) < lowest - 1e-9:
                    best, lowest, improved = candidate, value, True
        if not improved:
            factor = math.sqrt(factor)
    # More digits than were measured would only make the saved file hard to read.
    return {name: float(f"{value:.3g}") for name, value in best.items()}
