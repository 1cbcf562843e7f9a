"""GEGLU's elementwise half: `gelu(gate) * up`, forward and backward in one pass each.

Formula (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6, with the two projections already applied; gelu and
its derivative exact or with tanh, see gelu.py):

    y     = round(gelu(gate)) * up                      round: to the inputs' dtype, as unfused modules do
    dgate = dy * up * gelu'(gate)
    dup   = dy * round(gelu(gate))

Shapes: all tensors have one shape; the kernels see `[N, C]`. Arithmetic is fp32. Backward recomputes gelu, so only the
two inputs are saved.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import jit, tl, use_triton
from .gated import block_of, check_agree, launch
from .gelu import check_approximate, gelu_derivative, gelu_share


def geglu_reference(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The formula in torch operations, any shape."""
    return torch.nn.functional.gelu(gate, approximate=approximate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """`gelu(gate) * up`, elementwise; differentiable once in both.

    Args:
        gate, up: one shape, one dtype, any strides (the two halves of one fused projection are read in place).
        approximate: "none" for the exact gelu, "tanh" for its approximation, as of `torch.nn.functional.gelu`.

    Returns:
        The product, in the inputs' shape and dtype, contiguous on the Triton path.

    Raises:
        ValueError: shapes or dtypes differ, or approximate is neither of these.
    """
    check_approximate(approximate)
    check_agree(gate, up)
    if not use_triton(gate, up):
        return geglu_reference(gate, up, approximate)
    y: torch.Tensor = _GeGlu.apply(gate, up, approximate == "tanh")  # type: ignore[no-untyped-call]
    return y


@jit
def _forward_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_cols: tl.tensor,
    blocks_per_row: tl.tensor,
    gate_row_stride: tl.tensor,
    up_row_stride: tl.tensor,
    BLOCK: tl.constexpr,
    TANH: tl.constexpr,
) -> None:
    row, cols, ok = block_of(num_cols, blocks_per_row, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=ok, other=0.0)
    gelu = (gate * gelu_share(gate, TANH)).to(up.dtype).to(tl.float32)
    tl.store(y_ptr + row * num_cols + cols, (gelu * up.to(tl.float32)).to(up.dtype), mask=ok)


@jit
def _backward_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    num_cols: tl.tensor,
    blocks_per_row: tl.tensor,
    gate_row_stride: tl.tensor,
    up_row_stride: tl.tensor,
    dy_row_stride: tl.tensor,
    BLOCK: tl.constexpr,
    TANH: tl.constexpr,
) -> None:
    row, cols, ok = block_of(num_cols, blocks_per_row, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    up_raw = tl.load(up_ptr + row * up_row_stride + cols, mask=ok, other=0.0)
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    share = gelu_share(gate, TANH)
    gelu = (gate * share).to(up_raw.dtype).to(tl.float32)
    dgate = dy * up_raw.to(tl.float32) * gelu_derivative(gate, share, TANH)
    tl.store(dgate_ptr + row * num_cols + cols, dgate.to(up_raw.dtype), mask=ok)
    tl.store(dup_ptr + row * num_cols + cols, (dy * gelu).to(up_raw.dtype), mask=ok)


class _GeGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        (y,) = launch("geglu_forward", _forward_kernel, (gate, up), 1, TANH=tanh)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dgate, dup = launch("geglu_backward", _backward_kernel, (*ctx.saved_tensors, dy), 2, TANH=ctx.tanh)
        return dgate, dup, None
