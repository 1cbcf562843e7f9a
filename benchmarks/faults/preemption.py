"""SIGTERM, as Slurm and Kubernetes send it, to the parent, to a rank, or to all processes, while a run trains,
evaluates or writes: it writes a last checkpoint, exits with 143, and continues as if nothing had been.

The run itself saves nothing before its end, so that whatever is resumed from is that checkpoint.
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
from benchmarks.faults.case import Case, Result

COUNT = 12
WHOM = ("parent", "rank 0", "rank 1", "all")


def cases(count: int | None, seed: int) -> Iterator[Case]:
    """Each takes some five seconds."""
    chance = random.Random(seed)
    for index in range(COUNT if count is None else count):
        whom, share = WHOM[index % len(WHOM)], chance.uniform(0.4, 0.95)
        yield Case(f"{whom}, after {share:.0%} of the run", partial(tell, whom, share))


def tell(whom: str, share: float) -> Result:
    """What comes of SIGTERM then; before the first step there is nothing to write."""
    result = attempt(partial(_send, whom, share), 128 + signal.SIGTERM, every=0)
    if result.detail == "resumed at step 0" and share > 0.75:
        return Result("wrong", "nothing was written")
    return result


def _send(whom: str, share: float, run: Run) -> list[int]:
    time.sleep(share * unbroken(0)[1])
    ranks = run.ranks()
    numbered = {f"rank {index}": [pid] for index, pid in enumerate(ranks)}
    for pid in {"parent": [run.pid], "all": [run.pid, *ranks], **numbered}.get(whom, []):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return ranks
