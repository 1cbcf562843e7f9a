"""The addition to the residual stream and the layer norm after it, by the kernels of layer_norm_kernels.py.

Formula, per row, with y and the gradient of the norm as in layer_norm.py:

    s_NH  = round(x_NH + residual_NH)                  round: to x's dtype, as an addition before the norm does
    y_NH  = layer_norm(s_NH)
    dx_NH = dresidual_NH = ds_NH + rstd_N * (w_H * dy_NH - shat_NH * dot_N - avg_N)     rounded once

Shapes: N rows (all leading dims), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import as_rows
from .layer_norm import check_parameters, layer_norm_reference, on_kernels
from .layer_norm_kernels import launch_backward, launch_forward
from .residual import check_agree


def add_layer_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(layer_norm(x + residual), x + residual)`; differentiable once in x, residual, weight and bias.

    Args:
        x, residual: `[..., H]`, one shape, one dtype, any strides.
        weight, bias, eps: as of `layer_norm`.

    Returns:
        y and the sum, both `[..., H]` in x's dtype, contiguous on the Triton path.

    Raises:
        ValueError: x and residual differ in shape or dtype, or weight or bias is not `[H]`.
    """
    check_agree(x, residual)
    check_parameters(x, weight, bias)
    if not on_kernels(x, residual, weight, bias):
        return add_layer_norm_reference(x, residual, weight, bias, eps)
    y, total = _AddLayerNorm.apply(x, residual, weight, bias, eps)  # type: ignore[no-untyped-call]
    return y, total


class _AddLayerNorm(torch.autograd.Function):
    """Saves the sum, the parameters, mean and rstd: nothing that a norm of the sum alone would not."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y_NH, sum_NH, mean_N, rstd_N = launch_forward(as_rows(x), as_rows(residual), weight, bias, eps)
        assert sum_NH is not None
        total = sum_NH.view(x.shape)
        ctx.save_for_backward(total, weight, bias, mean_N, rstd_N)
        ctx.set_materialize_grads(False)
        return y_NH.view(x.shape), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:  # only the sum was used
            return dsum, dsum, None, None, None
        need_dx, need_dresidual, need_dw, need_db, _ = ctx.needs_input_grad
        need = need_dx or need_dresidual, need_dw, need_db
        dx, dw, db = launch_backward(ctx.saved_tensors, dy, dsum, need)
        return dx, dx, dw, db, None
