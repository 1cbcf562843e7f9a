"""Whether a schedule can be executed, before anything runs them."""

from __future__ import annotations

from cost_models.schedules.actions import Action, Kind, Schedule
from cost_models.schedules.sweep import Edges, Shape, checked_edges, sweep


def check(
    schedule: Schedule,
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
    edges = checked_edges(edges, shape.num_stages)
    sweep(schedule, shape, edges, dict.fromkeys("FBIW", nothing), [0.0] * len(edges))


def structure(schedule: Schedule, num_stages: int | None = None, num_micro_batches: int | None = None) -> Shape:
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
