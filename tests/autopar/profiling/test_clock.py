"""The clock that leaves other programs out, against what they are known to have taken.

benchmarks/measuring.py holds it against programs that really run.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from autopar.profiling.clock import CudaClock, Usage, quiet_seconds
from autopar.profiling.load import Load


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


class Event:
    """A CUDA event on a CPU."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other.at - self.at)


def test_a_gpus_kernels_are_timed_in_a_stretch_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of GPUs on a CPU: the load runs for as long as it is to, and again before each repetition."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    device, order = torch.device("cpu"), list[str]()

    class Watched(Load):
        def start(self, count: int = 2) -> None:
            order.append("load")
            super().start(count)

    clock = CudaClock(device, 0.05, Watched(device, lambda: lambda: None, ((8, 16, 4), (4, 8, 4))))

    def slow() -> None:
        order.append("kernel")
        time.sleep(2e-3)

    begun = time.perf_counter()
    found = clock.kernel(slow)
    assert 2e-3 < found.seconds < 20e-3 and found.num_calls == clock.num_repeats
    assert time.perf_counter() - begun > 0.05 + clock.num_repeats * 2e-3
    assert order[-2 * clock.num_repeats :] == ["load", "kernel"] * clock.num_repeats
    assert order[3 : -2 * clock.num_repeats].count("load") > 2 and "kernel" not in order[3 : -2 * clock.num_repeats]


def test_a_load_marks_what_it_started_before_it_starts_more() -> None:
    """What is waited for was started before the newest kernels, so that the device always has some."""
    seen = list[str]()

    class Watched(Load):
        def start(self, count: int = 1) -> None:
            seen.append("start")

    def mark() -> Callable[[], None]:
        seen.append("mark")
        return lambda: seen.append("wait")

    Watched(torch.device("cpu"), mark, ((2, 2, 2),)).sustain(1e-3)
    assert seen[0] == "start" and seen[1:4] == ["mark", "start", "wait"]
    assert seen.count("start") == seen.count("wait") + 1
