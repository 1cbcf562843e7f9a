"""Sums of partial sums: the last step of the gradients of weights and biases, in one launch.

Formula: out_KC = round(sum_P(partial_KPC))               in fp32, row tile by row tile; round: to a dtype for each k

Shapes: K gradients, P partial sums, C columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from .dispatch import jit, tl

ROWS: Final = 64
COLS: Final = 16
"""Elements of a program's tile: 64 bytes of a row, and enough programs for a GPU where C is 1024."""


@jit
def _column_sums_kernel(
    partial_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    HAS_SECOND: tl.constexpr,
) -> None:
    """Program (c, k) sums column block c of the k-th gradient."""
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    col_ok = cols < num_cols
    first_row = tl.program_id(1) * num_rows
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, num_rows, ROWS):
        rows = start + tl.arange(0, ROWS)
        ok = (rows < num_rows)[:, None] & col_ok[None, :]
        offsets = (first_row + rows).to(tl.int64)[:, None] * num_cols + cols[None, :]
        total += tl.load(partial_ptr + offsets, mask=ok, other=0.0)
    result = tl.sum(total, axis=0)
    if HAS_SECOND:
        if tl.program_id(1) == 0:
            tl.store(first_ptr + cols, result.to(first_ptr.dtype.element_ty), mask=col_ok)
        else:
            tl.store(second_ptr + cols, result.to(second_ptr.dtype.element_ty), mask=col_ok)
    else:
        tl.store(first_ptr + cols, result.to(first_ptr.dtype.element_ty), mask=col_ok)


def column_sums(partial_KPC: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """K tensors `[C]` of these dtypes, on the partial sums' device, which is current.

    Args:
        partial_KPC: fp32, contiguous; K is 1 or 2.
        dtypes: K of them.
    """
    num_sums, num_rows, num_cols = partial_KPC.shape
    sums = [torch.empty(num_cols, dtype=dtype, device=partial_KPC.device) for dtype in dtypes]
    _column_sums_kernel[(-(-num_cols // COLS), num_sums)](
        partial_KPC,
        sums[0],
        sums[1] if num_sums == 2 else None,
        num_rows,
        num_cols,
        ROWS=ROWS,
        COLS=COLS,
        HAS_SECOND=num_sums == 2,
        num_warps=4,
    )
    return sums
