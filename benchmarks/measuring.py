"""How well this machine is measured: the clock beside other programs, and fits against a second measurement.

    python -m benchmarks.measuring

Prints one ratio a line, and what it should be near. Times depend on the machine and on what else it does, so this is no
test. The clock: CpuClock's seconds of a call beside two busy programs per core, over those without them (1); what a
collective takes before which one of two ranks is 20 ms late, less what it takes otherwise, over 20 ms (1). The fits:
two processes are measured in alternating rounds, and what is fitted to one half predicts the other (matmuls,
memory-bound kernels and each collective: the median of predicted over measured, 1; backward over forward of a block,
more than 1). Planning aside: milliseconds of one prediction of a traced GPT-3 175B (less than 50).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist

from autopar.launch import run_ranks
from autopar.profiling.clock import CpuClock
from autopar.profiling.fit_link import predicted_seconds
from autopar.profiling.machine import available_cores
from autopar.profiling.processes import run_processes
from autopar.profiling.profile import Profile, fitted
from autopar.profiling.samples import Samples
from autopar.strategies import Predictor
from benchmarks.planning import CASES, build
from cost_models import compute

LATE_SECONDS = 0.02


def spin() -> float:
    """About 5 ms of computing."""
    return sum(i * 0.5 for i in range(60_000))


def _forever() -> None:
    while True:
        spin()


@contextlib.contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """That many processes that compute all the time."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_forever, daemon=True) for _ in range(count)]
    for process in others:
        process.start()
    try:
        time.sleep(2.0)
        yield
    finally:
        for process in others:
            process.kill()
            process.join()


def beside_others() -> float:
    """The clock's seconds of the same work on a busy machine, over those on this one as it is."""
    alone = CpuClock(1, 1.0).kernel(spin).seconds
    with busy_programs(2 * int(available_cores())):
        return CpuClock(1, available_cores()).stretch(spin, 0.5).seconds / alone


def _ranks_with(seconds_late: float) -> float:
    """Seconds of a collective that takes none of its own, before which rank 1 of two is late."""

    def late() -> None:
        if dist.get_rank() == 1:
            time.sleep(seconds_late)
        dist.barrier()

    return CpuClock(2, 2.0).collective(late, 0.3).seconds


def waited() -> float:
    """What a late rank adds to a collective, over how late it is."""
    plain, late = (min(run_ranks(_ranks_with, (s,), 2)[0] for _ in range(3)) for s in (0.0, LATE_SECONDS))
    return (late - plain) / LATE_SECONDS


def measured_twice() -> tuple[Profile, Profile]:
    """This machine timed twice by two processes: every other round, so that both see it as busy as it is."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "profile.jsonl"
        run_processes(2, raw, "quick")
        samples = Samples.read(raw)
    assert samples is not None
    return fitted(samples.only_rounds(slice(0, None, 2))), fitted(samples.only_rounds(slice(1, None, 2)))


def fits(first: Profile, second: Profile) -> Iterator[tuple[str, float]]:
    """Predicted by the first over measured by the second, by kind."""
    cluster = first.cluster
    ratios: dict[str, list[float]] = {}
    for kernel in second.measured.kernels:
        if kernel.work.kind in ("matmul", "memory") and kernel.seconds > 4 * cluster.device.kernel_launch_seconds:
            ratios.setdefault(kernel.work.kind, []).append(
                compute.seconds(kernel.work, cluster.device) / kernel.seconds
            )
    for call in second.measured.collectives:
        if call.num_bytes >= 2**16:
            ratios.setdefault(call.kind, []).append(predicted_seconds(call, cluster) / call.seconds)
    yield from ((kind, statistics.median(values)) for kind, values in ratios.items())
    yield "backward / forward", second.measured.backward_seconds / second.measured.forward_seconds


def prediction_milliseconds() -> float:
    """The median of five predictions of strategies of a traced GPT-3 175B."""
    model, batch = build(CASES["gpt-3-175b"])
    gpt3 = Predictor(model, example_inputs=batch)
    strategy = {"pp": 8, "dp": 16, "tp": 8, "zero": 1, "micro_batches": 96, "recompute": "full"}

    def seconds(call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    gpt3.predict("128x8 a100-80g", strategy, framework="megatron-2021")
    return 1e3 * statistics.median(
        seconds(lambda z=zero: gpt3.predict("128x8 a100-80g", strategy | {"zero": z}, framework="megatron-2021"))
        for zero in (0, 1, 2, 1, 0)
    )


def main() -> int:
    """Prints all figures."""
    print(f"the clock beside other programs       {beside_others():8.2f}  (1)")
    print(f"what a late rank adds                 {waited():8.2f}  (1)")
    for name, ratio in fits(*measured_twice()):
        print(f"predicted / measured: {name:<18}{ratio:6.2f}  ({'over 1' if '/' in name else '1'})")
    print(f"one prediction of GPT-3 175B, ms      {prediction_milliseconds():8.1f}  (50 at most)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
