"""One thing that is tried, and what came of it."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar.errors import AutoparError, InternalError

Outcome = Literal["right", "refused", "raw", "wrong", "hangs", "leftovers"]
OUTCOMES: tuple[Outcome, ...] = ("right", "refused", "raw", "wrong", "hangs", "leftovers")
DEFECTS: tuple[Outcome, ...] = OUTCOMES[2:]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of a case.

    outcome: "right" (equal to the single-process computation, or the fault was survived), "refused" (in an error of
    ours), "raw" (any other exception, or a process that died with a traceback), "wrong" (accepted, and not equal; or
    something was lost), "hangs" (not ended in time) or "leftovers" (files or processes stayed behind). detail: the
    first line of the error, or the difference.
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
        return Result("raw" if isinstance(error, InternalError) else "refused", str(error).splitlines()[0])
    except Exception as error:
        return Result("raw", f"{type(error).__name__}: {error}".splitlines()[0])


def is_in_words(error: BaseException) -> bool:
    """Return whether the run time of a program raised an error itself: it runs without autopar and its classes."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = (last.line or "").startswith("raise ")
    return is_raised and "runtime" in Path(last.filename).parts and isinstance(error, (ValueError, RuntimeError))
