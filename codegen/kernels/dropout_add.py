"""Dropout and the addition to the residual stream, with the counter-based mask of the runtime's dropout.

Formula, per element of global index i (paired words of the three-round Squares generator, Widynski,
arXiv:2004.06278v1, section 3; constants by SplitMix64, Steele, Lea, Flood, OOPSLA 2014, figure 16), in 64-bit integers
that wrap around:

    multiplier = split_mix(key) | 1, start = split_mix(split_mix(key))
    c    = (i >> 1) * multiplier + start
    m    = c * c + c, then twice:  m rotated by 32 bits;  m = m * m + c
    word = the lower 32 bits of m for even i, the upper 32 for odd i, signed
    keep = word >= round(p * 2 ** 32) - 2 ** 31

    y         = round(keep * x / (1 - p)) + residual    round: to x's dtype, as an addition after dropout sees it
    dx        = keep * dy / (1 - p)
    dresidual = dy

The mask is that of the runtime's `dropout.py`, which explains the generator, bit for bit, and so are the roundings (the
kernel is compiled without fused multiply-adds): a program trains to the same numbers with this kernel as without it.
The generator is written down twice, here and there: programs without kernels have no copy of this folder, and this
folder imports nothing of the runtime. Tests hold the two equal, without Triton (test_kernels_reference.py) and with it.
Backward computes the mask again, so that nothing is saved for it.

Shapes: R rows and C columns of this rank's part, flattened, with index_RC = rows_R + columns_C.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Protocol

import torch

from .dispatch import check_agree, jit, tl, use_triton
from .tile import Tile
from .tuning import launch

TILES: Final = (
    Tile(4096, least=2048),
    Tile(4096, least=2048, per_warp=256),
    Tile(4096, least=2048, per_warp=1024),
    Tile(2048, least=2048),
    Tile(1024, least=1024, per_warp=256),
    Tile(8192, least=2048),
)
_MASK_32: Final = (1 << 32) - 1
_MASK_64: Final = (1 << 64) - 1


class IndexGrid(Protocol):
    """The global index of each element of a part as an outer sum; the runtime's `Layout.grid` gives one.

    rows, columns: int64, as many elements as the part's leading and trailing dims. paired: the columns come in pairs
    (2i, 2i + 1) and the rows are even.
    """

    @property
    def rows(self) -> torch.Tensor: ...

    @property
    def columns(self) -> torch.Tensor: ...

    @property
    def paired(self) -> bool: ...


def _split_mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return z ^ (z >> 31)


def _constants(key: int | torch.Tensor) -> tuple[int, int] | tuple[torch.Tensor, torch.Tensor]:
    """(multiplier, start) as int64; views of a key on the device."""
    if isinstance(key, torch.Tensor):
        return key[0], key[1]
    first = _split_mix(key)
    multiplier, start = (value - (1 << 64) if value >> 63 else value for value in (first | 1, _split_mix(first)))
    return multiplier, start


def _threshold(p: float) -> int:
    """The least random word (as int32) that keeps its element."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def dropout_add_reference(
    x: torch.Tensor, residual: torch.Tensor, p: float, *, key: int | torch.Tensor, grid: IndexGrid, row_offset: int = 0
) -> torch.Tensor:
    """The formula in torch operations, for p < 1."""
    multiplier, start = _constants(key)
    index = (grid.rows[:, None] + (grid.columns[None, :] + row_offset)).view(x.shape)
    counter = (index >> 1) * multiplier + start
    mixed = counter * counter + counter
    for _ in range(2):
        mixed = ((mixed >> 32) & _MASK_32) + (mixed << 32)
        mixed = mixed * mixed + counter
    words = torch.where((index & 1).bool(), mixed >> 32, mixed).to(torch.int32)
    return torch.where(words >= _threshold(p), x, 0.0) * (1.0 / (1.0 - p)) + residual


