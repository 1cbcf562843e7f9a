"""Linear layers with the collective before or after them, which run chunk by chunk where ranks share memory.

A layer's rows are independent of one another. With x in n chunks x_r, one of each rank, and p_s rank s' partial sum,

    all_gather, then a layer:           y = [x_0 W^T, ..., x_(n-1) W^T]     a chunk is multiplied when it has come
    a layer, then reduce_scatter:       y_r = sum over s of p_s[r]          a chunk leaves when it is multiplied

so that the products of some chunks run beside the transfer of others: asynchronous tensor parallelism (S. Wang et al.,
"Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models", ASPLOS 2023).
Backward of the one is the form of the other:

    all_gather, layers      dx_r = (reduce_scatter of sum over layers of dy_i W_i)[r],  dW_i = dy_i^T x
    layer, reduce_scatter   dy = all_gather of dy_r,  dx = dy W,  dW = dy^T x,  db = sum of dy

Several layers of one x have their dy side by side and their weights one above the other, which makes their sum one
product with one transfer. Kept for backward are the gathered x and what the layer reads, as without this module.

Where an axis' ranks share no memory (`symmetric_memory.py`), or operands do not suit, the same is a gather,
`overlapped` layers whose backward starts its sum before the weights' gradients, and a reduce_scatter. Both ways compute
the same up to the rounding of sums. In chunks, rows are multiplied with the dim of the collective outermost, which
costs copies of operands and results if a dim before it is longer than one; and where several layers read one x,
backward copies their weights and dy.

Arguments are as of F.linear and torch.addmm; axis: the mesh axis; dim: of x or of the result, not the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import overlapped, symmetric_memory
from .mesh import Axis
from .reshard import gather


def all_gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: Axis, dim: int) -> Tensor:
    """F.linear of the gathered x: [..., in] cut along dim, weight [out, in], bias [out] -> [..., out]."""
    return all_gather_linears(x, (weight,), (bias,), axis=axis, dim=dim)[0]


def all_gather_linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None, *, axis: Axis, dim: int
) -> tuple[Tensor, ...]:
    """F.linear of the gathered x [..., in] with each weight [out, in] and its bias [out], if any."""
    if not symmetric_memory.fits(axis, dim, x, *weights):
        return overlapped.linears(axis.all_gather(x, dim), weights, biases)
    all_biases = biases or (None,) * len(weights)
    results: tuple[Tensor, ...] = _GatherLinears.apply(axis, dim, False, x, *weights, *all_biases)  # type: ignore[no-untyped-call]
    return results


def all_gather_addmm(bias: Tensor, x: Tensor, weight: Tensor, *, axis: Axis, dim: int) -> Tensor:
    """torch.addmm of all rows of the gathered x: x [..., in] cut along dim, weight [in, out] -> [rows, out]."""
    if not symmetric_memory.fits(axis, dim, x, weight):
        return overlapped.addmm(bias, axis.all_gather(x, dim), weight)
    (result,) = _GatherLinears.apply(axis, dim, True, x, weight, bias)  # type: ignore[no-untyped-call]
    rows: Tensor = result.flatten(0, -2)
    return rows


def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, axis: Axis, dim: int) -> Tensor:
    """F.linear's partial sums, summed and cut along dim: x [..., in], weight [out, in] -> [..., out].

    bias: [out], replicated, added once.
    """
    if not _scatters(axis, dim, x, weight):
        return axis.reduce_scatter(F.linear(x, weight, None if bias is None else axis.first_rank_only(bias)), dim)
    result: Tensor = _LinearReduceScatter.apply(axis, dim, False, x, weight, bias)  # type: ignore[no-untyped-call]
    return result


def addmm_reduce_scatter(
    bias: Tensor, x: Tensor, weight: Tensor, *, axis: Axis, dim: int, shape: Sequence[int] | None = None
) -> Tensor:
    """torch.addmm's partial sums in `shape` [..., out], summed and cut along dim: x [rows, in], weight [in, out].

    bias: [out], replicated, added once. shape: [rows, out] by default.
    """
    rows = x if shape is None else x.view(*shape[:-1], x.shape[-1])
    if not _scatters(axis, dim, rows, weight):
        partial = torch.addmm(axis.first_rank_only(bias), x, weight)
        return axis.reduce_scatter(partial if shape is None else partial.view(*shape), dim)
    result: Tensor = _LinearReduceScatter.apply(axis, dim, True, rows, weight, bias)  # type: ignore[no-untyped-call]
    return result


def _scatters(axis: Axis, dim: int, x: Tensor, weight: Tensor) -> bool:
    return symmetric_memory.fits(axis, dim, x, weight) and x.shape[dim] % axis.size == 0


class _GatherLinears(torch.autograd.Function):
    """Linear layers joined with the gather before them. is_transposed: weights are [in, out]."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, dim: int, is_transposed: bool, x: Tensor, *weights_and_biases: Any
    ) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        matrices = weights if is_transposed else [weight.t() for weight in weights]
        whole, products = symmetric_memory.all_gather_matmul(x, matrices, dim, axis)
        ctx.place, ctx.is_transposed = (axis, dim), is_transposed
        ctx.save_for_backward(whole, *weights)
        # A result that nobody reads has no gradient.
        ctx.set_materialize_grads(False)
        return tuple(_with_bias(product, bias) for product, bias in zip(products, biases, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        whole, *weights = ctx.saved_tensors
        axis, dim = ctx.place
        needs_x, *needs = ctx.needs_input_grad[3:]
        read = [grad.movedim(dim, 0) for grad in grads if grad is not None]
        if not read:
            return (None,) * len(ctx.needs_input_grad)
        side_by_side = (torch.cat(read, -1) if len(read) > 1 else read[0]).contiguous()
        grad_x = None
        if needs_x:
            used = [weight for weight, grad in zip(weights, grads, strict=True) if grad is not None]
            matrices = [weight.t() for weight in used] if ctx.is_transposed else used
            matrix = torch.cat(matrices) if len(matrices) > 1 else matrices[0]
            grad_x = symmetric_memory.matmul_reduce_scatter(side_by_side.movedim(0, dim), matrix, dim, axis)
        parts = iter(torch.split(side_by_side.flatten(0, -2), [grad.shape[-1] for grad in read], 1))
        rows = [None if grad is None else next(parts) for grad in grads]
        gradients = overlapped.parameter_gradients(_rows(whole, dim), rows, needs, ctx.is_transposed)
        return None, None, None, grad_x, *gradients


class _LinearReduceScatter(torch.autograd.Function):
    """A linear layer joined with the reduce_scatter after it. is_transposed: the weight is [in, out]."""

    @staticmethod
    def forward(
        ctx: Any, axis: Axis, dim: int, is_transposed: bool, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.place, ctx.is_transposed = (axis, dim), is_transposed
        ctx.save_for_backward(x, weight)
        result = symmetric_memory.matmul_reduce_scatter(x, weight if is_transposed else weight.t(), dim, axis)
        return result if bias is None else result.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        axis, dim = ctx.place
        needs_x, *needs = ctx.needs_input_grad[3:]
        grad_x = None
        if needs_x:
            matrix = weight.t() if ctx.is_transposed else weight
            whole, (product,) = symmetric_memory.all_gather_matmul(grad, [matrix], dim, axis)
            grad_x = product.contiguous()
        else:
            whole = gather(grad, dim, 1, axis)
        rows = [_rows(whole, dim)]
        gradients = overlapped.parameter_gradients(_rows(x, dim), rows, needs, ctx.is_transposed)
        return None, None, None, grad_x, *gradients


def _rows(x: Tensor, dim: int) -> Tensor:
    """[..., features] -> [rows, features], with `dim` outermost; no copy of what the operators made."""
    return x.movedim(dim, 0).reshape(-1, x.shape[-1])


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    """The result with its bias, contiguous, as generated code may view it, in one pass."""
    if bias is None:
        return product.contiguous()
    return torch.add(product, bias, out=product.new_empty(product.shape))
