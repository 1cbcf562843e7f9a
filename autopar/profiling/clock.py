"""The timing primitives: everything that differs between a CPU that processes share and a GPU of one's own.

Both clocks time a `kernel` (one process' device, while every other process is as busy) and a `stretch` of many calls
that all processes make together (collectives, copies), for about as many seconds as they are given. Every rank calls
the same methods in the same order; every rank gets the same seconds of a stretch.
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
"""How long one kernel is repeated in one round: some ten time slices of the scheduler."""
CPU_HELD_BYTES = 2**25
"""Results of a kernel that are alive together, as a step's activations are: what is written is in no cache."""
CPU_LEAST_SECONDS = 1e-5
"""Seconds below what any collective takes."""
CPU_WORK_SECONDS = 8e-3
"""What ranks compute between two collectives: about a half of a small transformer's layer."""
FLUSH_BYTES = 2**28
"""Bytes written between kernels: more than any L2 cache of today."""


@dataclass(frozen=True, slots=True)
class Timing:
    """seconds of one call, mean over the ranks. num_calls: that were timed. share: of its part of the cores that this
    process really had, other programs taking the rest; 1 on a GPU."""

    seconds: float
    num_calls: int
    share: float = 1.0


class CpuClock:
    """The clock of processes that share a machine's cores, possibly with programs that are none of ours.

    Kernels are timed by the CPU time that they use, which leaves out what other programs take, and charged for the part
    of a core that each process has: cores / processes, at most 1. Stretches, in which processes wait for one another,
    are timed by the clock, less what other programs took meanwhile: with C cores, CPU seconds `busy` of the whole
    machine and `own` of all processes on it,

        seconds = wall - (busy - own) / C

    which is the wall time where other programs take nothing. Cores are shared by time slices of milliseconds and
    counted in hundredths of a second, so that a stretch should last a tenth of a second or more.

    Collectives are timed between stretches of work, whose CPU seconds `work` are taken off at the charge above:

        seconds = wall - work / part

    so that they hold what a step loses to them: ranks that come late, as equal work never takes processes the same
    time, threads that have to be woken, and data that is in another core's cache. Back to back, an all_reduce of
    512 KiB took 2.3 to 3.0 ms of two processes and 7.2 ms of four on two cores; after 16 ms of work, 4.3 and 11.9.
    """

    def __init__(self, num_local: int, num_cores: float) -> None:
        self.num_local, self.num_cores = num_local, num_cores
        self.part = min(1.0, num_cores / num_local)

    def kernel(self, call: Call) -> Timing:
        """CPU time of this process, repeated for CPU_WINDOW_SECONDS."""
        held = [call()]
        most = max(1, CPU_HELD_BYTES // max(_num_bytes(held[0]), 1))
        _barrier()
        count, start, cpu_start = 0, time.perf_counter(), time.process_time()
        while (now := time.perf_counter()) - start < CPU_WINDOW_SECONDS:
            if len(held) >= most:
                held.clear()
            held.append(call())
            count += 1
        used = time.process_time() - cpu_start
        return Timing(used / count / self.part, count, min(1.0, used / (now - start) / self.part))

    def stretch(self, call: Call, seconds: float) -> Timing:
        count = repetitions(call, seconds, self.wait)
        _barrier()
        before = Usage.now()
        for _ in range(count):
            call()
        used = before.until(Usage.now())
        undisturbed = quiet_seconds(gathered((hostname(), used)), self.num_cores)
        return Timing(undisturbed / count, count, min(1.0, undisturbed / used.wall_seconds))

    def collective(self, call: Call, seconds: float, is_started: bool = False) -> Timing:
        """Times a collective as a step has it. is_started: the call only starts it, and work goes on."""
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
        used = before.until(Usage.now())
        undisturbed = quiet_seconds(gathered((hostname(), used)), self.num_cores)
        charged = statistics.fmean(gathered(computed)) / self.part
        # What processes leave of their part of the cores while they wait, others take: hardly anything may be lost.
        lost = max((undisturbed - charged) / count, CPU_LEAST_SECONDS)
        return Timing(lost, count, min(1.0, undisturbed / used.wall_seconds))

    def wait(self) -> None:
        """Returns at once, as nothing on a CPU is asynchronous."""


class CudaClock:
    """The clock of processes with a GPU each: a pair of events around each kernel (L2 flushed before) or stretch.

    load: kernels among which others are timed, and sustained_seconds for how long before: a busy GPU is slower than
    one that has just woken, and that is how training finds it.
    """

    def __init__(self, device: torch.device, sustained_seconds: float, load: Load | None = None) -> None:
        self.device, self.num_repeats, self.sustained_seconds = device, 20, sustained_seconds
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.load = load or Load(device, self._mark)

    def kernel(self, call: Call) -> Timing:
        """Median over repetitions in a stretch of other kernels, that goes on while the host enqueues the call, so that
        the launch is not in the figure."""
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
        """GPUs of one kind take the same time, and NCCL's kernels need not be woken."""
        return self.stretch(call, seconds)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _mark(self) -> Call:
        made: Any = torch.cuda.Event
        event = made()
        event.record()
        waited: Call = event.synchronize
        return waited

    def _events(self) -> tuple[Any, Any]:
        event: Any = torch.cuda.Event
        return event(enable_timing=True), event(enable_timing=True)


@dataclass(frozen=True, slots=True)
class Usage:
    """wall_seconds; cpu_seconds of this process; busy_seconds of all of the machine's cores together."""

    wall_seconds: float
    cpu_seconds: float
    busy_seconds: float

    @staticmethod
    def now() -> Usage:
        """The clocks' states, of which only differences mean something. Without /proc/stat, nobody else is busy."""
        return Usage(time.perf_counter(), time.process_time(), _busy_seconds())

    def until(self, later: Usage) -> Usage:
        """What passed between two states."""
        return Usage(
            later.wall_seconds - self.wall_seconds,
            later.cpu_seconds - self.cpu_seconds,
            later.busy_seconds - self.busy_seconds,
        )


def quiet_seconds(usages: Sequence[tuple[str, Usage]], num_cores: float) -> float:
    """How long a stretch takes on machines with nothing else to do; the slowest host counts. usages: of each rank, with
    its host. At least what the ranks' own CPU time takes on all cores, at most the wall time."""
    slowest = 0.0
    for host in {host for host, _ in usages}:
        own = [usage for other, usage in usages if other == host]
        wall = statistics.fmean(usage.wall_seconds for usage in own)
        used = sum(usage.cpu_seconds for usage in own)
        busy = statistics.fmean(usage.busy_seconds for usage in own)
        others = max(busy - used, 0.0) if busy else 0.0
        least = max(used / num_cores, max(usage.cpu_seconds for usage in own))
        slowest = max(slowest, min(wall, max(wall - others / num_cores, least)))
    return slowest


def _busy_seconds() -> float:
    try:
        fields = [int(text) for text in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
    except (OSError, ValueError):
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = fields
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def repetitions(call: Call, seconds: float, wait: Callable[[], None]) -> int:
    """How many calls take about so many seconds, equal on all ranks. Warms up on the way."""
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
    """Every rank's value; the own one without a process group."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def hostname() -> str:
    """The name of this machine; empty where the system has none."""
    return os.uname().nodename if hasattr(os, "uname") else ""


def _work() -> Call:
    """A product and what becomes of it, some 2 ms of one core."""
    x, weight = torch.randn(256, 512), torch.randn(512, 512)
    return lambda: (x @ weight).mul_(0.5).add_(x)


def _num_bytes(result: object) -> int:
    """Bytes of the tensors that a call returned."""
    tensors = result if isinstance(result, (tuple, list)) else (result,)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
