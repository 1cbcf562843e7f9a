"""The process group of a script under torchrun: started by the first call that needs it, if the script did not."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from codegen.runtime.processes import join

LEAVING_SECONDS = 30.0


def under_launcher() -> bool:
    """Whether torchrun, or the caller, made this process one rank of several."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def is_first() -> bool:
    """Whether this is the only process, or rank 0 of several."""
    return os.environ.get("RANK", "0") == "0" if not dist.is_initialized() else dist.get_rank() == 0


def join_launched() -> None:
    """Start the process group where a launcher made this process one rank of several and nobody has started it.

    A rank gets the GPU of its local number and NCCL, or gloo where there are no GPUs. The group ends with the process.
    """
    if dist.is_initialized() or not under_launcher() or int(os.environ["WORLD_SIZE"]) == 1:
        return
    start_group()
    atexit.register(_leave)


def start_group(collective_seconds: float | None = None) -> None:
    """Join the ranks of the launcher that started this process. collective_seconds: as `processes.join` takes it."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join("nccl" if on_gpu else "gloo", collective_seconds)


def _leave() -> None:
    """A rank that leaves while others still use their connections to it can abort; one that failed leaves at once."""
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo" and not hasattr(sys, "last_value"):
        with contextlib.suppress(RuntimeError):  # another rank failed, and says so itself
            dist.monitored_barrier(timeout=timedelta(seconds=LEAVING_SECONDS))
    dist.destroy_process_group()
