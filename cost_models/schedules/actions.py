"""What a pipeline rank does, one action at a time, and the text that says it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, cast

Kind = Literal["F", "B", "I", "W"]

_TEXT = re.compile(r"([FBIW])(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


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

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action printed as `text`. Raises ValueError."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}; expected F, B, I or W, stage, '.', micro-batch, such as F0.3")
        return cls(cast(Kind, match[1]), int(match[2]), int(match[3]))


@lru_cache(maxsize=1 << 18)
def interned(kind: Kind, stage: int, micro: int) -> Action:
    """The Action, one object for all schedules that have it: schedules of many micro-batches are made of few of
    them."""
    return Action(kind, stage, micro)


Schedule: TypeAlias = Sequence[Sequence[Action]]
"""The actions of each pipeline rank, in the order in which it runs them."""


def schedule_text(schedule: Schedule) -> str:
    """One line per pipeline rank, actions separated by spaces; each line ends with a newline."""
    return "".join(" ".join(map(str, line)) + "\n" for line in schedule)


def parse_schedule(text: str) -> tuple[tuple[Action, ...], ...]:
    """The schedule printed as `text`; an empty line is a pipeline rank that does nothing. Raises ValueError with the
    line."""
    schedule = []
    for rank, line in enumerate(text.splitlines()):
        try:
            schedule.append(tuple(Action.parse(word) for word in line.split()))
        except ValueError as error:
            raise ValueError(f"pipeline rank {rank} (line {rank + 1}): {error}") from None
    return tuple(schedule)
