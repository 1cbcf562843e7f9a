"""Dropout whose mask is a function of (seed, step, call, global element index) and of nothing else.

No generator state: a rank computes the mask of its own part, so the mask does not depend on the plan, on the device,
on recomputation or on the number of micro-batches, and no random state is saved.

The generator is the three-round Squares counter-based generator (Widynski, "Squares: A Fast Counter-Based RNG",
arXiv:2004.06278v1, section 3), with these differences:

- A round of the paper is x <- x * x + z, then a rotation by 32 bits; all rounds add the same y = index * multiplier +
  offset. Tensors have no unsigned shift, so the rotation is ((x >> 32) & (2 ** 32 - 1)) + (x << 32). (Without the mask
  it would be a bijection, too, but CUDA 13.0's ptxas makes a rotation of it: masks on an H200 were others than here.)
- multiplier (odd) and offset are 64 bits each, made from the key by SplitMix64 (Steele, Lea, Flood, "Fast Splittable
  Pseudorandom Number Generators", OOPSLA 2014, figure 16): two keys differ in their counter step, not only its start.
- Each 64-bit result serves two elements, 2i the lower and 2i + 1 the upper 32 bits, which halves the cost. The test
  file checks rates, avalanche and correlations of both halves; the paper tested the upper one.

Everything is integer arithmetic modulo 2**64, the same on every device. Multiplications by constants, shifts and
additions alone are not enough: without the squares or exclusive-ors they are nearly linear in the index, and masks at
equal distances correlate (measured, 500 standard deviations).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .layout import Layout

Key = int | Tensor
"""The key of a dropout call: of `dropout_key`, or its constants on the device, int64 `[2]` (`device_keys.py`)."""

_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1

# Temporaries are three int64 tensors of this many pairs of elements. On CPU they should stay in a core's L2 cache; on a
# GPU 2**22 (96 MiB) amortise the launches while bounding the memory that a mask costs beside itself.
_PAIRS_PER_CHUNK_CPU = 1 << 15
_PAIRS_PER_CHUNK_GPU = 1 << 22
_PAIRS_PER_CHUNK_META = 1 << 62  # without memory, one chunk says enough


def split_mix(state: int) -> int:
    """SplitMix64's output function of the state that follows `state`: a mixed integer in [0, 2**64)."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def dropout_key(seed: int, step: int, call: int) -> int:
    """The key of one dropout call in one optimizer step: an integer in [0, 2**64).

    Args:
        seed: the run's seed.
        step: optimizer steps done before this one.
        call: which of the step's dropout calls this is, in forward order, from 0. Calls with p = 0 do not count.
    """
    return split_mix(split_mix(split_mix(seed & _MASK_64) ^ (step & _MASK_64)) ^ (call & _MASK_64))


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK_64
    return value - (1 << 64) if value >> 63 else value


def constants(key: Key) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """The constants (multiplier, offset) of a key, as int64."""
    if isinstance(key, Tensor):
        multiplier, offset = key.unbind()
        return multiplier, offset
    first = split_mix(key)
    return _signed(first | 1), _signed(split_mix(first))


def _squares_(y: Tensor, x: Tensor, spare: Tensor) -> Tensor:
    """Three rounds over the counters y (int64); fills x, whose halves are the random words. `spare` is overwritten."""
    torch.addcmul(y, y, y, out=x)
    for _ in range(2):
        torch.bitwise_right_shift(x, 32, out=spare)
        spare.bitwise_and_(_MASK_32).add_(x, alpha=1 << 32)
        torch.addcmul(y, spare, spare, out=x)
    return x


def _pairs_per_chunk(device: torch.device) -> int:
    limits = {"cpu": _PAIRS_PER_CHUNK_CPU, "meta": _PAIRS_PER_CHUNK_META}
    return limits.get(device.type, _PAIRS_PER_CHUNK_GPU)


def random_words(key: Key, index: Tensor) -> Tensor:
    """The random 32-bit word of each element of `index` (int64, any shape), as int32 (two's complement).

    This defines the generator; `keep_mask` computes the same words without an index tensor, two elements at once.
    """
    multiplier, offset = constants(key)
    y = (index >> 1).mul_(multiplier).add_(offset)
    mixed = _squares_(y, torch.empty_like(y), torch.empty_like(y))
    return torch.where((index & 1).bool(), mixed >> 32, mixed).to(torch.int32)


