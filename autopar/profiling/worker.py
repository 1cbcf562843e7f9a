"""One measuring process. It runs every case while the other processes do the same; rank 0 writes all results.

`processes.py` starts it, or torchrun over a real topology.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.profiling.cases import ROUNDS, Case, Level, Topology, cases
from autopar.profiling.clock import CpuClock, CudaClock, Timing, gathered, hostname
from autopar.profiling.collectives import Groups, collective, make_groups
from autopar.profiling.kernels import kernel
from autopar.profiling.machine import available_cores, device_name, driver_version, memory_bytes
from autopar.profiling.samples import Provenance, Sample, Samples
from autopar.profiling.transfers import remove_file, transfer
from codegen.runtime.heap import keep_freed_memory
from codegen.runtime.processes import end_with_parent

STRETCH_SECONDS = {"brief": 0.1, "quick": 0.2, "full": 0.3}
"""Repetition time of collectives and copies in one round."""
SUSTAINED_SECONDS = {"brief": 0.25, "quick": 0.5, "full": 1.0}
"""Time for which a GPU is kept busy before each of its kernels is timed, in every round. A profile of one GPU takes
about 20 seconds longer (brief), one minute (quick) or six (full)."""
Progress = Callable[[int, int, str], None]
"""Called on rank 0 with (samples so far, samples in all, next case)."""


def main(argument: str, process_bytes: int) -> None:
    """Run the task (JSON) of `processes.py`: rank, size, parent, folder, out, level, on_gpu."""
    task = json.loads(argument)
    end_with_parent(task["parent"])
    torch.set_num_threads(1)
    device = torch.device("cuda", task["rank"]) if task["on_gpu"] else torch.device("cpu")
    if task["on_gpu"]:
        torch.cuda.set_device(device)
    store = (Path(task["folder"]) / "store").as_uri()
    # A single process needs no network between GPUs, which NCCL would look for.
    backend = "nccl" if task["on_gpu"] and task["size"] > 1 else "gloo"
    dist.init_process_group(backend, init_method=store, rank=task["rank"], world_size=task["size"])
    topology = Topology(1, task["size"], task["on_gpu"])
    try:
        run(Path(task["out"]), task["level"], topology, device, process_bytes)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run(
    out: Path,
    level: Level,
    topology: Topology,
    device: torch.device,
    process_bytes: int,
    progress: Progress | None = None,
) -> Samples | None:
    """Measure, on every rank of the process group, the cases that `out` lacks. Rank 0 returns all samples."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    everything = cases(topology, level)
    plan = [(number, case) for number in range(ROUNDS[level]) for case in everything]
    samples = Samples.open(out, provenance(topology, device, process_bytes)) if rank == 0 else None
    shared: list[set[tuple[str, int]]] = [samples.done if samples else set()]
    dist.broadcast_object_list(shared, src=0)
    runner = Runner(topology, level, device, out.parent)
    done = sum((case.name, number) in shared[0] for number, case in plan)
    try:
        for number, case in plan:
            if (case.name, number) in shared[0]:
                continue
            if progress and samples:
                progress(done, len(plan), case.name)
            try:
                timing = runner.time(case)
            except RuntimeError as error:
                # With several devices the other ranks wait for this one.
                if topology.num_devices > 1:
                    raise
                note_failure(out, case, error)
                continue
            done += 1
            if samples:
                samples.add(Sample(case, number, timing))
    finally:
        remove_file(out.parent, rank)
    if progress and samples:
        progress(done, len(plan), "")
    return samples


def failures_path(out: Path) -> Path:
    """Return the file that lists the failed cases of `out`, a line each."""
    return out.with_suffix(".failures.txt")


def note_failure(out: Path, case: Case, error: RuntimeError) -> None:
    """Append a case's failure to `failures_path`, and free the case's memory for the next one."""
    with failures_path(out).open("a", encoding="utf-8") as file:
        file.write(f"{case.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}\n")
    error.__traceback__ = None
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class Runner:
    """Times cases on one rank."""

    def __init__(self, topology: Topology, level: Level, device: torch.device, folder: Path) -> None:
        self.device, self.folder, self.seconds = device, folder, STRETCH_SECONDS[level]
        self.clock: CpuClock | CudaClock
        if device.type == "cuda":
            self.clock = CudaClock(device, SUSTAINED_SECONDS[level])
        else:
            keep_freed_memory()  # as generated programs do
            self.clock = CpuClock(topology.devices_per_node, available_cores())
        self.groups: Groups = make_groups(topology.groups(level))

    def time(self, case: Case) -> Timing:
        """Return the seconds of one call, mean over the ranks, which all pass the same case."""
        if case.family == "collective":
            return self.clock.collective(collective(case.parameters, self.groups, self.device), self.seconds)
        if case.family == "overlap":
            started = collective(case.parameters, self.groups, self.device, is_started=True)
            return self.clock.collective(started, self.seconds, is_started=True)
        if case.family == "transfer":
            call = transfer(case.parameters, self.device, self.folder, dist.get_rank())
            return self._disk_time(call) if "disk" in case.name else self.clock.stretch(call, self.seconds)
        call = kernel(case, self.device)
        timing_here = self.clock.stretch(call, self.seconds) if self._is_host_bound(case) else self.clock.kernel(call)
        timings = gathered(timing_here)
        mean = statistics.fmean(timing.seconds for timing in timings)
        return replace(timing_here, seconds=mean, share=statistics.fmean(timing.share for timing in timings))

    def _is_host_bound(self, case: Case) -> bool:
        """Return whether the host limits a case: on a GPU, overhead is the time of a stretch of tiny kernels."""
        return self.device.type == "cuda" and case.family == "overhead"

    def _disk_time(self, call: Callable[[], object]) -> Timing:
        """Time a transfer by the wall clock, as it uses no device and hardly any CPU."""
        call()
        dist.barrier()
        start = time.perf_counter()
        call()
        return Timing(statistics.fmean(gathered(time.perf_counter() - start)), 1)


def provenance(topology: Topology, device: torch.device, process_bytes: int) -> Provenance:
    """Return the machine and software of this process, as samples record them."""
    on_gpu = device.type == "cuda"
    return Provenance(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        host=hostname(),
        device=device_name(device),
        torch=torch.__version__,
        cuda=str(torch.version.cuda) if on_gpu else "",
        driver=driver_version() if on_gpu else "",
        backend=dist.get_backend(),
        num_nodes=topology.num_nodes,
        devices_per_node=topology.devices_per_node,
        num_cores=available_cores(),
        memory_bytes=memory_bytes(device, topology.devices_per_node),
        process_bytes=process_bytes,
    )


def under_torchrun(out: Path, level: Level, progress: Progress | None) -> Samples | None:
    """Measure as one of torchrun's processes, LOCAL_WORLD_SIZE on a node. Returns the samples on rank 0, else None."""
    on_gpu, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        world = dist.get_world_size()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        samples = run(out, level, Topology(world // per_node, per_node, on_gpu), device, resident_bytes(), progress)
        dist.barrier()
        return samples
    finally:
        dist.destroy_process_group()


def resident_bytes() -> int:
    """Return the peak resident memory of this process so far; 0 if the system does not say."""
    try:
        import resource  # optional: not on every system
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
