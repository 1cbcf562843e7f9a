"""kill -9 of a rank, of the parent, or of all, at random times: what is started again continues as if nothing had been.

A run saves after every step, so about half of the kills are within a save.
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

COUNT = 12


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Each takes some five seconds."""
    chance = random.Random(seed)
    for _ in range(COUNT if count is None else count):
        whom, share = chance.choice(("rank 0", "rank 1", "parent", "all")), chance.uniform(0.1, 1.0)
        yield Case(f"{whom}, after {share:.0%} of the run", partial(attempt, partial(kill, whom, share)))


def kill(whom: str, share: float, run: Run) -> list[int]:
    time.sleep(share * unbroken()[1])
    ranks = run.ranks()
    numbered = {f"rank {index}": [pid] for index, pid in enumerate(ranks)}
    for pid in {"parent": [run.pid], "all": [run.pid, *ranks], **numbered}.get(whom, []):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return ranks
