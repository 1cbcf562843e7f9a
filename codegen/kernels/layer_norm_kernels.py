"""Kernels of layer norms, of x (layer_norm.py) or of a sum (add_layer_norm.py); layer_norm.py has the formula.

Shapes: N rows, H hidden, P row chunks of the backward pass (partial sums of dw and db). Arithmetic is fp32 whatever the
dtypes of x, w and b; mean, rstd, dot, avg and the partial sums are fp32. The tile decides in which order mean, rstd,
dot, avg, dw and db are summed.
"""

from __future__ import annotations

import torch

from .dispatch import as_rows, jit, num_processors, tl
from .residual import load_sum, store_gradient
from .row_tiles import BACKWARD_TILES, FORWARD_TILES
from .tile import Tile
from .tuning import launch


@jit
def _affine(
    xhat: tl.tensor, w_ptr: tl.tensor, b_ptr: tl.tensor, cols: tl.tensor, num_cols: tl.tensor, HAS_BIAS: tl.constexpr
) -> tl.tensor:
    """xhat * w + b of the columns `cols`."""
    y = xhat * tl.load(w_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    return y


@jit
def _forward_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    w_ptr: tl.tensor,
    b_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    residual_row_stride: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    # 64-bit row numbers: N * H passes 2 ** 31 for long contexts.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    cols = tl.arange(0, COLS)
    x_rows = rows[:, None] * x_row_stride
    residual_rows = rows[:, None] * residual_row_stride
    out_rows = rows[:, None] * num_cols
    dtype = y_ptr.dtype.element_ty
    if WHOLE_ROW:
        ok = row_ok[:, None] & (cols < num_cols)[None, :]
        x = load_sum(x_ptr, x_rows + cols[None, :], residual_ptr, residual_rows + cols[None, :], ok, HAS_RESIDUAL)
        if HAS_RESIDUAL:
            tl.store(sum_ptr + out_rows + cols[None, :], x.to(dtype), mask=ok)
        mean = tl.sum(x, axis=1) / num_cols
        difference = tl.where(ok, x - mean[:, None], 0.0)
        rstd = tl.rsqrt(tl.sum(difference * difference, axis=1) / num_cols + eps)
        y = _affine(difference * rstd[:, None], w_ptr, b_ptr, cols, num_cols, HAS_BIAS)
        tl.store(y_ptr + out_rows + cols[None, :], y.to(dtype), mask=ok)
    else:
        total = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, num_cols, COLS):
            block = (start + cols)[None, :]
            ok = row_ok[:, None] & (block < num_cols)
            x = load_sum(x_ptr, x_rows + block, residual_ptr, residual_rows + block, ok, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(sum_ptr + out_rows + block, x.to(dtype), mask=ok)
            total += x
        mean = tl.sum(total, axis=1) / num_cols
        # Added again in each pass: another thread may have stored this element of the sum, and not have finished.
        squares = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, num_cols, COLS):
            block = (start + cols)[None, :]
            ok = row_ok[:, None] & (block < num_cols)
            x = load_sum(x_ptr, x_rows + block, residual_ptr, residual_rows + block, ok, HAS_RESIDUAL)
            difference = tl.where(ok, x - mean[:, None], 0.0)
            squares += difference * difference
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / num_cols + eps)
        for start in range(0, num_cols, COLS):
            block = (start + cols)[None, :]
            ok = row_ok[:, None] & (block < num_cols)
            x = load_sum(x_ptr, x_rows + block, residual_ptr, residual_rows + block, ok, HAS_RESIDUAL)
            xhat = (x - mean[:, None]) * rstd[:, None]
            y = _affine(xhat, w_ptr, b_ptr, start + cols, num_cols, HAS_BIAS)
            tl.store(y_ptr + out_rows + block, y.to(dtype), mask=ok)
    tl.store(mean_ptr + rows, mean, mask=row_ok)
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)


@jit
def _row_means_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    avg_ptr: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    dy_row_stride: tl.tensor,
    COLS: tl.constexpr,
) -> None:
    """dot_N and avg_N for rows longer than a tile: every column block of the backward pass needs the whole row's."""
    row = tl.program_id(0).to(tl.int64)
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    dot = tl.zeros([COLS], tl.float32)
    avg = tl.zeros([COLS], tl.float32)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        ok = cols < num_cols
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=ok, other=0.0).to(tl.float32)
        # w and dy are 0 where not ok, so the product is.
        dot += w * dy * ((x - mean) * rstd)
        avg += w * dy
    tl.store(dot_ptr + row, tl.sum(dot) / num_cols)
    tl.store(avg_ptr + row, tl.sum(avg) / num_cols)


