"""Write out updates of running statistics that torch makes inside an operator, or by a count of steps.

Cumulative averages of batch norm (momentum=None) weigh a step by a counter, and instance norm averages over the rows of
the batch. Here the operator leaves its statistics unchanged (momentum 0), and calls of plain operators compute their
next values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules import batchnorm
from torch.overrides import TorchFunctionMode

from autopar.frontend.fakes import in_this_thread

_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_DEFAULTS = {**dict.fromkeys(_ARGUMENTS[1:5]), "use_input_stats": True, "momentum": 0.1, "eps": 1e-5}


@contextlib.contextmanager
def written_statistics() -> Iterator[None]:
    """Context manager in which updates of running statistics that no operator of a program makes are separate calls."""
    original = batchnorm._BatchNorm.forward

    def forward(module: Any, input: Tensor) -> Tensor:
        is_cumulative = module.training and module.track_running_stats and module.momentum is None
        return (
            _cumulative(module, input) if is_cumulative and module.running_mean is not None else original(module, input)
        )

    with mock.patch.object(batchnorm._BatchNorm, "forward", in_this_thread(forward, original)), _InstanceNorms():
        yield


def _cumulative(module: Any, input: Tensor) -> Tensor:
    """Batch norm whose statistics are averages over all steps so far."""
    module._check_input_dim(input)
    running = module.running_mean, module.running_var
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        share = module.num_batches_tracked.to(running[0].dtype).reciprocal()
    normed = F.batch_norm(input, *running, module.weight, module.bias, True, 0.0, module.eps)
    dims = [0, *range(2, input.dim())]
    _bring_forward(running, *_moments(input, dims, running[0].dtype), share)
    return normed


class _InstanceNorms(TorchFunctionMode):
    """Context manager in which instance norm leaves its running statistics to separate calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is not F.instance_norm:
            return func(*args, **(kwargs or {}))
        arguments = {**_DEFAULTS, **dict(zip(_ARGUMENTS, args, strict=False)), **(kwargs or {})}
        running, momentum = (arguments["running_mean"], arguments["running_var"]), arguments["momentum"]
        is_updating = isinstance(running[0], Tensor) and arguments["use_input_stats"] and momentum
        normed = func(**{**arguments, "momentum": 0.0} if is_updating else arguments)
        if is_updating:
            mean, var = _moments(arguments["input"], list(range(2, arguments["input"].dim())), running[0].dtype)
            _bring_forward(running, mean.mean(0), var.mean(0), momentum)
        return normed


def _moments(input: Tensor, dims: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the mean over some dims and the variance about it, divided by the number of values less one."""
    x = input.detach().to(dtype)
    count = x.numel() // max(1, int(torch.Size([x.shape[d] for d in range(x.dim()) if d not in dims]).numel()))
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().sum(dims) / max(count - 1, 1)
    return mean.reshape(var.shape), var


def _bring_forward(running: Sequence[Tensor], mean: Tensor, var: Tensor, share: Tensor | float) -> None:
    with torch.no_grad():
        for kept, now in zip(running, (mean, var), strict=True):
            kept.add_((now - kept) * share)
