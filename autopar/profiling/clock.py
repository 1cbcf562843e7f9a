"""The timing primitives, which differ between a CPU that processes share and a GPU per process.

Both clocks time a `kernel` (on one process's device, while all other processes are as busy) and a `stretch` of many
calls that all processes make together (collectives, copies), for about the given seconds. Every rank calls the same
methods in the same order, and every rank gets the same seconds of a stretch.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.profiling.load import Call, Load

CPU_WINDOW_SECONDS = 0.04
"""Repetition time of one kernel in one round: about ten time slices of the scheduler."""
CPU_HELD_BYTES = 2**25
"""Kernel results that stay alive together, as the activations of a step do, so that writes miss the caches."""
CPU_LEAST_SECONDS = 1e-5
"""A lower limit on the time of any collective."""
CPU_WORK_SECONDS = 8e-3
"""Compute between two collectives: about half a layer of a small transformer."""
FLUSH_BYTES = 2**28
"""Bytes written between kernels: more than any L2 cache of today."""


@dataclass(frozen=True, slots=True)
class Timing:
    """seconds: of one call, mean over the ranks. num_calls: timed calls. share: the part of its cores that this process
    really got, as other programs took the rest; 1 on a GPU."""

    seconds: float
    num_calls: int
    share: float = 1.0


class CpuClock:
    """The clock of processes that share a machine's cores, possibly with programs of other users.

    A kernel costs its CPU time, which leaves out other programs, divided by the part of a core that each process has:
    cores / processes, at most 1. A stretch, in which processes wait for one another, costs its wall time less the share
    of other programs. With C cores, CPU seconds `busy` of the whole machine and `own` of all processes on it,

        seconds = wall - (busy - own) / C

    which is the wall time if other programs take nothing. The system shares cores by time slices of milliseconds and
    counts in hundredths of a second, so a stretch should last a tenth of a second or more.

    Collectives are timed between stretches of compute, whose CPU seconds `work` are subtracted at the charge above:

        seconds = wall - work / part

    So a collective includes all losses that it causes in a step: late ranks (equal work never takes equal time),
    threads that must wake up, and data in another core's cache. Back to back, an all_reduce of 512 KiB took 2.3 to
    3.0 ms of two processes and 7.2 ms of four on two cores; after 16 ms of compute it took 4.3 and 11.9 ms.
    """

    def __init__(self, num_local: int, num_cores: float) -> None:
        self.num_local, self.num_cores = num_local, num_cores
        self.part = min(1.0, num_cores / num_local)

    def kernel(self, call: Call) -> Timing:
        """Return the CPU time of this process for one call, repeated for CPU_WINDOW_SECONDS."""
        results = [call()]
        most = max(1, CPU_HELD_BYTES // max(_num_bytes(results[0]), 1))
        _barrier()
        count, start, cpu_start = 0, time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) - start < CPU_WINDOW_SECONDS:
            if len(results) >= most:
                results.clear()
            results.append(call())
            count += 1
        cpu_seconds = time.process_time() - cpu_start
        return Timing(cpu_seconds / count / self.part, count, min(1.0, cpu_seconds / (now - start) / self.part))

    def stretch(self, call: Call, seconds: float) -> Timing:
        count = repetitions(call, seconds, self.wait)
        _barrier()
        before = Usage.now()
        for _ in range(count):
            call()
        usage = before.until(Usage.now())
        undisturbed = quiet_seconds(gathered((hostname(), usage)), self.num_cores)
        return Timing(undisturbed / count, count, min(1.0, undisturbed / usage.wall_seconds))

    def collective(self, call: Call, seconds: float, is_started: bool = False) -> Timing:
        """Time a collective as a step runs it. is_started: the call only starts it, and compute goes on."""
        work = _work()
        num_works = repetitions(work, CPU_WORK_SECONDS, self.wait)

        def compute() -> float:
            start = time.thread_time()
            for _ in range(num_works):
                work()
            return time.thread_time() - start

        def step() -> float:
            if not is_started:
                computed = compute()
                call()
                return computed
            handle: Any = call()
            computed = compute() + compute()
            handle.wait()
            return computed

        count = repetitions(step, seconds, self.wait)
        _barrier()
        before = Usage.now()
        computed = sum(step() for _ in range(count))
        usage = before.until(Usage.now())
        undisturbed = quiet_seconds(gathered((hostname(), usage)), self.num_cores)
        charged = statistics.fmean(gathered(computed)) / self.part
        # Other programs take the cores while processes wait, so the difference can be almost nothing.
        lost = max((undisturbed - charged) / count, CPU_LEAST_SECONDS)
        return Timing(lost, count, min(1.0, undisturbed / usage.wall_seconds))

    def wait(self) -> None:
        """Return at once, as nothing on a CPU is asynchronous."""


class CudaClock:
    """The clock of processes with a GPU each: CUDA events around each kernel (after an L2 flush) or stretch.

    load: other kernels that run before and between timed kernels; sustained_seconds: their duration before the first. A
    busy GPU is slower than an idle one, and training keeps it busy.
    """

    def __init__(self, device: torch.device, sustained_seconds: float, load: Load | None = None) -> None:
        self.device, self.num_repeats, self.sustained_seconds = device, 20, sustained_seconds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.load = load or Load(device, self._mark)

    def kernel(self, call: Call) -> Timing:
        """Return the median over repetitions amid other kernels. These run while the host enqueues the call, so the
        time excludes the launch."""
        for _ in range(3):
            call()
        _barrier()
        pairs = [self._events() for _ in range(self.num_repeats)]
        self.load.sustain(self.sustained_seconds)
        for start, end in pairs:
            self.load.start()
            self.flush.zero_()
            start.record()
            call()
            end.record()
        self.wait()
        return Timing(statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs), self.num_repeats)

    def stretch(self, call: Call, seconds: float) -> Timing:
        count = repetitions(call, seconds, self.wait)
        start, end = self._events()
        _barrier()
        self.wait()
        start.record()
        for _ in range(count):
            call()
        end.record()
        self.wait()
        mean = statistics.fmean(gathered(start.elapsed_time(end) / 1e3))
        return Timing(mean / count, count)

    def collective(self, call: Call, seconds: float, is_started: bool = False) -> Timing:
        """Time a stretch: GPUs of one kind take equal time, and NCCL's kernels need no waking."""
        return self.stretch(call, seconds)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _mark(self) -> Call:
        event_class: Any = torch.cuda.Event
        event = event_class()
        event.record()
        wait: Call = event.synchronize
        return wait

    def _events(self) -> tuple[Any, Any]:
        event: Any = torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """wall_seconds: of the clock; cpu_seconds: of this process; busy_seconds: of all cores of the machine together."""

    wall_seconds: float
    cpu_seconds: float
    busy_seconds: float

    @staticmethod
    def now() -> Usage:
        """Read the clocks, of which only differences matter. Without /proc/stat no other program counts as busy."""
        return Usage(time.perf_counter(), time.process_time(), _busy_seconds())

    def until(self, later: Usage) -> Usage:
        """Return the usage between two readings."""
        return Usage(
            later.wall_seconds - self.wall_seconds,
            later.cpu_seconds - self.cpu_seconds,
            later.busy_seconds - self.busy_seconds,
        )


