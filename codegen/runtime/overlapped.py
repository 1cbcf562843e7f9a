"""Linear layers whose weights' gradients are computed while the gradient of what they read is summed over ranks.

What a column-parallel layer reads is the result of a reshard to Rp, whose backward sums x's gradient over the axis
(M. Shoeybi et al., "Megatron-LM" (2019), section 3; its all_reduce, or under sequence parallelism a reduce_scatter).
Nothing in the weights' gradients waits for that sum. So backward computes

    dx = sum over layers of dy_i W_i        then starts the reshard's sum of dx (`reshard.begin_backward`), then
    dW_i = dy_i^T x,  db_i = sum of dy_i    beside it,

and the reshard's own backward waits. Layers that read the same x (queries, keys, values; gate and up) are one call, so
that one sum runs beside all their weights' gradients. Forward is torch's own. In a program where nothing is summed, and
for a reader too many, the gradients are the same, and only the order of the work differs.

Generated code calls `linear` for F.linear, `linears` for several of one x, and `addmm` for torch.addmm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reshard import begin_backward


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [..., in], weight [out, in], bias [out] -> [..., out]."""
    return linears(x, (weight,), (bias,))[0]


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    """F.linear of x [..., in] with each weight [out, in] and its bias [out], if any."""
    all_biases = biases or (None,) * len(weights)
    results: tuple[Tensor, ...] = _Linears.apply(x.grad_fn, False, x, *weights, *all_biases)  # type: ignore[no-untyped-call]
    return results


def addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """torch.addmm of all rows of x: bias [out], x [..., in], weight [in, out] -> [rows, out]."""
    results: tuple[Tensor, ...] = _Linears.apply(x.grad_fn, True, x, weight, bias)  # type: ignore[no-untyped-call]
    return results[0]


class _Linears(torch.autograd.Function):
    """maker: the node that made x. is_transposed: weights are [in, out], and results have one dim of rows."""

    @staticmethod
    def forward(
        ctx: Any, maker: Any, is_transposed: bool, x: Tensor, *weights_and_biases: Tensor | None
    ) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.maker, ctx.is_transposed = maker, is_transposed
        ctx.save_for_backward(x, *weights)
        # A result that nobody reads has no gradient.
        ctx.set_materialize_grads(False)
        pairs = zip(weights, biases, strict=True)
        if is_transposed:
            return tuple(torch.addmm(bias, x.flatten(0, -2), weight) for weight, bias in pairs)  # type: ignore[arg-type]
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs)  # type: ignore[arg-type]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        _, _, needs_x, *needs = ctx.needs_input_grad
        # [rows, out] each.
        rows = [None if grad is None else grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = _input_gradient(x, weights, rows, ctx.is_transposed) if needs_x else None
        if grad_x is not None:
            begin_backward(ctx.maker, grad_x)
        gradients = parameter_gradients(x.reshape(-1, x.shape[-1]), rows, needs, ctx.is_transposed)
        return None, None, grad_x, *gradients


def parameter_gradients(
    x: Tensor, grads: Sequence[Tensor | None], needs: Sequence[bool], is_transposed: bool
) -> list[Tensor | None]:
    """dW_i = dy_i^T x of all layers, then db_i, the sum of dy_i's rows; None where there is none.

    x [rows, in], grads [rows, out] each, in any one order of the rows. needs: of every weight, then of every bias.
    """
    count = len(grads)
    gradients: list[Tensor | None] = []
    for grad, needed in zip(grads, needs[:count], strict=True):
        if grad is None or not needed:
            gradients.append(None)
        else:
            gradients.append(x.t() @ grad if is_transposed else grad.t() @ x)
    for grad, needed in zip(grads, needs[count:], strict=True):
        gradients.append(grad.sum(0) if grad is not None and needed else None)
    return gradients


def _input_gradient(
    x: Tensor, weights: Sequence[Tensor], rows: Sequence[Tensor | None], is_transposed: bool
) -> Tensor | None:
    """[..., in] from [rows, out] of each layer, summed in the products; None if there is none."""
    total: Tensor | None = None
    for weight, grad in zip(weights, rows, strict=True):
        if grad is not None:
            matrix = weight.t() if is_transposed else weight
            total = grad @ matrix if total is None else total.addmm_(grad, matrix)
    return None if total is None else total.view(x.shape)
