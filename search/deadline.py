"""A time limit that long computations ask about."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLimitReachedError(Exception):
    """The time limit has passed; caught inside the package."""


def deadline(seconds: float | None) -> Callable[[], None]:
    """A function that raises ``TimeLimitReachedError`` once ``seconds`` have passed since now; None never does."""
    if seconds is None:
        return lambda: None
    end = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > end:
            raise TimeLimitReachedError

    return check
