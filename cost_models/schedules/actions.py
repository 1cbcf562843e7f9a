"""The actions of a pipeline rank, their text form, and their seconds on one stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch. Printed as ``F0.3``: kind, stage, micro-batch.

    kind: "F" forward, "B" whole backward, "I" the gradients of the inputs only, "W" those of the weights (after I).
    Raises ValueError for another kind or a negative number.
    """

    kind: Kind
    stage: int
    micro: int

    def __post_init__(self) -> None:
        if self.kind not in "FBIW" or self.stage < 0 or self.micro < 0:
            raise ValueError(
                f"an action is F, B, I or W of a stage and a micro-batch of at least 0, "
                f"got {self.kind!r}, {self.stage}, {self.micro}"
            )

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


@lru_cache(maxsize=1 << 18)
def interned(kind: Kind, stage: int, micro: int) -> Action:
    """Return the Action, shared by all schedules that contain it: long schedules consist of few distinct actions."""
    return Action(kind, stage, micro)


Lines: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each pipeline rank, in the order in which it runs them."""


def schedule_text(schedule: Lines) -> str:
    """Return one line per pipeline rank, actions separated by spaces; each line ends with a newline."""
    return "".join(" ".join(map(str, line)) + "\n" for line in schedule)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that one micro-batch takes on one stage.

    backward: the full backward ("B"). input, weight: its two halves run separately ("I", "W"). Their sum may exceed
    `backward`, because both compute or read some tensors again. None: unknown, so the stage cannot run split.
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
        """Return the seconds of "I" and of "W". Raises ValueError if they are unknown."""
        if self.input is None or self.weight is None:
            raise ValueError(f"input and weight seconds are needed to run a backward in two halves, got {self}")
        return self.input, self.weight
