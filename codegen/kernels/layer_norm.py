"""Layer normalisation with a weight and an optional bias, in one pass over memory where a row fits a tile.

Formula (Ba, Kiros and Hinton 2016, "Layer Normalization", section 3, eq. 3 and 4), per row:

    mean_N  = mean_H(x_NH)
    rstd_N  = 1 / sqrt(mean_H((x_NH - mean_N) ** 2) + eps)
    xhat_NH = (x_NH - mean_N) * rstd_N
    y_NH    = xhat_NH * w_H + b_H                      rounded once, as torch's layer_norm does

    dx_NH   = rstd_N * (w_H * dy_NH - xhat_NH * dot_N - avg_N)
              dot_N = mean_H(w_H * dy_NH * xhat_NH), avg_N = mean_H(w_H * dy_NH)
    dw_H    = sum_N(dy_NH * xhat_NH)
    db_H    = sum_N(dy_NH)

The variance is the mean square of the differences from the mean, in a second pass over the row: x's mean square minus
the mean's square loses all digits where the mean is large.

Shapes: N rows (all leading dims), H hidden. layer_norm_kernels.py says in which precision and order sums are taken.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import as_rows, use_triton
from .layer_norm_kernels import launch_backward, launch_forward


def layer_norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """The formula by torch: x `[..., H]`, weight and bias `[H]` -> `[..., H]` in x's dtype (fp64 stays fp64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    bias = None if bias is None else bias.to(wide)
    y = torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias, eps)
    return y.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean(x)) / std(x) * weight + bias` over the last dim; differentiable once in x, weight and bias.

    Args:
        x: `[..., H]`, any strides.
        weight: `[H]`, any dtype.
        bias: `[H]`, any dtype; None for a norm without one.
        eps: added to the variance.

    Returns:
        `[..., H]`, contiguous on the Triton path, in x's dtype.

    Raises:
        ValueError: weight or bias is not `[H]`.
    """
    check_parameters(x, weight, bias)
    if not on_kernels(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps)
    y: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return y


def on_kernels(*tensors: torch.Tensor | None) -> bool:
    """Whether the tensors that are not None run on Triton kernels (`use_triton`)."""
    return use_triton(*(tensor for tensor in tensors if tensor is not None))


def check_parameters(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError where weight or bias is not `[H]`."""
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise ValueError(
                f"{name} must have shape {tuple(x.shape[-1:])}, the last dim of x; got {tuple(parameter.shape)}"
            )


class _LayerNorm(torch.autograd.Function):
    """Saves x itself (not a contiguous copy: x is alive anyway), the parameters, mean and rstd.

    The gradients are computed only as asked for, so a schedule may take dx now and the others later.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        y_NH, _, mean_N, rstd_N = launch_forward(as_rows(x), None, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean_N, rstd_N)
        return y_NH.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw, db = launch_backward(ctx.saved_tensors, dy, None, ctx.needs_input_grad[:3])
        return dx, dw, db, None
