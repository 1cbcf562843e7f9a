"""One thing that is tried, and what came of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.errors import AutoparError, InternalError

Outcome = Literal["right", "clear", "raw", "wrong"]
OUTCOMES: tuple[Outcome, ...] = ("right", "clear", "raw", "wrong")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case.

    outcome: "right" (equal to the single-process computation, or the fault was survived), "clear" (refused in an error
    of ours), "raw" (any other exception or a process that died with a traceback), or "wrong" (accepted, and not equal;
    or something was lost). detail: the first line of the error, or what differs.
    """

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """name: says what is tried, so that a person can repeat it. run: tries it; may take seconds, never minutes."""

    name: str
    run: Callable[[], Result]


def drawn(cases: Iterable[Case], count: int | None, seed: int) -> list[Case]:
    """All of them, or of fewer a sample."""
    found = list(cases)
    return found if count is None or count >= len(found) else random.Random(seed).sample(found, count)


def judged(name: str, attempt: Callable[[], bool]) -> Case:
    """An attempt in this process as a case."""
    return Case(name, lambda: judge(attempt))


def judge(attempt: Callable[[], bool]) -> Result:
    """The result of an attempt in this process that tells whether it ended equal to the single-process computation."""
    try:
        return Result("right") if attempt() else Result("wrong", "accepted, and not equal")
    except AutoparError as error:
        return Result("raw" if isinstance(error, InternalError) else "clear", str(error).splitlines()[0])
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])