def _threshold(p: float) -> int:
    """Words (as int32) at or above it are kept: a share 1 - p of them, to 2**-33."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def keep_mask(
    p: float, *, key: Key, layout: Layout, mesh: object, device: torch.device | str, batch_offset: int = 0
) -> Tensor:
    """The mask of `dropout` for this rank's part: bool of the local shape, True (kept) with probability 1 - p."""
    grid = layout.grid(mesh, device)
    shape = layout.local_shape(mesh)
    offset = layout.row_offset(batch_offset)
    if not grid.paired or offset % 2:
        rows, columns = grid.rows + offset, grid.columns
        height = max(1, _pairs_per_chunk(rows.device) // max(1, columns.numel()))
        indices = [rows[top : top + height, None] + columns for top in range(0, max(1, rows.numel()), height)]
        parts = [random_words(key, index) >= _threshold(p) for index in indices]
        return torch.cat(parts).view(shape)
    multiplier, start = constants(key)
    # The counter of a pair is (row + column) / 2 * multiplier + start. Multiplying the two small vectors instead of
    # their outer sum (the same modulo 2**64) leaves one addition per pair.
    rows = (grid.rows + offset).bitwise_right_shift_(1).mul_(multiplier).add_(start)
    columns = (grid.columns[::2] >> 1).mul_(multiplier)
    keep = torch.empty(rows.numel(), columns.numel() * 2, dtype=torch.bool, device=rows.device)
    _fill_keep(keep, rows[:, None], columns[None, :], _threshold(p))
    return keep.view(shape)


def _fill_keep(keep: Tensor, rows: Tensor, columns: Tensor, threshold: int) -> None:
    """keep[r, 2c] and keep[r, 2c + 1] from the counter rows[r] + columns[c], in chunks."""
    limit = _pairs_per_chunk(keep.device)
    num_rows, num_columns = rows.shape[0], columns.shape[1]
    if num_rows == 0 or num_columns == 0:
        return
    wide = min(num_columns, limit)
    high = min(num_rows, max(1, limit // wide))
    buffers = torch.empty(3, high * wide, dtype=torch.int64, device=keep.device)
    for left in range(0, num_columns, wide):
        right = min(left + wide, num_columns)
        for top in range(0, num_rows, high):
            bottom = min(top + high, num_rows)
            size = (bottom - top) * (right - left)
            y, x, spare = (buffer[:size].view(bottom - top, right - left) for buffer in buffers)
            torch.add(rows[top:bottom], columns[:, left:right], out=y)
            words = _squares_(y, x, spare).view(torch.int32)
            torch.ge(words, threshold, out=keep[top:bottom, 2 * left : 2 * right])


class _Dropout(torch.autograd.Function):
    """x * keep / (1 - p). Saves the mask: one byte per element, as F.dropout does on a GPU; recomputing it would cost
    several times the reading of that byte."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale  # type: ignore[attr-defined]
        return _kept(x, keep, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return _kept(grad, keep, ctx.scale), None, None  # type: ignore[attr-defined]


def _kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    """Zeros where not kept, else x * scale: half precision is multiplied in float32 and rounded once."""
    return torch.where(keep, x, 0.0).mul_(scale)


def masked(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """x / (1 - p) where the mask `keep` is True, else zero, in x's dtype. Saves the mask for backward."""
    out: Tensor = _Dropout.apply(x, keep, 1.0 / (1.0 - p))  # type: ignore[no-untyped-call]
    return out


def dropout(x: Tensor, p: float, *, key: Key, layout: Layout, mesh: object, batch_offset: int = 0) -> Tensor:
    """Inverted dropout: zero with probability p, else x / (1 - p), in x's dtype; equal to the one-rank run's part.

    Args:
        x: this rank's part of a floating tensor of shape `layout.global_shape`.
        p: in [0, 1]. 0 returns x itself, 1 zeros.
        key: of `dropout_key`, one per call site and step.
        layout: how x lies on the mesh; a rank holding the same part as another drops the same elements.
        mesh: has an attribute for each axis that `layout` names; None if it names none.
        batch_offset: rows of dim 0 before this micro-batch (see `Layout.index`).

    Raises ValueError if p is out of range or x is not of the layout's local shape.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
    if x.shape != layout.local_shape(mesh):
        raise ValueError(f"x has shape {tuple(x.shape)}, {layout} gives this rank {layout.local_shape(mesh)}")
    if p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    keep = keep_mask(p, key=key, layout=layout, mesh=mesh, device=x.device, batch_offset=batch_offset)
    return masked(x, keep, p)
