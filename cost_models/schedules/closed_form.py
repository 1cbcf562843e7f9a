"""Answers without a simulation, where they are known."""

from __future__ import annotations

import math

from cost_models.schedules.generate import make_schedule, num_chunks
from cost_models.schedules.holding import peak_in_flight
from cost_models.schedules.stage_times import StageTimes


def ideal_seconds(
    schedule: str, num_pipeline_ranks: int, num_micro_batches: int, times: StageTimes, chunks: int | None = None
) -> float:
    """Makespan of one step with equal stages and free transfers, from the papers that ``generate`` cites.

    times: of each stage (so of one chunk). p pipeline ranks, m micro-batches, v chunks; f, b, i, w as in StageTimes:

        gpipe, 1f1b     (m + p - 1) (f + b)
        interleaved     (m v + p - 1) (f + b)                                     where p divides m, or v = 1
        zero-bubble     m (f + i + w) + (p - 1) (f + i) - (min(m, p) - 1) w       where w <= f and w <= i
        zero-bubble-v   6 m f + (p - 1) f                                         where f = i = w and m >= 2 p - 1

    The zero-bubble line is the paper's (p - 1) (f + i - w) of bubbles for m >= p; fewer micro-batches have fewer W to
    fill them with. Raises ValueError where no closed form is known.
    """
    v = num_chunks(schedule, chunks)
    p, m, f = num_pipeline_ranks, num_micro_batches, times.forward
    if p < 1 or m < 1:
        raise ValueError(f"a step has at least one pipeline rank and micro-batch, not {p} and {m}")
    if schedule in ("gpipe", "1f1b") or (schedule == "interleaved" and (m % p == 0 or v == 1)):
        return (m * v + p - 1) * (f + times.backward)
    if schedule == "zero-bubble":
        i, w = times.split()
        if w <= min(f, i):
            return m * (f + i + w) + (p - 1) * (f + i) - (min(m, p) - 1) * w
    if schedule == "zero-bubble-v" and m >= 2 * p - 1:
        i, w = times.split()
        if math.isclose(f, i) and math.isclose(i, w):
            return (6 * m + p - 1) * f
    case = f"{schedule} with {p} pipeline ranks, {m} micro-batches, {v} chunks, {times}"
    raise ValueError(f"no closed form is known for {case}; simulate its schedule")


def in_flight(
    schedule: str, num_pipeline_ranks: int, num_micro_batches: int, chunks: int | None = None
) -> tuple[int, ...]:
    """The most micro-batches that each stage holds at once, as `Timeline.in_flight` counts them.

    Of the schedule without `costs` (with them, count with `Timeline.in_flight`). p pipeline ranks, m micro-batches,
    stage s: gpipe m; 1f1b min(m, p - s); zero-bubble min(m, p); zero-bubble-v with m >= 2 p - 1: min(m, 2 p - s);
    otherwise counted in the schedule, of which some groups of micro-batches are enough: further whole groups of p
    repeat what they hold. Raises ValueError as `make_schedule`.
    """
    v = num_chunks(schedule, chunks)
    p, m = num_pipeline_ranks, num_micro_batches
    if p < 1 or m < 1:
        raise ValueError(f"a step has at least one pipeline rank and micro-batch, not {p} and {m}")
    if schedule == "gpipe":
        return (m,) * p
    if schedule == "1f1b" or v == 1 and schedule == "interleaved":
        return tuple(min(m, p - stage) for stage in range(p))
    if schedule == "zero-bubble":
        return (min(m, p),) * p
    if schedule == "zero-bubble-v" and m >= 2 * p - 1:
        return tuple(min(m, 2 * p - stage) for stage in range(2 * p))
    if schedule == "interleaved" and m > 6 * p:
        m = 5 * p + m % p
    return peak_in_flight(make_schedule(schedule, p, m, chunks))
