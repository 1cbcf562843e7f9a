"""The process group of a script under torchrun. The first call that needs it starts it, if the script did not."""

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
    """Return whether torchrun, or the caller, made this process one rank of several."""
    return dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def is_first() -> bool:
    """Return whether this is the only process, or rank 0 of several."""
    return os.environ.get("RANK", "0") == "0" if not dist.is_initialized() else dist.get_rank() == 0


def has_gpus(num_processes: int) -> bool:
    """Return whether this machine has a GPU for each of `num_processes`."""
    return 0 < num_processes <= torch.cuda.device_count()


def join_launched(on_cpu: bool = False) -> None:
    """Start the process group where a launcher started this process as one rank of several, unless there is one.

    A rank gets the GPU of its local number and NCCL; or gloo with `on_cpu` or where the GPUs are too few. The group
    ends with the process.
    """
    if dist.is_initialized() or not under_launcher() or int(os.environ["WORLD_SIZE"]) == 1:
        return
    start_group(on_cpu=on_cpu)
    atexit.register(_leave)


def start_group(collective_seconds: float | None = None, on_cpu: bool = False) -> None:
    """Join the ranks that the launcher started. collective_seconds: as `processes.join` takes it."""
    on_gpu = not on_cpu and has_gpus(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    join("nccl" if on_gpu else "gloo", collective_seconds)


def _leave() -> None:
    """Leave the group. A rank that leaves while others still use its connections can abort, so it waits for them.

    A rank that failed leaves at once.
    """
    if not dist.is_initialized():
        return
    if dist.get_backend() == "gloo" and not hasattr(sys, "last_value"):
        with contextlib.suppress(RuntimeError):  # another rank failed, and reports it itself
            dist.monitored_barrier(timeout=timedelta(seconds=LEAVING_SECONDS))
    destroy_group()


def destroy_group() -> None:
    """End the default process group, after the CUDA graphs that programs have captured with it."""
    for name, module in list(sys.modules.items()):
        if name.endswith(".runtime.captured"):
            module.forget_all()
    dist.destroy_process_group()
