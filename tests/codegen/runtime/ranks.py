"""Starts real gloo processes for a test. A worker function is a module-level function `f(rank, world_size, *args)`."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SECONDS = 240


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """What `function` returned on each rank. Fails with the traceback of the first rank that raised."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=_work, args=(function, rank, world_size, store, sender, args), daemon=True)
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            results = [_receive(receiver) for receiver, _ in pipes]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
    failures = [text for failed, text in results if failed]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def _receive(receiver: Connection) -> tuple[bool, Any]:
    try:
        return receiver.recv() if receiver.poll(_SECONDS) else (True, f"no answer within {_SECONDS} s")
    except EOFError:
        return True, "the process died"


def _work(
    function: Callable[..., Any], rank: int, world_size: int, store: str, sender: Connection, args: tuple[Any, ...]
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        result = function(rank, world_size, *args)
        dist.barrier()
        sender.send((False, result))
        dist.destroy_process_group()
    except BaseException:
        sender.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
