"""A bias and the GELU after it, forward and backward in one pass each; the bias's gradient by partial sums.

Formula (gelu and its derivative exact or with tanh, see gelu.py):

    h_NC  = round(x_NC + b_C)                           round: to x's dtype, as unfused operations do
    y_NC  = gelu(h_NC)
    dx_NC = dy_NC * gelu'(h_NC)
    db_C  = sum_N(dx_NC)                                of the values before they are rounded

Shapes: N rows (all leading dims), C columns, P row chunks of the backward pass (partial sums of db). Arithmetic is fp32
whatever the dtypes of x and b; partial sums are fp32. The tile decides in which order db is summed, and nothing else.
Backward recomputes h, so only x and b are saved.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .column_sums import column_sums
from .dispatch import as_rows, check_last_dim, jit, num_processors, tl, use_triton
from .gelu import check_approximate, gelu_derivative, gelu_share
from .tile import Tile
from .tuning import launch

FORWARD_TILES: Final = (
    Tile(4096, least=2048),
    Tile(4096, least=2048, per_warp=256),
    Tile(4096, least=2048, per_warp=1024),
    Tile(2048, least=2048),
    Tile(8192, least=2048),
    Tile(1024, least=4096),
)
BACKWARD_TILES: Final = (
    Tile(4096, least=2048),
    Tile(4096, least=2048, per_warp=256),
    Tile(2048, least=2048),
    Tile(8192, least=2048),
    Tile(4096, least=2048, programs=2),
    Tile(2048, least=2048, programs=2),
)


def bias_gelu_reference(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """The formula in torch operations: x `[..., C]`, bias `[C]` -> `[..., C]` in x's dtype."""
    return torch.nn.functional.gelu((x + bias).to(x.dtype), approximate=approximate)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """`gelu(x + bias)`; differentiable once in both.

    Args:
        x: `[..., C]`, any strides.
        bias: `[C]`. Where its dtype is wider than x's, the sum is rounded back to x's dtype.
        approximate: "none" for the exact gelu, "tanh" for its approximation, as of `torch.nn.functional.gelu`.

    Returns:
        `[..., C]`, contiguous on the Triton path, in x's dtype.

    Raises:
        ValueError: bias is not `[C]`, or approximate is neither of these.
    """
    check_approximate(approximate)
    check_last_dim(x, bias=bias)
    if not use_triton(x, bias):
        return bias_gelu_reference(x, bias, approximate)
    y: torch.Tensor = _BiasGelu.apply(x, bias, approximate == "tanh")  # type: ignore[no-untyped-call]
    return y


@jit
def _forward_kernel(
    x_ptr: tl.tensor,
    b_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TANH: tl.constexpr,
) -> None:
    dtype = x_ptr.dtype.element_ty
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = (rows < num_rows) & (cols < num_cols)[None, :]
    b = tl.load(b_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
    h = (x + b[None, :]).to(dtype).to(tl.float32)
    tl.store(y_ptr + rows * num_cols + cols[None, :], (h * gelu_share(h, TANH)).to(dtype), mask=ok)


@jit
def _backward_kernel(
    x_ptr: tl.tensor,
    b_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    db_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    dy_row_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TANH: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DB: tl.constexpr,
) -> None:
    """Program (p, c) walks the row tiles p, p + P, ... of column block c and keeps its partial db in registers."""
    dtype = x_ptr.dtype.element_ty
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_ok = cols < num_cols
    b = tl.load(b_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(chunk * ROWS, num_rows, num_chunks * ROWS):
        rows = (first_row + tl.arange(0, ROWS).to(tl.int64))[:, None]
        ok = (rows < num_rows) & col_ok[None, :]
        x = tl.load(x_ptr + rows * x_row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows * dy_row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        h = (x + b[None, :]).to(dtype).to(tl.float32)
        dx = dy * gelu_derivative(h, gelu_share(h, TANH), TANH)
        if NEED_DX:
            tl.store(dx_ptr + rows * num_cols + cols[None, :], dx.to(dtype), mask=ok)
        if NEED_DB:
            # A bias that is not finite would make 0 * nan of what is not ok.
            db += tl.where(ok, dx, 0.0)
    if NEED_DB:
        tl.store(db_ptr + chunk.to(tl.int64) * num_cols + cols, tl.sum(db, axis=0), mask=col_ok)


class _BiasGelu(torch.autograd.Function):
    """The two gradients are computed only as asked for, so a schedule may take dx now and db later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        ctx.tanh = tanh
        x_NC, bias = as_rows(x), bias.contiguous()
        num_rows, num_cols = x_NC.shape

        def run(tile: Tile) -> torch.Tensor:
            rows, cols, _, warps = tile.fit(num_cols)
            y_NC = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device)
            _forward_kernel[(-(-num_rows // rows), -(-num_cols // cols))](
                x_NC,
                bias,
                y_NC,
                num_rows,
                num_cols,
                x_NC.stride(0),
                ROWS=rows,
                COLS=cols,
                TANH=tanh,
                num_warps=warps,
            )
            return y_NC

        y_NC = launch("bias_gelu_forward", FORWARD_TILES, run, (num_rows, num_cols), x, bias, tanh=tanh)
        return y_NC.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, bias = ctx.saved_tensors
        need_dx, need_db, _ = ctx.needs_input_grad
        x_NC, bias, dy_NC = as_rows(x), bias.contiguous(), as_rows(dy)
        num_rows, num_cols = x_NC.shape

        def run(tile: Tile) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            rows, cols, _, warps = tile.fit(num_cols)
            column_blocks = -(-num_cols // cols)
            most_chunks = max(tile.programs * num_processors(x.device) // column_blocks, 1)
            num_chunks = min(-(-num_rows // rows), most_chunks)
            dx_NC = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device) if need_dx else None
            db_PC = torch.empty((num_chunks, num_cols), dtype=torch.float32, device=x.device) if need_db else None
            _backward_kernel[(num_chunks, column_blocks)](
                x_NC,
                bias,
                dy_NC,
                dx_NC,
                db_PC,
                num_rows,
                num_cols,
                x_NC.stride(0),
                dy_NC.stride(0),
                ROWS=rows,
                COLS=cols,
                TANH=ctx.tanh,
                NEED_DX=need_dx,
                NEED_DB=need_db,
                num_warps=warps,
            )
            return dx_NC, None if db_PC is None else column_sums(db_PC[None], [bias.dtype])[0]

        flags = {"tanh": ctx.tanh, "dx": need_dx, "db": need_db}
        dx_NC, db = launch("bias_gelu_backward", BACKWARD_TILES, run, (num_rows, num_cols), x, bias, **flags)
        return None if dx_NC is None else dx_NC.view(x.shape), db, None
