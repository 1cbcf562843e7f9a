"""Starting a program's ranks as processes of this machine.

`launch_program` and `launch_main` go through torch's elastic launcher: errors of one rank end all. `run_ranks` is the
plain form that verification uses: forked processes where nothing but the CPU is used (half a second instead of
fifteen), spawned ones otherwise.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from autopar.backend import patience_seconds
from autopar.costs.rates import is_cpu
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.compiled import CompiledProgram

TIMEOUT_SECONDS = 600.0
GROUP_SECONDS = 120.0
"""How long ranks wait for one another in a collective."""


class RankError(RuntimeError):
    """A rank died or raised; the message holds its number and traceback."""


def run_ranks(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    num_ranks: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
    group_seconds: float = GROUP_SECONDS,
) -> list[Any]:
    """Call `function(*args)` in num_ranks processes joined by a process group; results by rank.

    Raises AutoparError as a rank raised it, RankError for anything else, also for a rank that dies without a word or
    does not answer in time, all in timeout_seconds and within a collective in group_seconds. No process is left behind.
    """
    context: Any = mp.get_context("fork" if not torch.cuda.is_available() and os.name == "posix" else "spawn")
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="autopar_ranks_") as folder:
        store = str(Path(folder) / "store")
        common = (num_ranks, store, group_seconds, results, function, args)
        processes = [
            context.Process(target=_rank_main, args=(rank, *common), daemon=True) for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(processes, results, timeout_seconds)
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()


def group_seconds(compiled: CompiledProgram) -> float:
    """GROUP_SECONDS, or more where ranks compile."""
    return max(GROUP_SECONDS, patience_seconds(compiled.program))


def _collect(processes: list[Any], results: Any, timeout_seconds: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(found) < len(processes):
        try:
            rank, outcome, value = results.get(timeout=0.2)
        except queue.Empty:
            silent = [r for r, p in enumerate(processes) if r not in found and p.exitcode not in (None, 0)]
            if silent:
                raise RankError(f"rank {silent[0]} died with exit code {processes[silent[0]].exitcode}") from None
            if time.monotonic() > deadline:
                missing = [r for r in range(len(processes)) if r not in found]
                raise RankError(f"ranks {missing} gave no answer in {timeout_seconds:.0f} s") from None
            continue
        if outcome == "error":
            if isinstance(value, AutoparError):
                raise value
            time.sleep(0.5)  # a rank that died breaks the others' connections: name it first
            died = [
                f"rank {r} died with exit code {p.exitcode}; "
                for r, p in enumerate(processes)
                if p.exitcode not in (None, 0)
            ]
            raise RankError(f"{''.join(died)}rank {rank}: {value}")
        found[rank] = value
    return [found[rank] for rank in range(len(processes))]


def _rank_main(
    rank: int,
    num_ranks: int,
    store: str,
    group_seconds: float,
    results: Any,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        backend = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(rank)
        timeout = timedelta(seconds=group_seconds)
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timeout
        )
        value = function(*args)
        dist.barrier()
        results.put((rank, "ok", value))
    except AutoparError as error:
        results.put((rank, "error", error))
    except BaseException:
        results.put((rank, "error", traceback.format_exc()))
    finally:
        results.close()
        results.join_thread()
        if dist.is_initialized():
            dist.destroy_process_group()


def launch_program(
    compiled: CompiledProgram, function: Callable[..., Any], args: tuple[Any, ...], max_restarts: int
) -> list[Any]:
    """See CompiledProgram.launch."""
    from torch.distributed.launcher.api import elastic_launch

    count = compiled.plan.num_ranks
    results = elastic_launch(_elastic_config(count, max_restarts), _elastic_main)(compiled, function, args)
    return [results[rank] for rank in range(count)]


def launch_main(main: Path, arguments: Sequence[str], num_ranks: int) -> None:
    """Run a saved program's `main.py` as torchrun would. Raises RankError where a rank fails."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    try:
        elastic_launch(_elastic_config(num_ranks, 0), sys.executable)(str(main), *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise RankError(f"rank {rank} of {main}: {failure.message}") from None


def _elastic_config(count: int, max_restarts: int) -> Any:
    from torch.distributed.launcher.api import LaunchConfig

    # A restarted attempt must not meet the keys of the one before it (pytorch's shared rendezvous store does).
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    uses_fork = not torch.cuda.is_available() and os.name == "posix"
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"autopar_{os.getpid()}_{time.monotonic_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        start_method="fork" if uses_fork else "spawn",
        monitor_interval=0.1,
    )


def _elastic_main(compiled: CompiledProgram, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    on_gpu = torch.cuda.is_available() and not is_cpu(compiled.cluster.groups[0])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        result = function(compiled.build(), *args)
        dist.barrier()  # a rank that leaves while others still use their connections to it can abort
        return result
    finally:
        dist.destroy_process_group()
