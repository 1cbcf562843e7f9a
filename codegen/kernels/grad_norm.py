"""The sum of squares of many gradients in one launch, and what to multiply them by to clip their norm.

Formula, over rows T of a table with weights w_T:

    total  = sum_T(w_T * sum(gradient_T ** 2))
    factor = min(1, max_norm / (sqrt(total) + 1e-6))         as torch.nn.utils.clip_grad_norm_

Squares and sums are fp32 within a chunk: a partial sum per column of a tile of B elements, then over the tile, so that
a chunk's relative error is below (CHUNK / B + log2(B) + 1) * 2**-24 < 3e-6, and the sum over chunks is fp64. No atomic
operations: equal input gives equal bits, with the same tile, which decides the order of the fp32 sums. Nothing waits
for the device. Of sharded gradients each rank has a part of the sum: add up `squared_norm` over ranks, with a weight
of 1 / copies where several hold the same elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from .chunk_table import CHUNK, ChunkTable, chunk_of, column_pointer, load_tile
from .dispatch import jit, tl
from .tile import Tile
from .tuning import launch

TILES: Final = (Tile(2048), Tile(2048, per_warp=256), Tile(1024, per_warp=256), Tile(4096), Tile(8192))


def squared_norm_reference(gradients: Sequence[torch.Tensor], weights: Sequence[float] | None = None) -> torch.Tensor:
    """The formula in torch operations: 0-dim, fp32 (fp64 where the gradients are), on their device (CPU for none)."""
    if not gradients:
        return torch.zeros(())
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    squares = torch.stack([gradient.to(dtype).square().sum() for gradient in gradients])
    return squares.sum() if weights is None else (squares * squares.new_tensor(list(weights))).sum()


def squared_norm(table: ChunkTable, column: int = 0, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum of squares of the tensors of one column.

    Args:
        table: of `chunk_table`; one made for `adamw_` serves too.
        column: where in it the gradients are.
        weights: `[T]` fp32 on the table's device; None: ones.

    Returns:
        0-dim, fp32 (fp64 on the reference path for fp64), on the table's device.
    """
    gradients = table.columns[column]
    if not table.on_kernels:
        return squared_norm_reference(gradients, None if weights is None else weights.tolist())

    def run(tile: Tile) -> torch.Tensor:
        _, block, _, warps = tile.fit(CHUNK)
        partial_P = torch.empty(table.num_chunks, dtype=torch.float32, device=gradients[0].device)
        _square_kernel[(table.num_chunks,)](
            gradients[0],
            table.offsets_TK,
            table.numels_T,
            table.chunks_P2,
            weights,
            partial_P,
            COLUMN=column,
            NUM_COLUMNS=len(table.columns),
            CHUNK=CHUNK,
            BLOCK=block,
            ALIGNED=table.is_aligned,
            WEIGHTED=weights is not None,
            num_warps=warps,
        )
        return partial_P

    shape, is_weighted = (table.num_chunks, CHUNK), weights is not None
    partial_P = launch("squared_norm", TILES, run, shape, gradients[0], weighted=is_weighted)
    return partial_P.sum(dtype=torch.float64).to(torch.float32)


def clip_factor(squared: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor of gradients, from the global sum of squares: 0-dim, on its device, in its dtype.

    nan where the norm is nan, 0 where it is infinite: then nothing but non-finite gradients becomes nan.
    """
    return (max_norm / (squared.sqrt() + 1e-6)).clamp(max=1.0)


@jit
def _square_kernel(
    gradient_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    numels_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    COLUMN: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> None:
    row, first, left = chunk_of(chunks_ptr, numels_ptr)
    pointer = column_pointer(gradient_ptr, offsets_ptr, row, first, COLUMN, NUM_COLUMNS, ALIGNED)
    squares = tl.zeros([BLOCK], tl.float32)
    length = tl.minimum(left, CHUNK).to(tl.int32)
    whole = length // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        gradient = load_tile(pointer + start + tl.arange(0, BLOCK), BLOCK, False, BLOCK)
        squares += gradient * gradient
    if whole < length:
        gradient = load_tile(pointer + whole + tl.arange(0, BLOCK), length - whole, True, BLOCK)
        squares += gradient * gradient
    total = tl.sum(squares, axis=0)
    if WEIGHTED:
        total *= tl.load(weights_ptr + row)
    tl.store(partial_ptr + tl.program_id(0), total)
