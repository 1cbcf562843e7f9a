"""What came of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from autopar.compiled import CompiledProgram


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run did.

    losses: of each step from `first_step` (0 unless resumed) on, inf or nan where it was skipped.
    step_seconds: median without the first steps.
    peak_bytes: per rank, of tensors; empty if not measured. num_samples: rows trained on so far. checkpoint: the last
    one written or resumed from. num_skipped: steps without an update, since loss or gradients were not finite.
    evaluations: of each evaluation "step" and "loss". stopped: why training ended before its last step, "" if it did
    not. model: the user's, with the trained values. program: None for a plain run.
    """

    losses: tuple[float, ...]
    first_step: int
    step_seconds: float
    peak_bytes: tuple[int, ...]
    num_samples: int
    checkpoint: Path | None = None
    num_skipped: int = 0
    evaluations: tuple[Mapping[str, float], ...] = ()
    stopped: str = ""
    model: nn.Module | None = None
    program: CompiledProgram | None = None
