"""RMS normalization with a weight, in one pass over memory where a row fits a tile.

Formula (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3, eq. 4), per row:

    rstd_N  = 1 / sqrt(mean_H(x_NH ** 2) + eps)
    xhat_NH = x_NH * rstd_N
    y_NH    = w_H * round(xhat_NH)                     round: to x's dtype, as Llama implementations do

    dx_NH   = rstd_N * (w_H * dy_NH - xhat_NH * dot_N) dot_N = mean_H(w_H * dy_NH * xhat_NH)
    dw_H    = sum_N(dy_NH * round(xhat_NH))

Gemma's norms (Team Gemma 2024, its implementations in JAX and torch) store w as its difference from 1, and round once:

    y_NH    = round((1 + w_H) * xhat_NH)               1 + w in fp32, in the gradients too
    dw_H    = sum_N(dy_NH * xhat_NH)

OLMo 2's round so too, with w itself.

Shapes: N rows (all leading dims), H hidden. norm_kernels.py says in which precision and order sums are taken.
"""

from __future__ import annotations

import torch

from .dispatch import check_last_dim, use_triton
from .norm_launches import Norm, rms_norm_form


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0, rounds_once: bool = False
) -> torch.Tensor:
    """The formula in torch operations: x `[..., H]`, weight `[H]` -> `[..., H]` in x's dtype (fp64 stays fp64)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x_compute = x.to(wide)
    xhat = x_compute * torch.rsqrt(x_compute.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return xhat.to(x.dtype)
    if offset:
        weight = weight.to(wide) + offset
    return (weight * (xhat if rounds_once else xhat.to(x.dtype))).to(x.dtype)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float = 0.0, rounds_once: bool = False
) -> torch.Tensor:
    """`(offset + weight) * x / rms(x)` over the last dim; differentiable once in x and weight.

    Args:
        x: `[..., H]`, any strides.
        weight: `[H]`; None for a norm without one. Where its dtype is wider than x's, the product is rounded back to
            x's dtype (Hugging Face's module would return the wider one).
        eps: added to the mean square.
        offset: added to the weight, in fp32; 1 in Gemma's norms.
        rounds_once: the result alone is rounded to x's dtype (Gemma, OLMo 2), not also x / rms(x) (Llama).

    Returns:
        `[..., H]`, contiguous on the Triton path, in x's dtype.

    Raises:
        ValueError: weight is not `[H]`.
    """
    check_last_dim(x, weight=weight)
    if not use_triton(x, weight):
        return rms_norm_reference(x, weight, eps, offset, rounds_once)
    form = rms_norm_form(offset, rounds_once)
    y: torch.Tensor = _RmsNorm.apply(x, weight, None, eps, form)  # type: ignore[no-untyped-call]
    return y


class _RmsNorm(Norm):
    """An RMS norm of x."""
