"""Layer normalization with an optional weight and bias, in one pass over memory where a row fits a tile.

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

Shapes: N rows (all leading dims), H hidden. norm_kernels.py says in which precision and order sums are taken.
"""

from __future__ import annotations

import torch

from .dispatch import check_last_dim, use_triton
from .norm_launches import LAYER_NORM, Norm


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """The formula by torch: x `[..., H]`, weight and bias `[H]` -> `[..., H]` in x's dtype (fp64 stays fp64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if parameter is None else parameter.to(wide) for parameter in (weight, bias))
    y = torch.nn.functional.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps)
    return y.to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`(x - mean(x)) / std(x) * weight + bias` over the last dim; differentiable once in x, weight and bias.

    Args:
        x: `[..., H]`, any strides.
        weight: `[H]`, any dtype; None for a norm without one.
        bias: `[H]`, any dtype; None for a norm without one.
        eps: added to the variance.

    Returns:
        `[..., H]`, contiguous on the Triton path, in x's dtype.

    Raises:
        ValueError: weight or bias is not `[H]`.
    """
    check_last_dim(x, weight=weight, bias=bias)
    if not use_triton(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps)
    y: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps, LAYER_NORM)  # type: ignore[no-untyped-call]
    return y


class _LayerNorm(Norm):
    """A layer norm of x."""
