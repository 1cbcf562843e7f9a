"""Starts real gloo processes for a test. A worker function is a module-level function `f(rank, world_size, *args)`.

Without a GPU the processes are forked. torch, and its dynamo, which every optimizer loads, take five CPU-seconds to
import: as long as most of these tests run.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401 (here, so that no rank imports it)
import torch.distributed as dist

_SECONDS = 1200
_SECONDS_AFTER_A_FAILURE = 30
"""In which the ranks that a failed one leaves behind notice its broken connections, and say where they were."""


def start_method() -> str:
    """A process that has used CUDA cannot be forked."""
    return "fork" if os.name == "posix" and not torch.cuda.is_available() else "spawn"


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `function` returned on each rank. Fails with the tracebacks of the ranks that raised, the first one first.

    No process is left behind.
    """
    context: Any = multiprocessing.get_context(start_method())
    processes, receivers = [], {}
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work, args=(function, rank, world_size, store, sender, args), daemon=True
                )
                process.start()
                # Before the next process is forked: only its own rank holds a pipe open, so that its death closes it.
                sender.close()
                processes.append(process)
                receivers[receiver] = rank
            results, failures = _receive(receivers)
            for process in processes if not failures else ():
                process.join(timeout=5)
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert not failures, "\n".join(failures)
    return [results[rank] for rank in range(world_size)]


def _receive(receivers: dict[Connection, int]) -> tuple[dict[int, Any], list[str]]:
    """Results by rank, and what went wrong in the order in which it did."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting, deadline = dict(receivers), time.monotonic() + _SECONDS
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            failures.append(f"no answer from ranks {sorted(waiting.values())}, which were killed")
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                failed, value = receiver.recv()
            except EOFError:
                failed, value = True, f"rank {rank} died"
            if failed:
                failures.append(value)
                deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_A_FAILURE)
            else:
                results[rank] = value
    return results, failures


def _work(
    function: Callable[..., Any], rank: int, world_size: int, store: str, sender: Connection, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # what it has from its parent is not looked through for garbage
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        result = function(rank, world_size, *args)
        dist.barrier()
        sender.send((False, result))
        dist.destroy_process_group()
    except BaseException:
        sender.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
