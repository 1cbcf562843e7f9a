"""A time limit that long computations ask about."""

from __future__ import annotations

import time
from dataclasses import dataclass


class TimeLimitReachedError(Exception):
    """The time limit has passed; caught inside the package."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time, by ``time.monotonic()``; ``inf`` never comes."""

    end: float

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """``seconds`` from now; None never comes."""
        return cls(float("inf") if seconds is None else time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until then, negative afterwards."""
        return self.end - time.monotonic()

    def __call__(self) -> None:
        """Raise ``TimeLimitReachedError`` once the deadline has passed."""
        if self.seconds_left < 0:
            raise TimeLimitReachedError
