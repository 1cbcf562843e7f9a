"""A lower bound on the recomputation that fits a model into a number of bytes: a relaxation with a closed solution.

Every layer takes one of its modes, as (seconds, kept bytes). Let layers be divisible, with one limit on the sum. The
cheapest way down from the fastest modes takes the steps of each class' lower convex hull in the order of their
seconds per byte (the fractional multiple-choice knapsack). No integral choice for separate stages is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Choice = tuple[float, float]
"""(seconds, kept bytes) of one layer"""


def least_seconds(classes: Iterable[tuple[int, Sequence[Choice]]], room_bytes: float) -> float:
    """Return the least seconds of all layers that keep `room_bytes` together; inf if they cannot.

    classes: (number of layers, their choices).
    """
    seconds, kept = 0.0, 0.0
    steps: list[tuple[float, float]] = []
    for count, choices in classes:
        hull = _hull(choices)
        seconds += count * hull[0][0]
        kept += count * hull[0][1]
        for (here, more), (there, less) in zip(hull, hull[1:], strict=False):
            steps.append(((there - here) / (more - less), count * (more - less)))
    for rate, saved in sorted(steps):
        if kept <= room_bytes:
            break
        taken = min(saved, kept - room_bytes)
        seconds, kept = seconds + rate * taken, kept - taken
    return seconds if kept <= room_bytes * (1 + 1e-9) else math.inf


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """Return the corners of the lower convex hull, fastest first: each is slower and keeps less than the last."""
    hull: list[Choice] = []
    for choice in sorted(choices):
        if hull and choice[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _rate(hull[-2], choice) <= _rate(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _rate(a: Choice, b: Choice) -> float:
    """Return the seconds per byte saved from a to b."""
    return (b[0] - a[0]) / (a[1] - b[1])
