"""Shared by the kernels: the optional Triton import, the choice of path, checks, and tensors as rows.

Triton is optional. Without it (CPU-only installations, Windows, macOS) every operation runs its torch reference.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Final

import torch

try:
    triton: Any = importlib.import_module("triton")
    tl: Any = importlib.import_module("triton.language")
except ImportError:
    triton = tl = None

_AS_IT_IS: Final = contextlib.nullcontext()
KERNEL_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})

# `triton.jit` reads TRITON_INTERPRET when it decorates, which is when the kernel files are imported. Reading it at
# the same moment keeps the dispatch true to what the kernels became, whatever happens to the environment later.
INTERPRETING: Final[bool] = triton is not None and bool(triton.knobs.runtime.interpret)


class Kernel(triton.JITFunction if triton is not None else object):  # type: ignore[misc]
    """A Triton kernel that keeps its launches, so that a later one costs the host little.

    `triton.jit` binds all arguments by name, reads settings from the environment and writes a text as its key, at every
    launch. The key here is a tuple. It tells apart all launches that Triton compiles anew: by device, constants, dtype
    and alignment of tensors, and integers that are 1, divisible by 16, or wider than 32 or 63 bits.

    launches: key -> the launch of a compiled kernel, and an argument for every constant, which it counts but ignores.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.launches: dict[tuple[Any, ...], tuple[Callable[..., None], tuple[None, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the launch of `grid` programs, on tensors and numbers by position and constants by name."""

        def start(*args: Any, **constants: Any) -> None:
            traits = [
                kind
                if (kind := type(arg)) is float or arg is None
                else (arg == 1, arg % 16 == 0, -(2**31) <= arg < 2**31, arg >> 63)
                if kind is int
                else (arg.dtype, arg.data_ptr() % 16 == 0)
                for arg in args
            ]
            key = (grid, args[0].get_device(), *constants, *constants.values(), *traits)
            launch = self.launches.get(key)
            if launch is None:
                binary = self.run(*args, grid=grid, warmup=False, **constants)
                self.launches[key] = binary[(*grid, 1, 1)], (None,) * (len(self.params) - len(args))
            else:
                launch[0](*args, *launch[1])

        return start


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """A kernel where Triton is installed; otherwise `function` itself, which nothing then calls."""
    if triton is None:
        return function
    return triton.jit(function, **options) if INTERPRETING else Kernel(function, **options)


def use_triton(*tensors: torch.Tensor | None, dtypes: frozenset[torch.dtype] = KERNEL_DTYPES) -> bool:
    """Whether the Triton kernels can take those tensors that are not None; otherwise the torch reference must.

    dtypes: those that the kernels compute in. True when all are on CUDA, or when the kernels run in Triton's
    interpreter. False for other dtypes (float64 would silently lose digits), for empty tensors (an empty grid), and for
    tensor subclasses (fake tensors and DTensors have no memory to point at).
    """
    if triton is None:
        return False
    for tensor in tensors:
        if tensor is not None and not (
            (tensor.is_cuda or (INTERPRETING and tensor.device.type == "cpu"))
            and tensor.dtype in dtypes
            and tensor.numel() > 0
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        ):
            return False
    return True


def check_agree(**tensors: torch.Tensor) -> None:
    """Raises ValueError where two tensors cannot be combined without broadcasting or promotion."""
    (name, tensor), (other_name, other) = tensors.items()
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        raise ValueError(
            f"{name} and {other_name} must agree in shape and dtype; "
            f"got {tuple(tensor.shape)} {tensor.dtype} and {tuple(other.shape)} {other.dtype}"
        )


def check_last_dim(x: torch.Tensor, **parameters: torch.Tensor | None) -> None:
    """Raises ValueError where a parameter has not one element per column of x."""
    for name, parameter in parameters.items():
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have shape {tuple(x.shape[-1:])}, the last dim of x; got {tuple(parameter.shape)}"
            )


def launch_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the tensor's GPU current: Triton launches on the current device, not on the one its arguments live on."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(tensor.device)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """`[..., C]` as `[N, C]` with unit stride in the last dim and any row stride.

    A view where the leading dims collapse (so halves of a fused projection are read in place), otherwise a copy:
    kernels that took every stride would load uncoalesced, which costs more than the copy.
    """
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def elementwise_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors of one shape as `[1, numel]` where all are contiguous (no ragged blocks at row ends), else `[N, C]`."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return tuple(tensor.view(1, -1) for tensor in tensors)
    return tuple(as_rows(tensor) for tensor in tensors)


def power_of_2_at_least(value: int) -> int:
    """The smallest power of two that is >= `value` (>= 1): Triton's tile sizes are powers of two."""
    return 1 << max(value - 1, 0).bit_length()


def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 elsewhere, so that the interpreter also meets several programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
