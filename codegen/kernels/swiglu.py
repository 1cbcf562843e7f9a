"""SwiGLU's elementwise half: `silu(gate) * up`, forward and backward in one pass each.

Formula (Shazeer 2020, "GLU Variants Improve Transformer", eq. 6, with the two projections already applied):

    sig   = 1 / (1 + exp(-gate))
    y     = round(gate * sig) * up                      round: to the inputs' dtype, as unfused modules do
    dgate = dy * up * sig * (1 + gate * (1 - sig))
    dup   = dy * round(gate * sig)

Shapes: all tensors have one shape; the kernels see `[N, C]`. Arithmetic is fp32. Backward recomputes sig, so only the
two inputs are saved.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import jit, tl, use_triton
from .gated import block_of, check_agree, launch


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The formula in torch operations, any shape."""
    return torch.nn.functional.silu(gate) * up


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, elementwise; differentiable once in both.

    Args:
        gate, up: one shape, one dtype, any strides (the two halves of one fused projection are read in place).

    Returns:
        The product, in the inputs' shape and dtype, contiguous on the Triton path.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    check_agree(gate, up)
    if not use_triton(gate, up):
        return swiglu_reference(gate, up)
    y: torch.Tensor = _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call]
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
) -> None:
    row, cols, ok = block_of(num_cols, blocks_per_row, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=ok, other=0.0)
    silu = (gate * tl.sigmoid(gate)).to(up.dtype).to(tl.float32)
    tl.store(y_ptr + row * num_cols + cols, (silu * up.to(tl.float32)).to(up.dtype), mask=ok)


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
) -> None:
    row, cols, ok = block_of(num_cols, blocks_per_row, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    up_raw = tl.load(up_ptr + row * up_row_stride + cols, mask=ok, other=0.0)
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    sig = tl.sigmoid(gate)
    silu = (gate * sig).to(up_raw.dtype).to(tl.float32)
    dgate = dy * up_raw.to(tl.float32) * sig * (1.0 + gate * (1.0 - sig))
    tl.store(dgate_ptr + row * num_cols + cols, dgate.to(up_raw.dtype), mask=ok)
    tl.store(dup_ptr + row * num_cols + cols, (dy * silu).to(up_raw.dtype), mask=ok)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        (y,) = launch("swiglu_forward", _forward_kernel, (gate, up), 1)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dgate, dup = launch("swiglu_backward", _backward_kernel, (*ctx.saved_tensors, dy), 2)
        return dgate, dup
