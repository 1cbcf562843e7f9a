"""Seconds of the actions of one stage."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that one micro-batch takes on one stage.

    backward: the whole backward ("B"). input, weight: its two halves run apart ("I", "W"); their sum may exceed
    `backward`, because what both need is then computed or read twice. None: not known, so the stage cannot run split.
    Raises ValueError for a negative or non-finite time.
    """

    forward: float
    backward: float
    input: float | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "input", "weight"):
            seconds = getattr(self, name)
            if seconds is not None and not (0 <= seconds < math.inf):
                raise ValueError(f"{name} must be a finite number of seconds, zero or more, got {seconds}")

    def split(self) -> tuple[float, float]:
        """Seconds of "I" and of "W". Raises ValueError where they are not known."""
        if self.input is None or self.weight is None:
            raise ValueError(f"input and weight seconds are needed to run a backward in two halves, got {self}")
        return self.input, self.weight
