"""Convolutions of a space that ranks have cut: each has rows, and is given those of its neighbors that it reads.

Of n ranks each has L consecutive rows of the input and L / stride of the result. With a kernel of k rows, `dilation` d
apart, and zeros p rows wide around the whole, a rank's results read

    p rows before its own, and d (k - 1) - p - stride + 1 behind

which are its neighbors', and zeros at both ends of the space. Backward their gradients return, and are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)


class _Arrival(Protocol):
    def wait(self) -> Tensor: ...


class _Neighbors(Protocol):
    """The parts of a mesh axis that are needed here."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...
    def pass_on(self, part: Tensor, hops: int = 1) -> _Arrival: ...


def halo(kernel: int, stride: int, padding: int, dilation: int) -> tuple[int, int]:
    """(rows before a rank's own, rows behind) that its results read; negative where they leave some of its own."""
    return padding, dilation * (kernel - 1) - padding - stride + 1


def halo_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    axis: _Neighbors,
    *,
    dim: int,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Tensor:
    """`F.conv1d`, `conv2d` or `conv3d`, by the weight's dims, of a space whose rows are cut over `axis`.

    Args:
        input: [B, C, ...], this rank's rows of space `dim` (0: the first behind the channels); no fewer than of `halo`.
        weight: [O, C / groups, ...]; bias: [O] or None; stride, padding, dilation: a number for each dim of space.

    Returns this rank's rows of the result. Not differentiable twice through the exchange.
    """
    num_dims, at = weight.ndim - 2, 2 + dim
    before, behind = halo(weight.shape[at], stride[dim], padding[dim], dilation[dim])
    if before or behind > 0:
        input = _WithNeighbors.apply(input, axis, at, before, max(behind, 0))  # type: ignore[no-untyped-call]
    if behind < 0:  # not before: its last rows are what the next rank reads
        input = input.narrow(at, 0, input.shape[at] + behind)
    inside = [0 if d == dim else values for d, values in enumerate(padding)]
    sizes = (tuple(values[:num_dims]) for values in (stride, inside, dilation))
    return _CONVOLUTIONS[num_dims - 1](input, weight, bias, *sizes, groups)


class _WithNeighbors(torch.autograd.Function):
    """[..., L, ...] -> [..., before + L + behind, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: _Neighbors, at: int, before: int, behind: int) -> Tensor:
        ctx.axis, ctx.at, ctx.before, ctx.behind = axis, at, before, behind
        length = x.shape[at]
        down = axis.pass_on(x.narrow(at, length - before, before), 1) if before else None
        up = axis.pass_on(x.narrow(at, 0, behind), -1) if behind else None
        parts = [x]
        if down is not None:
            parts.insert(0, _unless(axis.rank == 0, down.wait()))
        if up is not None:
            parts.append(_unless(axis.rank == axis.size - 1, up.wait()))
        return torch.cat(parts, at)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        axis, at, before, behind = ctx.axis, ctx.at, ctx.before, ctx.behind
        length = gradient.shape[at] - before - behind
        up = axis.pass_on(gradient.narrow(at, 0, before), -1) if before else None
        down = axis.pass_on(gradient.narrow(at, before + length, behind), 1) if behind else None
        local_gradient = gradient.narrow(at, before, length).clone()
        if up is not None:
            local_gradient.narrow(at, length - before, before).add_(_unless(axis.rank == axis.size - 1, up.wait()))
        if down is not None:
            local_gradient.narrow(at, 0, behind).add_(_unless(axis.rank == 0, down.wait()))
        return local_gradient, None, None, None, None


def _unless(is_end: bool, rows: Tensor) -> Tensor:
    """Return no rows where they came from the other end of the ring."""
    return torch.zeros_like(rows) if is_end else rows
