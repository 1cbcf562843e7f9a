"""Rows that come sorted by expert, times the matrix of each row's expert: all experts in one launch.

Formula, with e(m) the expert of row m, whose rows are those from ends[e - 1] (0 for the first) to ends[e] - 1:

    y_MB        = rows_MA @ weight_EAB[e(m)] + bias_EB[e(m)]
    drows_MA    = dy_MB @ weight_EAB[e(m)].T                  the same kernel, with the matrices transposed
    dweight_EAB = rows_MA[of e].T @ dy_MB[of e]               0 for an expert without rows
    dbias_EB    = sum_m(dy_MB[of e])

Shapes: M rows, E experts, A features in, B features out. Sums are fp32 and rounded once, products of fp32 are those of
fp32 (no tf32). How many rows an expert has is known on the device only, so nothing waits for it, and any number is
right: a tile of R rows has rows of one expert, so that there are at most floor(M / R) + E tiles, of which a program
finds its own by the ends, or that there is none left for it. Reading the ends takes it E loads and a sum over them.

The kernel for the weights' gradient has a program for each tile of each expert's matrix, which works through all rows
of the expert: with all rows at one expert the others' write zeros and are done.

Which product torch has of its own, and when that is better, is said in runtime/grouped.py. The tile decides in which
order products are summed, and so does, by the mean of rows per expert, M.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from .dispatch import INTERPRETING, as_rows, jit, power_of_2_at_least, tl, use_triton
from .tile import ProductTile
from .tuning import launch

# The first ones fit 48 KiB of shared memory, which every GPU has, in every dtype.
TILES: Final = (
    ProductTile(128, 128, depth_bytes=64, num_warps=8, num_stages=3),
    ProductTile(128, 128, depth_bytes=128, num_warps=8, num_stages=3),
    ProductTile(128, 256, depth_bytes=128, num_warps=8, num_stages=3),
    ProductTile(64, 128, depth_bytes=128, num_warps=4, num_stages=4),
    ProductTile(64, 64, depth_bytes=64, num_warps=4, num_stages=4),
)
_TILES_BESIDE_EACH_OTHER: Final = 8
"""Tiles of rows that go through the columns together, so that what they read of a matrix is in the cache for all."""


def grouped_linear_reference(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The formula in torch operations: a product for each expert; waits for the ends."""
    stops = ends.tolist()
    parts = [rows[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]
    products = [part @ matrix for part, matrix in zip(parts, weight.unbind(), strict=True)]
    if bias is not None:
        products = [product + expert_bias for product, expert_bias in zip(products, bias.unbind(), strict=True)]
    return torch.cat(products)


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Each row times its expert's matrix, plus its expert's bias; differentiable once in rows, weight and bias.

    Args:
        rows: `[M, A]`, sorted by expert, any strides; M may be 0.
        weight: `[E, A, B]` of rows' dtype, any strides.
        ends: `[E]` int32, for each expert the number of rows that it and those before it have; the last is M.
        bias: `[E, B]` of rows' dtype, or None.

    Returns:
        `[M, B]`, rows' dtype.

    Raises:
        ValueError: shapes or dtypes do not agree.
    """
    _check(rows, weight, ends, bias)
    if not (use_triton(rows, weight, bias) and ends.device == rows.device):
        return grouped_linear_reference(rows, weight, ends, bias)
    y: torch.Tensor = _GroupedLinear.apply(rows, weight, ends, bias)  # type: ignore[no-untyped-call]
    return y


def _check(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None) -> None:
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[1] or ends.shape != weight.shape[:1]:
        raise ValueError(
            "rows must be [M, A], weight [E, A, B], ends [E]; "
            f"got {tuple(rows.shape)}, {tuple(weight.shape)}, {tuple(ends.shape)}"
        )
    if bias is not None and bias.shape != (weight.shape[0], weight.shape[2]):
        raise ValueError(f"bias must have shape {(weight.shape[0], weight.shape[2])}, got {tuple(bias.shape)}")
    dtypes = [rows.dtype, weight.dtype, *([] if bias is None else [bias.dtype])]
    if len(set(dtypes)) != 1 or not rows.is_floating_point() or ends.dtype != torch.int32:
        raise ValueError(f"rows, weight and bias must have one floating dtype, ends int32; got {dtypes}, {ends.dtype}")


@jit
def _rows_of_tile(
    tile: tl.tensor, ends_ptr: tl.tensor, num_experts: tl.tensor, ROWS: tl.constexpr, EXPERTS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(expert, first row, end of the expert's rows) of a tile; an expert that there is not for a tile too many."""
    experts = tl.arange(0, EXPERTS)
    exists = experts < num_experts
    ends = tl.load(ends_ptr + experts, mask=exists, other=0)
    starts = tl.load(ends_ptr + experts - 1, mask=exists & (experts > 0), other=0)
    tiles = tl.where(exists, tl.cdiv(ends - starts, ROWS), 0)
    tile_ends = tl.cumsum(tiles, 0)
    # Experts whose tiles end before this one are those before its own.
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    is_expert = experts == expert
    start = tl.sum(tl.where(is_expert, starts + (tile - tile_ends + tiles) * ROWS, 0), 0)
    return expert, start, tl.sum(tl.where(is_expert, ends, 0), 0)


@jit
def _rows_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_tiles: tl.tensor,
    num_experts: tl.tensor,
    num_inner: tl.tensor,
    num_cols: tl.tensor,
    row_stride: tl.tensor,
    expert_stride: tl.tensor,
    inner_stride: tl.tensor,
    col_stride: tl.tensor,
    bias_stride: tl.tensor,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    BESIDE: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile of ROWS rows of one expert x COLS columns of y."""
    program = tl.program_id(0)
    per_band = BESIDE * tl.cdiv(num_cols, COLS)
    first_tile = program // per_band * BESIDE
    height = tl.minimum(num_tiles - first_tile, BESIDE)
    tile = first_tile + program % per_band % height
    cols = program % per_band // height * COLS + tl.arange(0, COLS)
    expert, start, end = _rows_of_tile(tile, ends_ptr, num_experts, ROWS, EXPERTS)
    if expert >= num_experts:
        return
    rows = start + tl.arange(0, ROWS)
    row_ok, col_ok = rows < end, cols < num_cols
    inner = tl.arange(0, DEPTH)
    rows_64, expert_64 = rows.to(tl.int64), expert.to(tl.int64)
    x_ptrs = x_ptr + rows_64[:, None] * row_stride + inner[None, :]
    w_ptrs = weight_ptr + expert_64 * expert_stride + inner[:, None] * inner_stride + cols[None, :] * col_stride
    total = tl.zeros([ROWS, COLS], tl.float32)
    for done in range(0, num_inner, DEPTH):
        inner_ok = done + inner < num_inner
        x = tl.load(x_ptrs, mask=row_ok[:, None] & inner_ok[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=inner_ok[:, None] & col_ok[None, :], other=0.0)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        total = tl.dot(x, w, total, input_precision="ieee")
        x_ptrs += DEPTH
        w_ptrs += DEPTH * inner_stride
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert_64 * bias_stride + cols, mask=col_ok, other=0.0).to(tl.float32)
        total += bias[None, :]
    y_ptrs = y_ptr + rows_64[:, None] * num_cols + cols[None, :]
    tl.store(y_ptrs, total.to(y_ptr.dtype.element_ty), mask=row_ok[:, None] & col_ok[None, :])


@jit
def _weight_kernel(
    x_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    dweight_ptr: tl.tensor,
    dbias_ptr: tl.tensor,
    num_inner: tl.tensor,
    num_cols: tl.tensor,
    row_stride: tl.tensor,
    dy_stride: tl.tensor,
    NEED_DBIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """A tile of ROWS x COLS of the gradient of one expert's matrix; DEPTH of the expert's rows at once."""
    program = tl.program_id(0)
    blocks_in, blocks_out = tl.cdiv(num_inner, ROWS), tl.cdiv(num_cols, COLS)
    expert = program // (blocks_in * blocks_out)
    block_in = program // blocks_out % blocks_in
    inner = block_in * ROWS + tl.arange(0, ROWS)
    cols = program % blocks_out * COLS + tl.arange(0, COLS)
    inner_ok, col_ok = inner < num_inner, cols < num_cols
    end = tl.load(ends_ptr + expert)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    total = tl.zeros([ROWS, COLS], tl.float32)
    total_bias = tl.zeros([COLS], tl.float32)
    for first in range(start, end, DEPTH):
        rows = first + tl.arange(0, DEPTH)
        row_ok, rows_64 = rows < end, rows.to(tl.int64)
        x_ptrs = x_ptr + rows_64[:, None] * row_stride + inner[None, :]
        dy_ptrs = dy_ptr + rows_64[:, None] * dy_stride + cols[None, :]
        x = tl.load(x_ptrs, mask=row_ok[:, None] & inner_ok[None, :], other=0.0)
        dy = tl.load(dy_ptrs, mask=row_ok[:, None] & col_ok[None, :], other=0.0)
        if WIDE:
            x, dy = x.to(tl.float32), dy.to(tl.float32)
        total = tl.dot(tl.trans(x), dy, total, input_precision="ieee")
        if NEED_DBIAS:
            total_bias += tl.sum(dy.to(tl.float32), axis=0)
    expert_64 = expert.to(tl.int64)
    dweight_ptrs = dweight_ptr + (expert_64 * num_inner + inner[:, None]) * num_cols + cols[None, :]
    tl.store(dweight_ptrs, total.to(dweight_ptr.dtype.element_ty), mask=inner_ok[:, None] & col_ok[None, :])
    # The programs of a column block all have the same sum.
    if NEED_DBIAS and block_in == 0:
        dbias_ptrs = dbias_ptr + expert_64 * num_cols + cols
        tl.store(dbias_ptrs, total_bias.to(dbias_ptr.dtype.element_ty), mask=col_ok)


def _widens(dtype: torch.dtype) -> bool:
    """Whether factors are multiplied in fp32, to the same result: Triton's interpreter multiplies the bits of bf16."""
    return INTERPRETING and dtype == torch.bfloat16


class _Sizes(NamedTuple):
    """The sizes that tiles are chosen by; the last two are of one expert's product."""

    experts: int
    inner: int
    rows: int
    cols: int


def grouped_product(
    rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`[M, B]` by the kernel."""
    rows_MA, ends = as_rows(rows), ends.contiguous()
    bias_EB = None if bias is None else as_rows(bias)
    (num_rows, num_inner), (num_experts, _, num_cols) = rows_MA.shape, weight.shape
    sizes = _Sizes(experts=num_experts, inner=num_inner, rows=-(-num_rows // num_experts), cols=num_cols)

    def run(tile: ProductTile) -> torch.Tensor:
        tile_rows, tile_cols = tile.fit(sizes.rows, sizes.cols)
        num_tiles = num_rows // tile_rows + min(num_experts, num_rows)
        y = torch.empty((num_rows, num_cols), dtype=rows.dtype, device=rows.device)
        _rows_kernel[(num_tiles * -(-num_cols // tile_cols),)](
            rows_MA,
            weight,
            ends,
            bias_EB,
            y,
            num_tiles,
            num_experts,
            num_inner,
            num_cols,
            rows_MA.stride(0),
            *weight.stride(),
            0 if bias_EB is None else bias_EB.stride(0),
            HAS_BIAS=bias_EB is not None,
            ROWS=tile_rows,
            COLS=tile_cols,
            DEPTH=tile.depth(rows.element_size()),
            EXPERTS=power_of_2_at_least(num_experts),
            BESIDE=_TILES_BESIDE_EACH_OTHER,
            WIDE=_widens(rows.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return y

    transposed = weight.stride(1) == 1
    return launch("grouped_linear", TILES, run, sizes, rows_MA, bias=bias is not None, transposed=transposed)


# An operator, which selective recomputation sees and whose result it keeps (runtime/recompute.py), unlike a launch. Its
# namespace is this module's: several programs in one process have a copy each.
_product = torch.library.custom_op(f"{__name__.replace('.', '_')}::grouped_product", grouped_product, mutates_args=())


def _weight_gradients(
    rows: torch.Tensor, dy: torch.Tensor, ends: torch.Tensor, need_dbias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dweight `[E, A, B]`, dbias `[E, B]` if it is needed) by the kernel."""
    rows_MA, dy_MB, ends = as_rows(rows), as_rows(dy), ends.contiguous()
    (num_rows, num_inner), num_cols, num_experts = rows_MA.shape, dy_MB.shape[1], ends.shape[0]

    def run(tile: ProductTile) -> tuple[torch.Tensor, torch.Tensor | None]:
        tile_rows, tile_cols = tile.fit(num_inner, num_cols)
        num_tiles = num_experts * -(-num_inner // tile_rows) * -(-num_cols // tile_cols)
        dweight = torch.empty((num_experts, num_inner, num_cols), dtype=rows.dtype, device=rows.device)
        dbias = torch.empty((num_experts, num_cols), dtype=rows.dtype, device=rows.device) if need_dbias else None
        _weight_kernel[(num_tiles,)](
            rows_MA,
            dy_MB,
            ends,
            dweight,
            dbias,
            num_inner,
            num_cols,
            rows_MA.stride(0),
            dy_MB.stride(0),
            NEED_DBIAS=need_dbias,
            ROWS=tile_rows,
            COLS=tile_cols,
            DEPTH=tile.depth(rows.element_size()),
            WIDE=_widens(rows.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return dweight, dbias

    sizes = _Sizes(experts=num_experts, inner=-(-num_rows // num_experts), rows=num_inner, cols=num_cols)
    return launch("grouped_linear_weight", TILES, run, sizes, rows_MA, bias=need_dbias)


class _GroupedLinear(torch.autograd.Function):
    """Saves rows, weight and ends."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight, ends)
        y: torch.Tensor = _product(rows, weight, ends, bias)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, ends = ctx.saved_tensors
        need_drows, need_dweight, _, need_dbias = ctx.needs_input_grad
        drows = dweight = dbias = None
        if need_drows:
            drows = _product(dy, weight.transpose(1, 2), ends)
        if need_dweight or need_dbias:
            dweight, dbias = _weight_gradients(rows, dy, ends, need_dbias)
        return drows, dweight if need_dweight else None, None, dbias
