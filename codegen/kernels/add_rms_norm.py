"""The addition to the residual stream and the RMS norm after it, by the kernels of rms_norm_kernels.py.

Formula, per row, with y and the gradient of the norm as in rms_norm.py:

    s_NH  = round(x_NH + residual_NH)                  round: to x's dtype, as an addition before the norm does
    y_NH  = rms_norm(s_NH)
    dx_NH = dresidual_NH = ds_NH + rstd_N * (w_H * dy_NH - shat_NH * dot_N)     rounded once

Shapes: N rows (all leading dims), H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import as_rows, use_triton
from .residual import check_agree
from .rms_norm import check_weight, rms_norm_reference
from .rms_norm_kernels import launch_backward, launch_forward


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The formula in torch operations."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`; differentiable once in x, residual and weight.

    Args:
        x, residual: `[..., H]`, one shape, one dtype, any strides.
        weight, eps: as of `rms_norm`.

    Returns:
        y and the sum, both `[..., H]` in x's dtype, contiguous on the Triton path.

    Raises:
        ValueError: x and residual differ in shape or dtype, or weight is not `[H]`.
    """
    check_agree(x, residual)
    check_weight(x, weight)
    if not use_triton(x, residual, weight):
        return add_rms_norm_reference(x, residual, weight, eps)
    y, total = _AddRmsNorm.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call]
    return y, total


class _AddRmsNorm(torch.autograd.Function):
    """Saves the sum, weight and rstd: nothing that a norm of the sum alone would not."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y_NH, sum_NH, rstd_N = launch_forward(as_rows(x), as_rows(residual), weight, eps)
        assert sum_NH is not None
        total = sum_NH.view(x.shape)
        ctx.save_for_backward(total, weight, rstd_N)
        ctx.set_materialize_grads(False)
        return y_NH.view(x.shape), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:  # only the sum was used
            return dsum, dsum, None, None
        need_dx, need_dresidual, need_dw, _ = ctx.needs_input_grad
        dx, dw = launch_backward(ctx.saved_tensors, dy, dsum, (need_dx or need_dresidual, need_dw))
        return dx, dx, dw, None
