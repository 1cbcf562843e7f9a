"""Kernels of SwiGLU and GeGLU: an activation of a gate times what it gates, forward and backward in one pass each.

The formulas are in swiglu.py and geglu.py. SILU: the activation is silu, else gelu; TANH: gelu's approximation. Tensors
have one shape, any strides; the kernels see `[N, C]`, or one long row where all are contiguous. Gate and up may come as
the halves of one tensor `[N, 2 C]`, whose gradient is then written in place of two that are joined. Arithmetic is fp32.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from . import tuning
from .dispatch import as_rows, check_agree, elementwise_rows, jit, tl
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
    gradient_row_stride: tl.tensor,
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
    tl.store(dgate_ptr + row * gradient_row_stride + cols, dgate.to(up.dtype), mask=ok)
    tl.store(dup_ptr + row * gradient_row_stride + cols, (dy * active).to(up.dtype), mask=ok)


def _forward(gate: torch.Tensor, up: torch.Tensor, silu: bool, tanh: bool) -> torch.Tensor:
    """y, contiguous."""
    rows = elementwise_rows(gate, up)
    num_rows, num_cols = rows[0].shape

    def run(tile: Tile) -> torch.Tensor:
        _, block, _, warps = tile.fit(num_cols)
        blocks_per_row = -(-num_cols // block)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        strides = (tensor.stride(0) for tensor in rows)
        forward_kernel[(num_rows * blocks_per_row,)](
            *(*rows, y, num_cols, blocks_per_row, *strides), BLOCK=block, SILU=silu, TANH=tanh, num_warps=warps
        )
        return y

    return tuning.launch(_name("forward", silu), TILES, run, (num_rows, num_cols), gate, TANH=tanh)


def _backward(
    gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor, silu: bool, tanh: bool, is_packed: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of gate and up, contiguous. is_packed: the first has both, as halves of its last dim."""
    rows = tuple(map(as_rows, (gate, up, dy))) if is_packed else elementwise_rows(gate, up, dy)
    num_rows, num_cols = rows[0].shape

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None]:
        _, block, _, warps = tile.fit(num_cols)
        blocks_per_row = -(-num_cols // block)
        width = 2 * num_cols if is_packed else num_cols
        shape = (*gate.shape[:-1], width) if is_packed else gate.shape
        dgate = torch.empty(shape, dtype=gate.dtype, device=gate.device)
        dup = None if is_packed else torch.empty_like(dgate)
        written = dgate.view(num_rows, 2, num_cols).unbind(1) if dup is None else (dgate, dup)
        strides = (tensor.stride(0) for tensor in rows)
        backward_kernel[(num_rows * blocks_per_row,)](
            *(*rows, *written, num_cols, blocks_per_row, *strides, width),
            BLOCK=block,
            SILU=silu,
            TANH=tanh,
            num_warps=warps,
        )
        return dgate, dup

    return tuning.launch(_name("backward", silu), TILES, run, (num_rows, num_cols), gate, TANH=tanh)


def _name(direction: str, silu: bool) -> str:
    return f"{'swiglu' if silu else 'geglu'}_{direction}"


def gate_and_up(gate: torch.Tensor, up: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Both operands; without `up` they are the halves of the last dim.

    Raises:
        ValueError: shapes or dtypes differ, or there are no halves.
    """
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(f"without up, the last dim of gate must have two halves; got {tuple(gate.shape)}")
        gate, up = gate.chunk(2, -1)
    check_agree(gate=gate, up=up)
    return gate, up


class Gated(torch.autograd.Function):
    """Saves its inputs; backward computes the activation again."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor | None, silu: bool, tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.flags = silu, tanh
        return _forward(*gate_and_up(gate, up), silu, tanh)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        gate, up = ctx.saved_tensors
        silu, tanh = ctx.flags
        return *_backward(*gate_and_up(gate, up), dy, silu, tanh, is_packed=up is None), None, None
