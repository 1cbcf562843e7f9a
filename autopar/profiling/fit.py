"""The loss and the search of every fit.

A fit minimizes the mean of h(log(predicted / measured)) with the functions that will predict. The error is relative, as
times span four decades. h is quadratic only up to OUTLIER (P. Huber, 1964), so that one disturbed time does not bend
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

OUTLIER = 0.2
Parameters = Mapping[str, float]


def distance(predicted: float, seconds: float) -> float:
    """Return the smooth form of Huber's loss of log(predicted / seconds)."""
    return math.hypot(1.0, math.log(predicted / seconds) / OUTLIER) - 1.0


def descend(error: Callable[[Parameters], float], start: Parameters) -> dict[str, float]:
    """Minimize by coordinate descent over the logarithms of positive parameters, halving the step if no move helps.

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
    # More digits than the measurement has would only make the saved file hard to read.
    return {name: float(f"{value:.3g}") for name, value in best.items()}
