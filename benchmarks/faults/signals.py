"""Signals to the parent or to a rank at random times: all ranks end, nothing is left, and the run can be resumed.

SIGINT, SIGTERM and SIGHUP to the parent end it with code 128 + number; a stopped rank is noticed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.fault_runs import Run, attempt, unbroken
from benchmarks.faults.case import Case

COUNT = 10
TO_PARENT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TO_RANK = (signal.SIGTERM, signal.SIGSTOP, signal.SIGABRT)


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Each takes some five seconds, of a stopped rank fifteen."""
    chance = random.Random(seed)
    kinds = [("parent", number) for number in TO_PARENT] + [("rank 1", number) for number in TO_RANK]
    for index in range(COUNT if count is None else count):
        whom, number = kinds[index % len(kinds)]
        share = chance.uniform(0.1, 0.9)
        expected = 128 + number if whom == "parent" else None
        name = f"{number.name} to {whom}, after {share:.0%} of the run"
        yield Case(name, partial(attempt, partial(send, whom, number, share), expected))


def send(whom: str, number: int, share: float, run: Run) -> list[int]:
    time.sleep(share * unbroken()[1])
    ranks = run.ranks()
    with contextlib.suppress(ProcessLookupError, IndexError):
        os.kill(run.pid if whom == "parent" else ranks[1], number)
    return ranks
