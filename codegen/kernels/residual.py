"""What a norm of the residual stream reads: x, or the sum x + residual, rounded as by an addition before the norm.

And what its backward writes: the gradient of x, with that of the sum's other readers where there is a sum.
"""

from __future__ import annotations

import torch

from .dispatch import jit, tl


def check_agree(x: torch.Tensor, residual: torch.Tensor) -> None:
    """Raises ValueError where the two cannot be added without broadcasting or promotion."""
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            "x and residual must agree in shape and dtype; "
            f"got {tuple(x.shape)} {x.dtype} and {tuple(residual.shape)} {residual.dtype}"
        )


@jit
def load_sum(
    x_ptr: tl.tensor,
    x_offsets: tl.tensor,
    residual_ptr: tl.tensor,
    residual_offsets: tl.tensor,
    ok: tl.tensor,
    HAS_RESIDUAL: tl.constexpr,
) -> tl.tensor:
    """The tile in fp32, zeros where not ok; a sum has been rounded to x's dtype."""
    x = tl.load(x_ptr + x_offsets, mask=ok, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + residual_offsets, mask=ok, other=0.0).to(tl.float32)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def store_gradient(
    dx: tl.tensor,
    dx_ptr: tl.tensor,
    dx_offsets: tl.tensor,
    dsum_ptr: tl.tensor,
    dsum_offsets: tl.tensor,
    ok: tl.tensor,
    HAS_DSUM: tl.constexpr,
) -> None:
    """Stores the tile dx (fp32), with dsum added, rounded once."""
    if HAS_DSUM:
        dx += tl.load(dsum_ptr + dsum_offsets, mask=ok, other=0.0).to(tl.float32)
    tl.store(dx_ptr + dx_offsets, dx.to(dx_ptr.dtype.element_ty), mask=ok)