@jit
def _backward_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dsum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    avg_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dw_ptr: tl.tensor,
    db_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    dy_row_stride: tl.tensor,
    dsum_row_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    NEED_DX: tl.constexpr,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    HAS_DSUM: tl.constexpr,
) -> None:
    """Program (p, c) walks the row tiles p, p + P, ... of column block c and keeps its partial sums in registers."""
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_ok = cols < num_cols
    w = tl.load(w_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, COLS], tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(chunk * ROWS, num_rows, num_chunks * ROWS):
        rows = first_row + tl.arange(0, ROWS).to(tl.int64)
        row_ok = rows < num_rows
        ok = row_ok[:, None] & col_ok[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        if NEED_DX or NEED_DW:
            x = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
            mean = tl.load(mean_ptr + rows, mask=row_ok, other=0.0)
            rstd = tl.load(rstd_ptr + rows, mask=row_ok, other=0.0)
            xhat = (x - mean[:, None]) * rstd[:, None]
        if NEED_DX:
            wdy = w[None, :] * dy
            if WHOLE_ROW:
                dot = tl.sum(wdy * xhat, axis=1) / num_cols
                avg = tl.sum(wdy, axis=1) / num_cols
            else:
                dot = tl.load(dot_ptr + rows, mask=row_ok, other=0.0)
                avg = tl.load(avg_ptr + rows, mask=row_ok, other=0.0)
            dx = rstd[:, None] * (wdy - xhat * dot[:, None] - avg[:, None])
            dx_offsets = rows[:, None] * num_cols + cols[None, :]
            dsum_offsets = rows[:, None] * dsum_row_stride + cols[None, :]
            store_gradient(dx, dx_ptr, dx_offsets, dsum_ptr, dsum_offsets, ok, HAS_DSUM)
        if NEED_DW:
            dw += dy * xhat
        if NEED_DB:
            db += dy
    out = chunk.to(tl.int64) * num_cols + cols
    if NEED_DW:
        tl.store(dw_ptr + out, tl.sum(dw, axis=0), mask=col_ok)
    if NEED_DB:
        tl.store(db_ptr + out, tl.sum(db, axis=0), mask=col_ok)


def launch_forward(
    x_NH: torch.Tensor, residual_NH: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(y, x + residual where there is one, mean, rstd)."""
    num_rows, num_cols = x_NH.shape
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        y_NH = torch.empty((num_rows, num_cols), dtype=x_NH.dtype, device=x_NH.device)
        sum_NH = None if residual_NH is None else torch.empty_like(y_NH)
        mean_N = torch.empty(num_rows, dtype=torch.float32, device=x_NH.device)
        rstd_N = torch.empty_like(mean_N)
        _forward_kernel[(-(-num_rows // rows),)](
            x_NH,
            residual_NH,
            weight,
            bias,
            y_NH,
            sum_NH,
            mean_N,
            rstd_N,
            num_rows,
            num_cols,
            x_NH.stride(0),
            0 if residual_NH is None else residual_NH.stride(0),
            eps,
            ROWS=rows,
            COLS=cols,
            WHOLE_ROW=whole_row,
            HAS_RESIDUAL=residual_NH is not None,
            HAS_BIAS=bias is not None,
            num_warps=warps,
        )
        return y_NH, sum_NH, mean_N, rstd_N

    flags = {"residual": residual_NH is not None, "bias": bias is not None}
    return launch("layer_norm_forward", FORWARD_TILES, run, (num_rows, num_cols), x_NH, weight, **flags)


def launch_backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor],
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    need: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx, with dsum added where there is one; dw; db), as needed, from (x, weight, bias, mean, rstd)."""
    x, weight, bias, mean_N, rstd_N = saved
    x_NH, dy_NH, weight = as_rows(x), as_rows(dy), weight.contiguous()
    dsum_NH = None if dsum is None else as_rows(dsum)
    num_rows, num_cols = x_NH.shape

    def run(tile: Tile) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        num_chunks = min(-(-num_rows // rows), tile.programs * num_processors(x.device))
        dx_NH = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device) if need[0] else None
        dw_PH, db_PH = (
            torch.empty((num_chunks, num_cols), dtype=torch.float32, device=x.device) if needed else None
            for needed in need[1:]
        )
        dot_N, avg_N = (torch.empty_like(rstd_N) if need[0] and not whole_row else None for _ in range(2))
        if dot_N is not None:
            _row_means_kernel[(num_rows,)](
                x_NH,
                weight,
                dy_NH,
                mean_N,
                rstd_N,
                dot_N,
                avg_N,
                num_cols,
                x_NH.stride(0),
                dy_NH.stride(0),
                COLS=cols,
                num_warps=warps,
            )
        _backward_kernel[(num_chunks, -(-num_cols // cols))](
            x_NH,
            weight,
            dy_NH,
            dsum_NH,
            mean_N,
            rstd_N,
            dot_N,
            avg_N,
            dx_NH,
            dw_PH,
            db_PH,
            num_rows,
            num_cols,
            x_NH.stride(0),
            dy_NH.stride(0),
            0 if dsum_NH is None else dsum_NH.stride(0),
            ROWS=rows,
            COLS=cols,
            WHOLE_ROW=whole_row,
            NEED_DX=need[0],
            NEED_DW=need[1],
            NEED_DB=need[2],
            HAS_DSUM=dsum_NH is not None,
            num_warps=warps,
        )
        dw = None if dw_PH is None else dw_PH.sum(0).to(weight.dtype)
        db = None if db_PH is None or bias is None else db_PH.sum(0).to(bias.dtype)
        return None if dx_NH is None else dx_NH.view(x.shape), dw, db

    flags = {"dx": need[0], "dw": need[1], "db": need[2], "dsum": dsum_NH is not None}
    return launch("layer_norm_backward", BACKWARD_TILES, run, (num_rows, num_cols), x_NH, weight, **flags)
