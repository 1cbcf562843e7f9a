"""Modules that forward moves to their present place: `expert.to(x.device)`, `self.float()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from autopar.errors import TraceError
from autopar.frontend.attributes import named_tensors
from autopar.frontend.fakes import in_this_thread


@contextlib.contextmanager
def moved_in_place() -> Iterator[None]:
    """Context manager in which methods that move or cast a module (`to`, `cuda`, `float`) leave it unchanged.

    A program places its parameters and buffers itself. Raises TraceError for a cast to another dtype.
    """
    original = nn.Module._apply

    def apply(module: nn.Module, function: Callable[[Tensor], Any], *args: Any, **kwargs: Any) -> nn.Module:
        dtypes: dict[torch.dtype, torch.dtype] = {}
        for name, tensor in named_tensors(module):
            if tensor.dtype not in dtypes:
                dtypes[tensor.dtype] = _dtype_of(function, tensor.dtype)
            if dtypes[tensor.dtype] != tensor.dtype:
                raise TraceError(
                    "forward casts its own parameters or buffers to another dtype",
                    values=f"{name} of {type(module).__name__}: {tensor.dtype} to {dtypes[tensor.dtype]}",
                    alternatives=[
                        "cast the model before it is compiled",
                        "call tensor.to(dtype) where forward reads it",
                    ],
                )
        return module

    with mock.patch.object(nn.Module, "_apply", in_this_thread(apply, original)):
        yield


def _dtype_of(function: Callable[[Tensor], Any], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype after a cast; the present one for a move to a device that does not exist here."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        try:
            result = function(torch.zeros((), dtype=dtype))
        except (RuntimeError, AssertionError, NotImplementedError):
            return dtype
    return result.dtype if isinstance(result, Tensor) else dtype
