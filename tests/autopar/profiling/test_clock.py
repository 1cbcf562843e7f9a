"""The clock that leaves other programs out, against what they are known to have taken."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch.distributed as dist

from autopar.launch import run_ranks
from autopar.profiling.clock import CpuClock, Usage, quiet_seconds
from autopar.profiling.machine import available_cores


@pytest.mark.parametrize(
    ("usages", "cores", "expected"),
    [
        # One process on two cores, alone; with one other program that takes the other core all the time, which costs
        # nothing; with others that take as much as two cores give.
        ([(2.0, 2.0, 2.0)], 2.0, 2.0),
        ([(2.0, 2.0, 4.0)], 2.0, 2.0),
        ([(4.0, 2.0, 8.0)], 2.0, 2.0),
        # Two that wait for one another half of the time, alone.
        ([(2.0, 1.0, 2.0), (2.0, 1.0, 2.0)], 2.0, 2.0),
        # Two that compute, and others who take two thirds of both cores.
        ([(3.0, 1.0, 6.0), (3.0, 1.0, 6.0)], 2.0, 1.0),
        # Four on two cores, nobody else; then others with a third.
        ([(2.0, 1.0, 4.0)] * 4, 2.0, 2.0),
        ([(3.0, 1.0, 6.0)] * 4, 2.0, 2.0),
        # A system that does not tell how busy it is.
        ([(3.0, 1.0, 0.0)] * 2, 2.0, 3.0),
    ],
)
def test_quiet_seconds_leave_out_what_others_took(
    usages: list[tuple[float, float, float]], cores: float, expected: float
) -> None:
    found = quiet_seconds([("host", Usage(*usage)) for usage in usages], cores)
    assert found == pytest.approx(expected)


def test_the_slowest_host_counts() -> None:
    slow, fast = ("a", Usage(2.0, 2.0, 2.0)), ("b", Usage(2.0, 1.0, 5.0))
    assert quiet_seconds([slow, fast], 2.0) == pytest.approx(2.0)
    assert quiet_seconds([fast], 2.0) == pytest.approx(1.0)


def spin() -> float:
    """About 5 ms of computing."""
    return sum(i * 0.5 for i in range(60_000))


def _forever() -> None:
    while True:
        spin()


def _ranks_with(seconds_late: float) -> float:
    """Seconds of a collective that takes none of its own, before which rank 1 of two is late."""
    clock = CpuClock(2, 2.0)

    def late() -> None:
        if dist.get_rank() == 1:
            time.sleep(seconds_late)
        dist.barrier()

    return clock.collective(late, 0.3).seconds


@pytest.mark.slow
def test_a_collective_holds_what_ranks_wait_for_one_another() -> None:
    plain, late = (min(run_ranks(_ranks_with, (seconds,), 2)[0] for _ in range(3)) for seconds in (0.0, 0.02))
    assert late - plain == pytest.approx(0.02, rel=0.4)


@pytest.mark.slow
def test_a_busy_machine_measures_as_a_quiet_one_does() -> None:
    """The same work beside as many busy programs as there are cores: by the wall it takes longer."""
    clock = CpuClock(1, 1.0)
    alone = clock.kernel(spin).seconds
    others = [
        multiprocessing.get_context("spawn").Process(target=_forever, daemon=True)
        for _ in range(2 * int(available_cores()))
    ]
    for process in others:
        process.start()
    try:
        time.sleep(2.0)
        start = time.perf_counter()
        timing = CpuClock(1, available_cores()).stretch(spin, 0.5)
        wall = (time.perf_counter() - start) / (timing.num_calls + 3)
    finally:
        for process in others:
            process.kill()
            process.join()
    assert wall > 1.5 * alone
    assert timing.seconds == pytest.approx(alone, rel=0.35)
