"""The addition to the residual stream and the layer norm after it, by the kernels of norm_kernels.py.

Formula, per row, with y and the gradient of the norm as in layer_norm.py:

    s_NH  = round(x_NH + residual_NH)                  round: to x's dtype, as an addition before the norm does
    y_NH  = layer_norm(s_NH)
    dx_NH = dresidual_NH = ds_NH + rstd_N * (w_H * dy_NH - shat_NH * dot_N - avg_N)     rounded once

Shapes: N rows (all leading dims), H hidden.
"""

from __future__ import annotations

import torch

from .dispatch import check_agree, check_last_dim, use_triton
from .layer_norm import layer_norm_reference
from .norm_launches import LAYER_NORM, AddNorm


def add_layer_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    total = x + residual
    return layer_norm_reference(total, weight, bias, eps), total


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
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
    check_agree(x=x, residual=residual)
    check_last_dim(x, weight=weight, bias=bias)
    if not use_triton(x, residual, weight, bias):
        return add_layer_norm_reference(x, residual, weight, bias, eps)
    y, total = _AddLayerNorm.apply(x, residual, weight, bias, eps, LAYER_NORM)  # type: ignore[no-untyped-call]
    return y, total


class _AddLayerNorm(AddNorm):
    """A layer norm of x + residual."""
