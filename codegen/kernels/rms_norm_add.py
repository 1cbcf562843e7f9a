"""An RMS norm and the addition to the residual stream after it, by the kernels of norm_kernels.py.

Formula, per row, with the norm and its gradient as in rms_norm.py:

    y_NH         = round(rms_norm(x_NH) + residual_NH)      rms_norm: rounded to x's dtype, as before an addition
    dresidual_NH = dy_NH                                    and dy is the gradient of the norm

Shapes: N rows (all leading dims), H hidden.
"""

from __future__ import annotations

import torch

from .dispatch import check_agree, check_last_dim, use_triton
from .norm_launches import NormAdd, rms_norm_form
from .rms_norm import rms_norm_reference


def rms_norm_add_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> torch.Tensor:
    """The formula in torch operations."""
    return rms_norm_reference(x, weight, eps, offset, rounds_once) + residual


def rms_norm_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    rounds_once: bool = False,
) -> torch.Tensor:
    """`rms_norm(x) + residual`; differentiable once in x, residual and weight.

    Args:
        x, residual: `[..., H]`, one shape, one dtype, any strides.
        weight, eps, offset, rounds_once: as of `rms_norm`.

    Returns:
        `[..., H]` in x's dtype, contiguous on the Triton path.

    Raises:
        ValueError: x and residual differ in shape or dtype, or weight is not `[H]`.
    """
    check_agree(x=x, residual=residual)
    check_last_dim(x, weight=weight)
    if not use_triton(x, residual, weight):
        return rms_norm_add_reference(x, residual, weight, eps, offset, rounds_once)
    form = rms_norm_form(offset, rounds_once)
    y: torch.Tensor = _RmsNormAdd.apply(x, residual, weight, None, eps, form)  # type: ignore[no-untyped-call]
    return y


class _RmsNormAdd(NormAdd):
    """An RMS norm of x, plus the residual."""
