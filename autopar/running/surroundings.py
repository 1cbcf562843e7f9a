"""What a caller may have switched on around a call of ours, in which a program would not compute what it says."""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.errors import ConstraintError


def check_autocast() -> None:
    """Raises ConstraintError inside torch.autocast, which a trace would half record and a program not run in."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        raise ConstraintError(
            "torch.autocast is on around the call, and a program has a precision of its own",
            values=", ".join(f"{kind} in {torch.get_autocast_dtype(kind)}" for kind in kinds),
            alternatives='the call outside of it, with precision="bf16" or "fp16"',
        )


def check_training(what: str) -> None:
    """Raises ConstraintError where nothing can be trained: what is the call that trains."""
    check_autocast()
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise ConstraintError(
            f"{what} trains, which needs gradients", values=mode, alternatives=f"{what} outside of it"
        )
    if torch.get_default_device().type == "meta":
        raise ConstraintError(
            f"{what} computes, which needs a default device that holds values",
            values="meta",
            alternatives='torch.set_default_device("cpu") before it',
        )


def check_starting(what: str) -> None:
    """`check_training` of a call that starts ranks; ConstraintError also in a process group: they would inherit it."""
    check_training(what)
    if dist.is_available() and dist.is_initialized():
        raise ConstraintError(
            f"{what} starts processes with a process group of their own, and this process is in one",
            values=f"rank {dist.get_rank()} of {dist.get_world_size()}",
            alternatives=["dist.destroy_process_group() before it", "build() on every rank of the group"],
        )
