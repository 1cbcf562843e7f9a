"""State of this process that a caller may have set: autocast, gradient modes, a process group, random states."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from autopar.errors import ConstraintError


def check_autocast() -> None:
    """Raise ConstraintError inside torch.autocast: a trace would record half of it, and a program ignores it."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        raise ConstraintError(
            "torch.autocast is on around the call, and a program has a precision of its own",
            values=", ".join(f"{kind} in {torch.get_autocast_dtype(kind)}" for kind in kinds),
            alternatives='make the call outside of it, with precision="bf16" or "fp16"',
        )


def check_training(call: str) -> None:
    """Raise ConstraintError where nothing can be trained. call: the name of the call that trains."""
    check_autocast()
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise ConstraintError(
            f"{call} trains, which needs gradients", values=mode, alternatives=f"{call} outside of it"
        )
    if torch.get_default_device().type == "meta":
        raise ConstraintError(
            f"{call} computes, which needs a default device that holds values",
            values="meta",
            alternatives='torch.set_default_device("cpu") before it',
        )


def check_starting(call: str) -> None:
    """Check as `check_training`, and raise ConstraintError in a process group, which started ranks would inherit."""
    check_training(call)
    if dist.is_available() and dist.is_initialized():
        raise ConstraintError(
            f"{call} starts processes with a process group of their own, and this process is in one",
            values=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            alternatives=["dist.destroy_process_group() before it", "build() on every rank of the group"],
        )


@contextlib.contextmanager
def kept_random_states(device: torch.device | None = None) -> Iterator[None]:
    """Restore the random states of Python, numpy and torch after the context: of the CPU, and of `device` if a GPU."""
    before, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(of_numpy)


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)
