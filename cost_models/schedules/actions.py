"""What a pipeline rank does, one action at a time, and the text that says it."""

from __future__ import annotations

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
    """The Action, one object for all schedules that have it: schedules of many micro-batches are made of few of
    them."""
    return Action(kind, stage, micro)


Lines: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each pipeline rank, in the order in which it runs them."""


def schedule_text(schedule: Lines) -> str:
    """One line per pipeline rank, actions separated by spaces; each line ends with a newline."""
    return "".join(" ".join(map(str, line)) + "\n" for line in schedule)
