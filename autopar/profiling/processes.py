"""Starts measuring processes on this machine and waits for them. They are new processes, as forks would share
threads."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autopar.errors import ClusterError
from autopar.files.scratch import temporary_folder
from autopar.profiling.cases import Level

START = """
import resource, sys
import torch, torch.distributed
process_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
from autopar.profiling.worker import main
main(sys.argv[1], process_bytes)
"""
"""The child reads its memory before it imports autopar, as generated programs do not import it."""

LIMIT_SECONDS = 1800.0
"""Time limit of the measurement, unless the caller sets a lower one."""


class OutOfTime(ClusterError):
    """Raised if measuring exceeds its time limit."""


def run_processes(
    num_processes: int,
    out: Path,
    level: Level,
    on_gpu: bool = False,
    timeout_seconds: float = LIMIT_SECONDS,
    watch: Callable[[], None] | None = None,
) -> None:
    """Measure with `num_processes` processes at once; rank 0 appends to the file `out`. watch: called repeatedly.

    Raises ClusterError if a process dies (with the end of its output), OutOfTime after timeout_seconds.
    """
    if num_processes < 1:
        raise ClusterError(
            "measuring needs at least one process", values={"num_processes": num_processes}, alternatives="1 or more"
        )
    with temporary_folder() as folder:
        places = {"folder": str(folder), "out": str(out.absolute()), "parent": os.getpid()}
        task = {"size": num_processes, **places, "level": level, "on_gpu": on_gpu}
        commands = [_command({**task, "rank": rank}) for rank in range(num_processes)]
        _run_all(commands, folder, timeout_seconds, watch)


def _command(task: Mapping[str, object]) -> list[str]:
    return [sys.executable, "-P", "-c", START, json.dumps(task)]


def _environment() -> dict[str, str]:
    """Return this process's environment with one thread per process, without a launcher's variables, with autopar on
    the import path."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    variables = {k: v for k, v in os.environ.items() if k not in launcher and not k.startswith("TORCHELASTIC_")}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH", "")]))
    names = {name for _, name in socket.if_nameindex()} if hasattr(socket, "if_nameindex") else set()
    if loopback := names & {"lo", "lo0"}:
        variables["GLOO_SOCKET_IFNAME"] = loopback.pop()
    return {**variables, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _run_all(
    commands: Sequence[Sequence[str]], folder: Path, timeout_seconds: float, watch: Callable[[], None] | None
) -> None:
    """Run the commands side by side. The first failure, or the time limit, ends all of them with a ClusterError."""
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
                raise OutOfTime(
                    "the measuring processes did not finish in time",
                    values={"limit in seconds": timeout_seconds, "processes": len(commands)},
                    alternatives="fewer devices, a less busy machine, or a TOML file that describes the cluster",
                )
            if watch:
                watch()
            time.sleep(0.1)
        _require_alive(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _require_alive(processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
    if failed:
        # The first rank to die is not known, but the ranks that it took along print less.
        texts = {rank: logs[rank].read_text(errors="replace").strip() for rank in failed}
        rank = max(failed, key=lambda rank: len(texts[rank]))
        raise ClusterError(
            "a measuring process failed",
            values={"process": rank, "exit code": processes[rank].returncode, "output": texts[rank][-2000:]},
            alternatives="a TOML file that describes the cluster",
        )
