"""Compute the loss of an eager model in the precision of a program, for a plain run and for verification."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from autopar.frontend.loss_module import LossModule


def loss_in(dtype: torch.dtype | None, module: LossModule, batch: Mapping[str, Any]) -> Tensor:
    """Return the module's loss with floating-point parameters cast to `dtype`; its own parameters are the masters.

    `operand_dtypes.py` casts operands. Gradients reach the masters in their dtype, rounded to `dtype` before, as in a
    program. None: no cast.
    """
    if dtype is None:
        loss: Tensor = module(**batch)
        return loss
    cast = {name: _cast(p, dtype) for name, p in module.named_parameters()}
    module.dtype = dtype
    with _AsPrograms():
        loss = functional_call(module, cast, kwargs=dict(batch))
        return loss


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


class _AsPrograms(TorchFunctionMode):
    """Context manager in which, as in programs, cross-entropy of half-precision logits is computed in fp32, and batch
    norm takes weights of its statistics' dtype.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.cross_entropy and args and args[0].dtype.itemsize < 4:
            args = (args[0].float(), *args[1:])
        kwargs = dict(kwargs or {})
        if func is F.batch_norm and len(args) > 1 and isinstance(args[1], Tensor):  # torch gives weights by name
            for name in ("weight", "bias"):
                value = kwargs.get(name)
                kwargs[name] = value if value is None else value.to(args[1].dtype)
        return func(*args, **kwargs)
