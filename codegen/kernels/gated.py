"""Kernels of SwiGLU and GeGLU: an activation of a gate times what it gates, forward and backward in one pass each.

The formulas are in swiglu.py and geglu.py. SILU: the activation is silu, else gelu; TANH: gelu's approximation. Tensors
have one shape, any strides; the kernels see `[N, C]`, or one long row where all are contiguous. Arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from . import tuning
from .dispatch import elementwise_rows, jit, tl
from .gelu import gelu_derivative, gelu_share
from .tile import Tile

TILES: Final = (Tile(4096), Tile(4096, per_warp=256), Tile(4096, per_warp=1024), Tile(2048), Tile(8192), Tile(1024))


@jit
def _block_of(
    num_cols: tl.tensor, blocks_per_row: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(row, columns `[BLOCK]`, which of them there are) of this program."""
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    # 64-bit columns too: contiguous tensors are handed over as one long row.
    cols = (program % blocks_per_row).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, cols, cols < num_cols


@jit
def _share(gate: tl.tensor, SILU: tl.constexpr, TANH: tl.constexpr) -> tl.tensor:
    """The activation of the gate, divided by the gate."""
    return tl.sigmoid(gate) if SILU else gelu_share(gate, TANH)


@jit
def forward_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_cols: tl.tensor,
    blocks_per_row: tl.tensor,
    gate_row_stride: tl.tensor,
    up_row_stride: tl.tensor,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    TANH: tl.constexpr,
) -> None:
    row, cols, ok = _block_of(num_cols, blocks_per_row, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=ok, other=0.0)
    active = (gate * _share(gate, SILU, TANH)).to(up.dtype).to(tl.float32)
    tl.store(y_ptr + row * num_cols + cols, (active * up.to(tl.float32)).to(up.dtype), mask=ok)


@jit
def backward_kernel(
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
    SILU: tl.constexpr,
    TANH: tl.constexpr,
) -> None:
    row, cols, ok = _block_of(num_cols, blocks_per_row, BLOCK)
    gate = tl.load(gate_ptr + row * gate_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + cols, mask=ok, other=0.0)
    dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    share = _share(gate, SILU, TANH)
    active = (gate * share).to(up.dtype).to(tl.float32)
    dactive = dy * up.to(tl.float32)
    dgate = dactive * share * (1.0 + gate * (1.0 - share)) if SILU else dactive * gelu_derivative(gate, share, TANH)
    tl.store(dgate_ptr + row * num_cols + cols, dgate.to(up.dtype), mask=ok)
    tl.store(dup_ptr + row * num_cols + cols, (dy * active).to(up.dtype), mask=ok)


def _launch(direction: str, inputs: tuple[torch.Tensor, ...], silu: bool, tanh: bool) -> list[torch.Tensor]:
    """Contiguous outputs like the inputs: y, or the gradients of gate and up."""
    rows = elementwise_rows(*inputs)
    num_rows, num_cols = rows[0].shape
    strides = [tensor.stride(0) for tensor in rows]
    kernel, num_outputs = (forward_kernel, 1) if direction == "forward" else (backward_kernel, 2)

    def run(tile: Tile) -> list[torch.Tensor]:
        _, block, _, warps = tile.fit(num_cols)
        blocks_per_row = -(-num_cols // block)
        outputs = [torch.empty(inputs[0].shape, dtype=inputs[0].dtype, device=inputs[0].device)]
        outputs += [torch.empty_like(outputs[0]) for _ in range(num_outputs - 1)]
        kernel[(num_rows * blocks_per_row,)](
            *(*rows, *outputs, num_cols, blocks_per_row, *strides),
            BLOCK=block,
            SILU=silu,
            TANH=tanh,
            num_warps=warps,
        )
        return outputs

    name = f"{'swiglu' if silu else 'geglu'}_{direction}"
    return tuning.launch(name, TILES, run, (num_rows, num_cols), inputs[0], TANH=tanh)


class Gated(torch.autograd.Function):
    """Saves the two inputs; backward computes the activation again."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, silu: bool, tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.flags = silu, tanh
        (y,) = _launch("forward", (gate, up), silu, tanh)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        dgate, dup = _launch("backward", (*ctx.saved_tensors, dy), *ctx.flags)
        return dgate, dup, None, None
