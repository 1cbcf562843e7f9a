"""What a pipeline rank holds while it runs its line: micro-batches in flight, and bytes.

Both depend on the order of the line alone: nothing of a stage is held or let go elsewhere. An activation counts from
the start of F to the end of B, or to the end of W where the backward is split.
"""

from __future__ import annotations

from collections.abc import Sequence

from cost_models.schedules.actions import Action, Schedule


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The most micro-batches that each stage holds at once."""
    held: dict[int, int] = {}
    peaks: dict[int, int] = {}
    for line in schedule:
        for action in line:
            stage = action.stage
            if action.kind == "F":
                held[stage] = held.get(stage, 0) + 1
                if held[stage] > peaks.get(stage, 0):
                    peaks[stage] = held[stage]
            elif action.kind != "I":
                held[stage] -= 1
    return tuple(peaks[stage] for stage in sorted(peaks))


def peak_bytes(
    line: Sequence[Action],
    fixed_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    released_at_input: float = 0.0,
) -> float:
    """The most bytes that the pipeline rank holds at once which runs `line`.

    fixed_bytes: of each stage, held all the time; only this pipeline rank's stages count. activation_bytes: of each
    stage, for one micro-batch. released_at_input: the fraction of them that I lets go already (what only the gradients
    of inputs need, such as attention's saved tensors). Raises ValueError unless it is from 0 to 1.
    """
    if not 0 <= released_at_input <= 1:
        raise ValueError(f"released_at_input is a fraction from 0 to 1, got {released_at_input}")
    # Micro-batches are counted and then multiplied, so that no rounding errors add up over thousands of actions.
    stages = sorted({action.stage for action in line})
    whole = dict.fromkeys(stages, 0)
    reduced = dict.fromkeys(stages, 0)
    peak = 0.0
    for action in line:
        stage = action.stage
        if action.kind == "F":
            whole[stage] += 1
            held = sum(
                (whole[item] + (1 - released_at_input) * reduced[item]) * activation_bytes[item] for item in stages
            )
            peak = max(peak, held)
        elif action.kind == "B":
            whole[stage] -= 1
        elif action.kind == "I":
            whole[stage] -= 1
            reduced[stage] += 1
        else:
            reduced[stage] -= 1
    return sum(fixed_bytes[stage] for stage in stages) + peak
