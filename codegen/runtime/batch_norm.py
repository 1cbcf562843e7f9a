"""Batch and group normalization by the statistics of rows, or of space, that several ranks share.

With the n values x of a channel on all ranks, their gradients dy and s = 1 / sqrt(var + eps):

    mean = sum x / n,   var = sum (x - mean)^2 / n,   y = (x - mean) s w + b
    dx = s w (dy - sum dy / n - (x - mean) s^2 sum dy (x - mean) / n)

The sums are over all ranks: two of them forward, one after the other, since squares about the mean of all lose nothing
where sums of squares would, and one of both backward. dw and db are this rank's part.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

if TYPE_CHECKING:
    from .layout import AxisLike


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *axes: AxisLike,
) -> Tensor:
    """`F.batch_norm` of a tensor [B, C, ...] whose B, or whose dims behind C, are cut into equal parts over `axes`, or
    of a whole one.

    Args:
        input: this rank's part, of any floating dtype; statistics are of float32 at least.
        weight, bias, running_mean, running_var: [C], equal on all ranks of `axes`, or None.
        training: whether statistics are the batch's, with which the running ones (if any) are brought forward.
        momentum, eps: as of torch.nn.BatchNorm2d.

    Returns this rank's part of the result, like the input. Gradients of weight and bias are this rank's part of the
    sum. Not differentiable twice.
    """
    if not training or not axes:
        if running_mean is not None and weight is not None:  # torch's kernels take weights like the statistics only
            weight, bias = weight.to(running_mean.dtype), None if bias is None else bias.to(running_mean.dtype)
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    running = (running_mean, running_var, momentum)
    normed: Tensor = _BatchNorm.apply(input, weight, bias, running, eps, axes)  # type: ignore[no-untyped-call]
    return normed


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, *axes: AxisLike
) -> Tensor:
    """`F.group_norm` of a tensor [B, C, ...] whose dims behind C are cut into equal parts over `axes`.

    Args:
        input: this rank's part. num_groups: of its channels.
        weight, bias: [C], equal on all ranks of `axes`, or None. eps: as of torch.nn.GroupNorm.

    A group of a row is what a channel is to `batch_norm`, of which see the rest.
    """
    rows, channels, *space = input.shape
    grouped = input.reshape(1, rows * num_groups, channels // num_groups, *space)
    normed = batch_norm(grouped, None, None, None, None, True, 0.0, eps, *axes).view(input.shape)
    for parameter, combine in ((weight, torch.mul), (bias, torch.add)):
        normed = normed if parameter is None else combine(normed, _by_channel(parameter, input))
    return normed


def _over_ranks(value: Tensor, axes: tuple[AxisLike, ...]) -> Tensor:
    for axis in axes:
        value = axis.sum_over(value)
    return value


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor | None, Tensor | None, float],
        eps: float,
        axes: tuple[AxisLike, ...],
    ) -> Tensor:
        values, dims = _wide(x), [0, *range(2, x.ndim)]
        count = x.numel() // x.shape[1] * math.prod(axis.size for axis in axes)
        mean = _over_ranks(values.sum(dims), axes) / count
        var = _over_ranks((values - _by_channel(mean, x)).square_().sum(dims), axes) / count
        scale = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale)  # type: ignore[arg-type]
        ctx.axes, ctx.count, ctx.dims = axes, count, dims  # type: ignore[attr-defined]
        for kept, now in zip(running[:2], (mean, var * (count / max(count - 1, 1))), strict=True):
            if isinstance(kept, Tensor):
                kept.lerp_(now.to(kept.dtype), running[2])
        factor = scale if weight is None else scale * weight
        shift = -mean * factor if bias is None else bias - mean * factor
        return torch.addcmul(_by_channel(shift, x), values, _by_channel(factor, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        values, gradients = _wide(x), _wide(gradient)
        own = gradients.sum(ctx.dims), (values - _by_channel(mean, x)).mul_(gradients).sum(ctx.dims)
        dx = None
        if ctx.needs_input_grad[0]:
            total, products = _over_ranks(torch.stack(own), ctx.axes) / ctx.count
            factor = scale if weight is None else scale * weight
            slope = -factor * scale.square() * products
            rest = -factor * total - slope * mean
            dx = torch.addcmul(_by_channel(rest, x), values, _by_channel(slope, x))
            dx = dx.addcmul_(gradients, _by_channel(factor, x)).to(x.dtype)
        dweight = (own[1] * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dbias = own[0].to(gradient.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize < 4 else x


def _by_channel(value: Tensor, x: Tensor) -> Tensor:
    """[C] as [C, 1, ...], which is broadcast over x."""
    return value.view(-1, *(1,) * (x.ndim - 2))
