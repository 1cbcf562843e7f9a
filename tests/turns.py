"""Shares of cases that take turns, for tests that would be slow with all of them.

A run tries one share of the cases, which TURN picks. It is the time of the last commit: a commit's runs are alike, and
another commit tries another share. The header of a run prints it; `TEST_TURN=<number> pytest ...` repeats the run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

Case = TypeVar("Case")
Plan = TypeVar("Plan")
VARIABLE = "TEST_TURN"


def _commit_seconds() -> int:
    """Return the time of the last commit in seconds; 0 where the sources are not git's."""
    command = ["git", "log", "-1", "--format=%ct"]
    try:
        answer = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    except OSError:
        return 0
    return int(answer.stdout or 0)


TURN = int(os.environ.get(VARIABLE) or _commit_seconds())


def by_turns(cases: Sequence[Case], plans: Sequence[Plan], count: int = 1) -> list[tuple[Case, Plan]]:
    """Pair each case with `count` of the plans. Turns 0, 1, 2, ... have all pairs after as many turns as plans."""
    return [
        (case, plans[(TURN + number * count + n) % len(plans)])
        for number, case in enumerate(cases)
        for n in range(count)
    ]


def one_in(stride: int, cases: Sequence[Case]) -> Sequence[Case]:
    """Return every stride-th of the cases. Turns 0, 1, 2, ... have all cases after `stride` turns."""
    return cases[TURN % stride :: stride]
