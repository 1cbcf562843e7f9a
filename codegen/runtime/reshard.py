"""The reshards: one autograd function per change of placement, whose backward is the transposed change.

They know nothing of process groups: an `Exchange` (an `Axis` of the mesh, or a simulation of several ranks) moves the
bytes. Results are contiguous. None of these may be differentiated twice.

Legend of the shapes below: n ranks of the axis; a dim of k equal sections, each split over the ranks, is the grid
(k sections, n ranks, m elements), and its local part (k sections, m elements).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Arrival(Protocol):
    """A tensor that other ranks contribute to, on its way."""

    def wait(self) -> Tensor: ...


class Exchange(Protocol):
    """The collectives of an axis. Arguments may have any strides; results are contiguous and new."""

    @property
    def size(self) -> int: ...
    @property
    def rank(self) -> int: ...

    def gather_parts(self, part: Tensor) -> Tensor:
        """[*part] -> [n, *part]: every rank's part in rank order."""
        ...

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """[n, *part] -> [*part]: the sum over ranks of their parts[this rank]."""
        ...

    def exchange_parts(self, parts: Tensor) -> Tensor:
        """[n, *part] -> [n, *part]: result[i] is rank i's parts[this rank]."""
        ...

    def sum_over(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def start_sum(self, x: Tensor) -> Arrival:
        """Starts `sum_over`."""
        ...

    def start_scatter_sum(self, parts: Tensor) -> Arrival:
        """Starts `scatter_sum`."""
        ...


def split_parts(x: Tensor, dim: int, sections: int, size: int) -> Tensor:
    """A view [n, ..., k * m, ...] of x [..., k * n * m, ...] whose index r is rank r's part.

    A copy if sections > 1 and dims do not merge. Raises ValueError if the dim does not divide.
    """
    length = x.shape[dim]
    if length % (sections * size):
        raise ValueError(f"dim {dim} of shape {tuple(x.shape)} is not {sections} sections over {size} ranks")
    before, after = x.shape[:dim], x.shape[dim + 1 :]
    if sections == 1:
        return x.reshape(*before, size, length // size, *after).movedim(dim, 0)
    grid = x.reshape(*before, sections, size, length // sections // size, *after).movedim(dim + 1, 0)
    return grid.reshape(size, *before, length // size, *after)


def join_parts(parts: Tensor, dim: int, sections: int) -> Tensor:
    """The inverse of `split_parts`: [n, ..., k * m, ...] -> contiguous [..., k * n * m, ...]; no copy if it is one."""
    size, length = parts.shape[0], parts.shape[dim + 1]
    before, after = parts.shape[1 : dim + 1], parts.shape[dim + 2 :]
    grid = parts.reshape(size, *before, sections, length // sections, *after).movedim(0, dim + 1)
    return grid.reshape(*before, size * length, *after).contiguous()


def own_part(x: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
    """This rank's part of x, contiguous (the generated code may view it)."""
    return split_parts(x, dim, sections, axis.size)[axis.rank].contiguous()


def pad_part(part: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
    """The whole tensor that holds `part` at this rank's place and zeros elsewhere."""
    parts = part.new_zeros((axis.size, *part.shape))
    parts[axis.rank] = part
    return join_parts(parts, dim, sections)


def gather(part: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
    """The whole of a tensor of which each rank has the part S."""
    return join_parts(axis.gather_parts(part), dim, sections)


def scatter(x: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
    """This rank's part S of the sum over ranks of x."""
    return axis.scatter_sum(split_parts(x, dim, sections, axis.size))


def begin_backward(node: Any, grad: Tensor) -> None:
    """Start the sum over ranks that the backward of `node`, a `grad_fn`, makes of `grad`; nothing for other nodes.

    Whoever makes the gradient calls it before the node's turn. That backward takes the sum if it gets this very tensor.
    If others read the node's result too, it gets their total instead, and sums again.
    """
    if not hasattr(node, "begun"):
        return
    if hasattr(node, "axis"):
        node.begun = grad, node.axis.start_sum(grad)
    else:
        dim, sections, axis = node.place
        node.begun = grad, axis.start_scatter_sum(split_parts(grad, dim, sections, axis.size))


def _finished(ctx: Any, grad: Tensor) -> Tensor | None:
    """Return the result of the collective that `begin_backward` started for `grad`."""
    (expected, arrival), ctx.begun = ctx.begun, None
    result: Tensor = arrival.wait()
    return result if expected is grad else None


class ForUse(torch.autograd.Function):
    """The reshard R -> Rp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Exchange) -> Tensor:
        ctx.axis, ctx.begun = axis, None
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.begun is not None and (begun_sum := _finished(ctx, grad)) is not None:
            return begun_sum, None
        return ctx.axis.sum_over(grad), None


class AllReduce(torch.autograd.Function):
    """The reshard P -> R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Exchange) -> Tensor:
        return axis.sum_over(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class AllReducePartial(ForUse):
    """The reshard P -> Rp; backward as of R -> Rp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Exchange) -> Tensor:
        return axis.sum_over(ForUse.forward(ctx, x, axis))


class AllGather(torch.autograd.Function):
    """The reshard S -> Rp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
        ctx.place, ctx.begun = (dim, sections, axis), None
        return gather(x, dim, sections, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.begun is not None and (begun_sum := _finished(ctx, grad)) is not None:
            return begun_sum, None, None, None
        return scatter(grad, *ctx.place), None, None, None


class AllGatherFull(torch.autograd.Function):
    """The reshard S -> R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
        ctx.place = dim, sections, axis
        return gather(x, dim, sections, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return own_part(grad, *ctx.place), None, None, None


class Slice(torch.autograd.Function):
    """The reshard R -> S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
        ctx.place = dim, sections, axis
        return own_part(x, dim, sections, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather(grad, *ctx.place), None, None, None


class ReduceScatter(Slice):
    """The reshard P -> S; backward as of R -> S."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sections: int, axis: Exchange) -> Tensor:
        ctx.place = dim, sections, axis
        return scatter(x, dim, sections, axis)


class SlicePartial(Slice):
    """The reshard Rp -> S; forward as of R -> S."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return pad_part(grad, *ctx.place), None, None, None


class FirstRankOnly(torch.autograd.Function):
    """The reshard R -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Exchange) -> Tensor:
        return x.view_as(x) if axis.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class FirstRankOnlyPartial(torch.autograd.Function):
    """The reshard Rp -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Exchange) -> Tensor:
        ctx.axis = axis
        return x.view_as(x) if axis.rank == 0 else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad if ctx.axis.rank == 0 else torch.zeros_like(grad), None


class FirstRankGrad(FirstRankOnlyPartial):
    """The reshard Rp -> R; backward as of Rp -> P."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Exchange) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)


def _exchange(x: Tensor, split: tuple[int, int], concat: tuple[int, int], axis: Exchange) -> Tensor:
    return join_parts(axis.exchange_parts(split_parts(x, *split, axis.size)), *concat)


class AllToAll(torch.autograd.Function):
    """S(concat dim) -> S(split dim); `split` and `concat` are (dim, sections)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: tuple[int, int], concat: tuple[int, int], axis: Exchange) -> Tensor:
        ctx.place = concat, split, axis
        return _exchange(x, split, concat, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grad, *ctx.place), None, None, None