def quiet_seconds(usages: Sequence[tuple[str, Usage]], num_cores: float) -> float:
    """Return the time of a stretch on machines without other programs; the slowest host counts.

    usages: of each rank, with its host. The result is at least the ranks' CPU time on all cores, at most the wall time.
    """
    slowest = 0.0
    for host in {host for host, _ in usages}:
        host_usages = [usage for other, usage in usages if other == host]
        wall = statistics.fmean(usage.wall_seconds for usage in host_usages)
        cpu_seconds = sum(usage.cpu_seconds for usage in host_usages)
        busy = statistics.fmean(usage.busy_seconds for usage in host_usages)
        other_programs = max(busy - cpu_seconds, 0.0) if busy else 0.0
        least = max(cpu_seconds / num_cores, max(usage.cpu_seconds for usage in host_usages))
        slowest = max(slowest, min(wall, max(wall - other_programs / num_cores, least)))
    return slowest


def _busy_seconds() -> float:
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def repetitions(call: Call, seconds: float, wait: Callable[[], None]) -> int:
    """Return how many calls take about `seconds`, equal on all ranks. The calls also warm up."""
    call()
    wait()
    _barrier()
    start = time.perf_counter()
    for _ in range(2):
        call()
    wait()
    slowest: float = max(gathered((time.perf_counter() - start) / 2))
    return max(1, min(round(seconds / max(slowest, 1e-7)), 2000))


def gathered(value: Any) -> list[Any]:
    """Return every rank's value, or this process's value without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def hostname() -> str:
    """Return the name of this machine; empty if the system has none."""
    return os.uname().nodename if hasattr(os, "uname") else ""


def _work() -> Call:
    """Return a call of a product and elementwise operations, about 2 ms of one core."""
    x, weight = torch.randn(256, 512), torch.randn(512, 512)
    return lambda: (x @ weight).mul_(0.5).add_(x)


def _num_bytes(result: object) -> int:
    """Return the bytes of the tensors that a call returned."""
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
