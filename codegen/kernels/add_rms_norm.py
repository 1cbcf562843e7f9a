"""The addition to the residual stream and the RMS norm after it, by the kernels of norm_kernels.py.

Formula, per row, with y and the gradient of the norm as in rms_norm.py:

    s_NH  = round(x_NH + residual_NH)                  round: to x's dtype, as an addition before the norm does
    y_NH  = rms_norm(s_NH)
    dx_NH = dresidual_NH = ds_NH + rstd_N * (w_H * dy_NH - shat_NH * dot_N)     rounded once

Shapes: N rows (all leading dims), H hidden.
"""

from __future__ import annotations

import torch

from .dispatch import check_agree, check_last_dim, use_triton
from .norm_launches import AddNorm, rms_norm_form
from .rms_norm import rms_norm_reference


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    total = x + residual
    return rms_norm_reference(total, weight, eps, offset, rounds_once), total


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`; differentiable once in x, residual and weight.

    Args:
        x, residual: `[..., H]`, one shape, one dtype, any strides.
        weight, eps, offset, rounds_once: as of `rms_norm`.

    Returns:
        y and the sum, both `[..., H]` in x's dtype, contiguous on the Triton path.

    Raises:
        ValueError: x and residual differ in shape or dtype, or weight is not `[H]`.
    """
    check_agree(x=x, residual=residual)
    check_last_dim(x, weight=weight)
    if not use_triton(x, residual, weight):
        return add_rms_norm_reference(x, residual, weight, eps, offset, rounds_once)
    form = rms_norm_form(offset, rounds_once)
    y, total = _AddRmsNorm.apply(x, residual, weight, None, eps, form)  # type: ignore[no-untyped-call]
    return y, total


class _AddRmsNorm(AddNorm):
    """An RMS norm of x + residual."""