def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    *,
    key: int | torch.Tensor,
    grid: IndexGrid,
    row_offset: int = 0,
    training: bool = True,
) -> torch.Tensor:
    """`dropout(x) + residual`: x is zero with probability p, else x / (1 - p); differentiable once in x and residual.

    Args:
        x, residual: one shape, one dtype, any strides.
        p: in [0, 1]. 0 leaves the sum, 1 the residual.
        key: of the runtime's `dropout_key`, one per call site and step, or its constants on the device, int64 `[2]`.
        grid: where x lies in the whole tensor, such as the runtime's `layout.grid(mesh, device)`.
        row_offset: added to every index, as `layout.row_offset(batch_offset)` gives it for a micro-batch.
        training: False drops nothing.

    Returns:
        In the inputs' shape and dtype, contiguous on the Triton path.

    Raises:
        ValueError: p is out of range, x and residual differ in shape or dtype, or the grid has not x's size.
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
    check_agree(x=x, residual=residual)
    num_rows, num_cols = grid.rows.numel(), grid.columns.numel()
    if num_rows * num_cols != x.numel():
        raise ValueError(f"x has shape {tuple(x.shape)}, the grid {num_rows} rows of {num_cols} elements")
    if p == 0.0 or not training:
        return x + residual
    if p == 1.0:
        return x * 0.0 + residual
    if not use_triton(x, residual) or grid.rows.device != x.device:
        return dropout_add_reference(x, residual, p, key=key, grid=grid, row_offset=row_offset)
    y: torch.Tensor = _DropoutAdd.apply(x, residual, p, key, grid, row_offset)  # type: ignore[no-untyped-call]
    return y


@jit
def _squares(counter: tl.tensor) -> tl.tensor:
    mixed = counter * counter + counter
    for _ in tl.static_range(2):
        # Without the mask the shift is an arithmetic one, of which ptxas (CUDA 13.0) makes a rotation all the same.
        mixed = ((mixed >> 32) & 0xFFFFFFFF) + (mixed << 32)
        mixed = mixed * mixed + counter
    return mixed


# New constants in every call: without the option, each that happens to be a multiple of 16 compiles the kernel again.
@partial(jit, do_not_specialize=("row_offset", "multiplier", "start", "threshold"))
def _dropout_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    blocks_per_row: tl.tensor,
    x_row_stride: tl.tensor,
    residual_row_stride: tl.tensor,
    row_offset: tl.tensor,
    multiplier: tl.tensor,
    start: tl.tensor,
    threshold: tl.tensor,
    scale: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PAIRED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    KEY_ON_DEVICE: tl.constexpr,
) -> None:
    """y = keep * x * scale (+ residual); without a residual also dx, from dy in the place of x."""
    program = tl.program_id(0)
    rows = (program // blocks_per_row).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first_col = (program % blocks_per_row) * COLS
    cols = first_col + tl.arange(0, COLS)
    ok = (rows < num_rows)[:, None] & (cols < num_cols)[None, :]
    if KEY_ON_DEVICE:
        multiplier = tl.load(multiplier)
        start = tl.load(start)
    multiplier = multiplier.to(tl.int64)
    start = start.to(tl.int64)
    row_index = tl.load(rows_ptr + rows, mask=rows < num_rows, other=0) + row_offset
    if PAIRED:
        # One 64-bit number for two elements; what is not ok may get any.
        pairs = first_col + 2 * tl.arange(0, COLS // 2)
        col_index = tl.load(columns_ptr + pairs, mask=pairs < num_cols, other=0)
        counter = ((row_index >> 1) * multiplier + start)[:, None] + ((col_index >> 1) * multiplier)[None, :]
        mixed = _squares(counter)
        words = tl.reshape(tl.join(mixed.to(tl.int32), (mixed >> 32).to(tl.int32)), (ROWS, COLS))
    else:
        col_index = tl.load(columns_ptr + cols, mask=cols < num_cols, other=0)
        index = row_index[:, None] + col_index[None, :]
        mixed = _squares((index >> 1) * multiplier + start)
        words = tl.where((index & 1) == 1, mixed >> 32, mixed).to(tl.int32)
    x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=ok, other=0.0)
    y = tl.where(words >= threshold, x.to(tl.float32), 0.0) * scale
    if HAS_RESIDUAL:
        residual_rows = residual_ptr + rows[:, None] * residual_row_stride
        residual = tl.load(residual_rows + cols[None, :], mask=ok, other=0.0)
        y = y.to(x.dtype).to(tl.float32) + residual.to(tl.float32)
    tl.store(y_ptr + rows[:, None] * num_cols + cols[None, :], y.to(x.dtype), mask=ok)


def _as_grid(x: torch.Tensor, grid: IndexGrid) -> torch.Tensor:
    """x as `[R, C]` with unit stride in the columns."""
    x_RC = x.reshape(grid.rows.numel(), grid.columns.numel())
    return x_RC if x_RC.stride(1) == 1 else x_RC.contiguous()


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, p: float, key: int | torch.Tensor, grid: IndexGrid, row_offset: int
) -> torch.Tensor:
    x_RC = _as_grid(x, grid)
    residual_RC = None if residual is None else _as_grid(residual, grid)
    num_rows, num_cols = x_RC.shape
    paired = grid.paired and row_offset % 2 == 0
    multiplier, start = _constants(key)

    def run(tile: Tile) -> torch.Tensor:
        rows, cols, _, warps = tile.fit(num_cols)
        blocks_per_row = -(-num_cols // cols)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _dropout_kernel[(-(-num_rows // rows) * blocks_per_row,)](
            x_RC,
            residual_RC,
            y,
            grid.rows,
            grid.columns,
            num_rows,
            num_cols,
            blocks_per_row,
            x_RC.stride(0),
            0 if residual_RC is None else residual_RC.stride(0),
            row_offset,
            multiplier,
            start,
            _threshold(p),
            1.0 / (1.0 - p),
            ROWS=rows,
            COLS=cols,
            PAIRED=paired,
            HAS_RESIDUAL=residual is not None,
            KEY_ON_DEVICE=isinstance(key, torch.Tensor),
            num_warps=warps,
            enable_fp_fusion=False,
        )
        return y

    flags = {"paired": paired, "residual": residual is not None}
    return launch("dropout_add", TILES, run, (num_rows, num_cols), x, **flags)


class _DropoutAdd(torch.autograd.Function):
    """Saves nothing of x's size; the grid's two vectors are the layout's own, which outlive the step."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        p: float,
        key: int | torch.Tensor,
        grid: IndexGrid,
        row_offset: int,
    ) -> torch.Tensor:
        ctx.mask = p, key, grid, row_offset
        return _launch(x, residual, p, key, grid, row_offset)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx = _launch(dy, None, *ctx.mask) if ctx.needs_input_grad[0] else None
        return dx, dy if ctx.needs_input_grad[1] else None, None, None, None, None
