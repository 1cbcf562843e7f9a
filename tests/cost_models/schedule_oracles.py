"""Oracles of the tests of schedules: closed forms, and whether a schedule is complete."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import cast

from cost_models.schedule import Action, Edges, Kind, Lines, Shape, StageTimes, Timeline, num_chunks
from cost_models.schedule import simulate as simulate_whole
from cost_models.schedules.sweep import sweep

_TEXT = re.compile(r"([FBIW])(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


def parse_schedule(text: str) -> tuple[tuple[Action, ...], ...]:
    """The schedule printed as `text`."""
    matches = [[_TEXT.fullmatch(word) for word in line.split()] for line in text.splitlines()]
    return tuple(tuple(Action(cast(Kind, m[1]), int(m[2]), int(m[3])) for m in line if m) for line in matches)


def chain(num_stages: int) -> tuple[tuple[int, int], ...]:
    """Edges from each stage to the next."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def simulate(
    schedule: Lines,
    times: Sequence[StageTimes],
    transfers: Mapping[tuple[int, int], float] | None = None,
    edges: Edges | None = None,
) -> Timeline:
    """The simulated step of a schedule that is checked first. Transfers along `edges` are free unless given."""
    shape = structure(schedule, num_stages=len(times))
    seconds = dict.fromkeys(chain(len(times)) if edges is None else edges, 0.0) | (transfers or {})
    return simulate_whole(schedule, times, seconds, shape)


def check(
    schedule: Lines,
    num_stages: int | None = None,
    num_micro_batches: int | None = None,
    edges: Edges | None = None,
) -> None:
    """Raises ValueError with pipeline rank, action and reason unless `schedule` can be executed to the end.

    Every stage must run, on one pipeline rank, every micro-batch once: F, then B, or F, then I, then W. Pipeline ranks
    that run their lines in order, an action waiting for its inputs, must not wait for one another.
    num_stages, num_micro_batches: by default the highest in `schedule`. edges: (source stage, target stage) of the
    tensors sent, from any stage to any later one; by default each stage to the next.
    """
    shape = structure(schedule, num_stages, num_micro_batches)
    nothing = [0.0] * shape.num_stages
    edges = chain(shape.num_stages) if edges is None else edges
    sweep(schedule, shape, edges, dict.fromkeys("FBIW", nothing), [0.0] * len(edges))


def structure(schedule: Lines, num_stages: int | None = None, num_micro_batches: int | None = None) -> Shape:
    """The stages and micro-batches of `schedule`. Raises ValueError as `check` does, deadlocks excepted."""
    if not any(schedule):
        raise ValueError("no pipeline rank has anything to do")
    if num_stages is None:
        num_stages = 1 + max(action.stage for line in schedule for action in line)
    if num_micro_batches is None:
        num_micro_batches = 1 + max(action.micro for line in schedule for action in line)
    pipeline_ranks: dict[int, int] = {}
    done: dict[str, set[int]] = {kind: set() for kind in "FBIW"}
    for rank, line in enumerate(schedule):
        for action in line:
            stage, micro, kind = action.stage, action.micro, action.kind
            if stage >= num_stages or micro >= num_micro_batches:
                raise _error(rank, action, f"beyond {num_stages} stages of {num_micro_batches} micro-batches")
            if pipeline_ranks.setdefault(stage, rank) != rank:
                raise _error(rank, action, f"stage {stage} runs on pipeline rank {pipeline_ranks[stage]} already")
            # A micro-batch of a stage as one number, so that sets of integers say what is done.
            cell = stage * num_micro_batches + micro
            if cell in done[kind]:
                raise _error(rank, action, "comes twice")
            if (kind == "B" or kind == "I") and cell in done["I" if kind == "B" else "B"]:
                raise _error(rank, action, "comes after the same micro-batch's other kind of backward")
            before: Kind = "I" if kind == "W" else "F"
            if kind != "F" and cell not in done[before]:
                raise _error(rank, action, f"comes without {Action(before, stage, micro)} before it")
            done[kind].add(cell)
    _complete(done, pipeline_ranks, num_stages, num_micro_batches)
    return Shape(num_micro_batches, tuple(pipeline_ranks[stage] for stage in range(num_stages)))


def _complete(
    done: dict[str, set[int]], pipeline_ranks: dict[int, int], num_stages: int, num_micro_batches: int
) -> None:
    # Ends at the first gap, so an absurd number in a damaged file does not cost an absurd time.
    for cell in range(num_stages * num_micro_batches):
        stage, micro = divmod(cell, num_micro_batches)
        where = f"pipeline rank {pipeline_ranks[stage]}" if stage in pipeline_ranks else "no pipeline rank"
        if cell not in done["F"]:
            raise ValueError(f"{where}: {Action('F', stage, micro)} is missing")
        if cell not in done["B"] and cell not in done["I"]:
            raise ValueError(f"{where}: {Action('B', stage, micro)} (or I and W) is missing")
        if cell in done["I"] and cell not in done["W"]:
            raise ValueError(f"{where}: {Action('W', stage, micro)} is missing")


def _error(rank: int, action: Action, reason: str) -> ValueError:
    return ValueError(f"pipeline rank {rank}: {action} {reason}")


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
