"""Trace `tensor.data`: reading it detaches, and assigning to it copies into the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_READ, _ASSIGNED = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


class DataAccess(TorchFunctionMode):
    """Context manager in which `x.data` is `x.detach()`, and `x.data = y` writes y to x if both have equal shape and
    dtype.

    Other assignments are left unchanged, and refused.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func == _READ:
            return args[0].detach()
        if func == _ASSIGNED and (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype):
            with torch.no_grad():
                args[0].detach().copy_(args[1])
            return None
        return func(*args, **(kwargs or {}))
