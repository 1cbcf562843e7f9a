"""Closed forms of schedules, for searches without actions; see `ClosedForm` for the arguments."""

from __future__ import annotations

from cost_models.schedules.record import ClosedForm


def one_forward_one_backward_seconds(work: float, busy: float, p: int, m: int) -> float:
    """Bound the seconds of 1F1B's micro-batches; `autopar/planning/bounds.py` derives it."""
    if m > p:
        return max(work + (m - 1) * work / p, 2 * work + (m - p - 1) * busy)
    # max(f, b) is at least half of a stage, and there are p - m + 1 stages of which only that counts.
    return work + (work * (m - 1) / (m - 1 + 2 * (p - m + 1)) if m > 1 else 0.0)


def _all_forward_all_backward_seconds(work: float, busy: float, p: int, m: int) -> float:
    return work + (m - 1) * busy


def _zero_bubble_deferred(m: int, p: int, i: int) -> float:
    """Pipeline rank i has deferred i of the min(m, p) micro-batches that it holds while the next runs backward."""
    return min(i, min(m, p) - 1)


ONE_FORWARD_ONE_BACKWARD = ClosedForm(
    in_flight=lambda m, p, i: min(m, p - i),
    least_seconds=one_forward_one_backward_seconds,
    slack=lambda p, m: 1.0 + (min(m, p) - 1) / (2 * m),
)

ALL_FORWARD_ALL_BACKWARD = ClosedForm(
    in_flight=lambda m, p, i: m,
    least_seconds=_all_forward_all_backward_seconds,
)

ZERO_BUBBLE = ClosedForm(
    in_flight=lambda m, p, i: min(m, p) - _zero_bubble_deferred(m, p, i),
    num_deferred=_zero_bubble_deferred,
    slack=lambda p, m: 1.0 + min((p + 1) / m, 1.0 + 1.0 / m) if m > 1 else 1.0,
)
