"""Random tensors that are a function of (seed, step, call, global element index) and of nothing else.

The generator is that of `dropout.py`, one 64-bit number for each element. So a rank draws its own part alone, a draw is
equal under every plan, in every micro-batch and in recomputation, and no random state is saved.

    uniform      [0, 1): the upper 24 bits; of fp16 and bf16 as many as they hold, so that no value rounds to 1
    bernoulli    1 where a uniform number is below p, else 0
    exponential  -log(u) of a u inside (0, 1), so that no value is 0 and its logarithm is finite
    normal       Box-Muller: sqrt(-2 log(u)) cos(2 pi v)
    integers     low ... high - 1: the upper 32 bits scaled to the range, or 63 bits modulo a range above 2**31

Uniform numbers are exact and equal on every device. Logarithms and cosines are taken in fp32, whatever the dtype, so
that a model in fp64 draws the numbers of the same model in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dropout import Key, _pairs_per_chunk, _squares_, constants
from .layout import Layout

DISTRIBUTIONS = ("uniform", "bernoulli", "exponential", "normal", "integers")
_MANTISSA = {torch.bfloat16: 8, torch.float16: 11}
_MASK_32 = (1 << 32) - 1


def draw(
    distribution: str,
    *,
    key: Key,
    layout: Layout,
    mesh: object,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    p: float = 0.5,
    low: int = 0,
    high: int = 2,
    batch_offset: int = 0,
) -> Tensor:
    """This rank's part of a random tensor of shape `layout.global_shape`.

    Args:
        distribution: one of DISTRIBUTIONS.
        key: of `dropout_key`, one per call site and step.
        layout: the placements of the tensor on the mesh; ranks that have the same part draw the same numbers.
        mesh: has an attribute for each axis that `layout` names; None if it names none.
        p: of bernoulli. low, high: of integers, high excluded.
        batch_offset: rows of dim 0 before this micro-batch (see `Layout.index`).
    """
    grid = layout.grid(mesh, device)
    multiplier, start = constants(key)
    rows = (grid.rows + layout.row_offset(batch_offset)).mul_(multiplier).add_(start)
    columns = grid.columns * multiplier
    out = torch.empty(rows.numel(), columns.numel(), dtype=dtype, device=rows.device)
    if not out.numel():
        return out.view(layout.local_shape(mesh))
    limit = _pairs_per_chunk(rows.device)
    wide = min(columns.numel(), limit)
    high_rows = min(rows.numel(), max(1, limit // wide))
    buffers = torch.empty(3, high_rows * wide, dtype=torch.int64, device=rows.device)
    for left in range(0, columns.numel(), wide):
        right = min(left + wide, columns.numel())
        for top in range(0, rows.numel(), high_rows):
            bottom = min(top + high_rows, rows.numel())
            size = (bottom - top) * (right - left)
            y, bits, spare = (buffer[:size].view(bottom - top, right - left) for buffer in buffers)
            torch.add(rows[top:bottom, None], columns[None, left:right], out=y)
            _squares_(y, bits, spare)
            out[top:bottom, left:right] = _values(distribution, bits, dtype, p, low, high)
    return out.view(layout.local_shape(mesh))


def _values(distribution: str, bits: Tensor, dtype: torch.dtype, p: float, low: int, high: int) -> Tensor:
    """Return what the distribution makes of 64 random bits per element."""
    if distribution == "uniform":
        return _unit(bits, _MANTISSA.get(dtype, 24))
    if distribution == "bernoulli":
        return _unit(bits, 24) < p
    if distribution == "exponential":
        return _inside(bits).log_().neg_()
    if distribution == "normal":
        angle = (bits.bitwise_right_shift(8) & ((1 << 24) - 1)).to(torch.float32).mul_(2.0 * math.pi * 2.0**-24)
        return _inside(bits).log_().mul_(-2.0).sqrt_().mul_(angle.cos_())
    if distribution == "integers":
        count = high - low
        if count <= 1 << 31:
            return (bits.bitwise_right_shift(32) & _MASK_32).mul_(count).bitwise_right_shift_(32).add_(low)
        return (bits & ((1 << 63) - 1)).remainder_(min(count, (1 << 63) - 1)).add_(low)
    raise ValueError(f"{distribution!r} is none of the distributions {', '.join(DISTRIBUTIONS)}")


def _unit(bits: Tensor, digits: int) -> Tensor:
    """Multiples of 2**-digits in [0, 1), fp32, from the upper bits."""
    return (bits.bitwise_right_shift(64 - digits) & ((1 << digits) - 1)).to(torch.float32).mul_(2.0**-digits)


def _inside(bits: Tensor) -> Tensor:
    """Odd multiples of 2**-24, fp32, from the upper 23 bits: neither 0 nor 1."""
    odd = (bits.bitwise_right_shift(40) & ((1 << 24) - 1)) | 1
    return odd.to(torch.float32).mul_(2.0**-24)
