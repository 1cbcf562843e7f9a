"""Times kernels and collectives in real processes that run at the same time and share this machine's cores.

`measure` starts the processes (`measuring_process`, anew, so that nothing forks a process with threads), each with one
torch thread, as launched CPU programs have.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import ClusterError
from autopar.measuring_process import BLOCK_BACKWARD_KERNELS, BLOCK_FORWARD_KERNELS
from cost_models.collective import Kind
from cost_models.compute import Work

ALL_ROUNDS = slice(None)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Mean seconds of one call of a kernel, called from Python and recorded by autograd."""

    work: Work
    seconds: float


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Mean seconds of one collective of num_bytes (as in cost_models.collective), all groups of group_size at once."""

    kind: Kind
    num_bytes: int
    group_size: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """Medians over rounds of means over the processes, which have num_cores cores between them.

    Seconds of kernels are those of a process that has its part of the cores, and all of that part.
    forward_seconds, backward_seconds: overhead of one kernel on tiny tensors, in eager forward and in autograd's
    backward. process_bytes: resident memory of a process that has imported torch and done nothing yet.
    share: how much of its part of the cores a process really had, other programs taking the rest. Far below 1, the
    seconds of collectives are too long.
    """

    num_processes: int
    num_cores: float
    share: float
    forward_seconds: float
    backward_seconds: float
    process_bytes: int
    kernels: tuple[KernelTime, ...]
    collectives: tuple[CollectiveTime, ...]


def measure(num_processes: int) -> Measurements:
    """What `num_processes` processes timed that ran at once. Raises ClusterError as `time_rounds` does."""
    return summarise(time_rounds(num_processes), available_cores())


def available_cores() -> float:
    """Cores that this process may use: by its affinity, and by the container's quota, which may be a fraction."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        # "max 100000" if there is no quota, which no float is made of.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, float(quota) / float(period))
    return cores


def time_rounds(
    num_processes: int, *, min_rounds: int = 3, collective_seconds: float = 4.0, timeout_seconds: float = 180.0
) -> list[Mapping[str, Any]]:
    """Runs `num_processes` processes at once and returns what each of them timed, round by round.

    Every kernel is timed min_rounds times, and so is every collective, in more rounds while collective_seconds last.
    Raises ClusterError if a process dies (with the end of what it printed) or timeout_seconds pass.
    """
    if num_processes < 1:
        raise ClusterError("measuring needs at least one process", values={"num_processes": num_processes})
    with tempfile.TemporaryDirectory(prefix="autopar-measure-") as folder:
        task = {
            "size": num_processes,
            "folder": folder,
            "min_rounds": min_rounds,
            "collective_seconds": collective_seconds,
        }
        _run_all([_command({**task, "rank": rank}) for rank in range(num_processes)], Path(folder), timeout_seconds)
        return [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(num_processes)]


def _command(task: Mapping[str, object]) -> list[str]:
    # -P: the folder of this file, with its graph.py and trace.py, must not come first on the path.
    return [sys.executable, "-P", str(Path(__file__).with_name("measuring_process.py")), json.dumps(task)]


def _environment() -> dict[str, str]:
    """This process's, with one thread per process, no trace of a launcher, and cost_models importable."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("TORCHELASTIC_")}
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, kept.get("PYTHONPATH", "")]))
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    if loopback := names & {"lo", "lo0"}:
        kept["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _run_all(commands: Sequence[Sequence[str]], folder: Path, timeout_seconds: float) -> None:
    """Runs them side by side; the first that fails, or the time limit, ends all of them with a ClusterError."""
    deadline = time.monotonic() + timeout_seconds
    logs = [folder / f"log{rank}.txt" for rank in range(len(commands))]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in zip(commands, logs, strict=True):
            with log.open("wb") as stream:
                processes.append(subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=_environment()))
        while any(process.poll() is None for process in processes):
            _require_alive(processes, logs)
            if time.monotonic() > deadline:
                raise ClusterError(
                    "the measuring processes did not finish in time",
                    values={"limit in seconds": timeout_seconds, "processes": len(commands)},
                    alternatives="fewer devices, a less busy machine, or a TOML file that describes the cluster",
                )
            time.sleep(0.02)
        _require_alive(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _require_alive(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    if failed:
        # The rank that died first is not known, but those that it took along have less to say.
        texts = {rank: logs[rank].read_text(errors="replace").strip() for rank in failed}
        rank = max(failed, key=lambda rank: len(texts[rank]))
        raise ClusterError(
            "a measuring process failed",
            values={"process": rank, "exit code": processes[rank].returncode, "output": texts[rank][-2000:]},
            alternatives="a TOML file that describes the cluster",
        )


def summarise(results: Sequence[Mapping[str, Any]], num_cores: float, rounds: slice = ALL_ROUNDS) -> Measurements:
    """Mean over the processes of each round, then the median of the rounds (or of some of them).

    A kernel's CPU time becomes seconds by the part of a core that each process has: num_cores / processes, at most 1.
    """
    part = min(1.0, num_cores / len(results))

    def middle(per_process: Sequence[Sequence[float]]) -> float:
        return statistics.median(statistics.fmean(times) for times in list(zip(*per_process, strict=True))[rounds])

    first = results[0]
    kernels = [
        KernelTime(
            Work(**{**work, "shape": tuple(work["shape"])}), middle([r["kernels"][index] for r in results]) / part
        )
        for index, work in enumerate(first["works"])
    ]
    collectives = [
        CollectiveTime(kind, num_bytes, group_size, middle([r["collectives"][index][-1] for r in results]))
        for index, (kind, num_bytes, group_size, _) in enumerate(first["collectives"])
    ]
    return Measurements(
        num_processes=len(results),
        num_cores=num_cores,
        share=min(1.0, statistics.fmean(result["share"] for result in results) / part),
        forward_seconds=middle([result["forward"] for result in results]) / part / BLOCK_FORWARD_KERNELS,
        backward_seconds=middle([result["backward"] for result in results]) / part / BLOCK_BACKWARD_KERNELS,
        process_bytes=max(result["process_bytes"] for result in results),
        kernels=tuple(kernels),
        collectives=tuple(collectives),
    )
