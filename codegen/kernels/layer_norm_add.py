"""A layer norm and the addition to the residual stream after it, by the kernels of norm_kernels.py.

Formula, per row, with the norm and its gradient as in layer_norm.py:

    y_NH         = round(layer_norm(x_NH) + residual_NH)    layer_norm: rounded to x's dtype, as before an addition
    dresidual_NH = dy_NH                                    and dy is the gradient of the norm

Shapes: N rows (all leading dims), H hidden.
"""

from __future__ import annotations

import torch

from .dispatch import check_agree, check_last_dim, use_triton
from .layer_norm import layer_norm_reference
from .norm_launches import LAYER_NORM, NormAdd


def layer_norm_add_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The formula in torch operations."""
    return layer_norm_reference(x, weight, bias, eps) + residual


def layer_norm_add(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`layer_norm(x) + residual`; differentiable once in x, residual, weight and bias.

    Args:
        x, residual: `[..., H]`, one shape, one dtype, any strides.
        weight, bias, eps: as of `layer_norm`.

    Returns:
        `[..., H]` in x's dtype, contiguous on the Triton path.

    Raises:
        ValueError: x and residual differ in shape or dtype, or weight or bias is not `[H]`.
    """
    check_agree(x=x, residual=residual)
    check_last_dim(x, weight=weight, bias=bias)
    if not use_triton(x, residual, weight, bias):
        return layer_norm_add_reference(x, residual, weight, bias, eps)
    y: torch.Tensor = _LayerNormAdd.apply(x, residual, weight, bias, eps, LAYER_NORM)  # type: ignore[no-untyped-call]
    return y


class _LayerNormAdd(NormAdd):
    """A layer norm of x, plus the residual."""
