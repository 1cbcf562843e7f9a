"""A kernel at a shape beside the same formula by others, and the least work that it takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Operation = Callable[..., Any]  # of tensors, to one or to a tuple of them
Shape = tuple[int, ...]
# Relative error in norm against fp64: a few roundings of the storage dtype.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
FORWARD, BOTH = "forward", "forward+backward"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one shape.

    num_bytes_moved maps the directions that are timed to the fewest bytes that device memory must move; vectors
    (weight, target, loss) are left out. num_flops is likewise, of matrix products, where these are what takes time.
    exact_error: a relative error that is found in another way than by running `eager` in fp64; tolerance: in place of
    the dtype's. others: further implementations by name, timed last, since they may overwrite their inputs.
    """

    kernel: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    inputs: tuple[torch.Tensor, ...]
    fused: Operation
    eager: Operation
    num_bytes_moved: dict[str, int]
    num_flops: dict[str, int] = field(default_factory=dict)
    exact_error: Callable[[], float] | None = None
    tolerance: float | None = None
    others: dict[str, Operation] = field(default_factory=dict)

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for tensor in self.inputs if tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class Kernel:
    """How to make a case of a shape, a dtype and a device; and at which shapes.

    checked: on a GPU, untimed: odd sizes, rows shared by a tile, rows longer than the largest tile; none whose exact
    gradient is 0, since the error is relative. interpreted: tiny ones. timed: what models have.
    """

    make: Callable[[Shape, torch.dtype, str], Case]
    checked: tuple[Shape, ...]
    interpreted: tuple[Shape, ...]
    timed: tuple[Shape, ...]


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal numbers that a gradient is wanted of."""
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def targets(num_rows: int, num_classes: int, device: str) -> torch.Tensor:
    """Classes, a seventh of them ignored."""
    target = torch.randint(num_classes, (num_rows,), device=device)
    target[::7] = -100
    return target


def liger(name: str, adapt: Callable[[Operation], Operation]) -> dict[str, Operation]:
    """liger-kernel's function of that name with our arguments, where it is installed and there is a GPU."""
    if not torch.cuda.is_available() or importlib.util.find_spec("liger_kernel") is None:
        return {}
    functional = importlib.import_module("liger_kernel.transformers.functional")
    return {"liger": adapt(getattr(functional, name))}
