"""Kernels of RMS norms, of x (rms_norm.py) or of a sum (add_rms_norm.py); rms_norm.py has the formula.

Shapes: N rows, H hidden, P row chunks of the backward pass (partial sums of dw). Arithmetic is fp32 whatever the dtype
of x and w; rstd, dot and the partial sums are fp32. The tile decides in which order rstd, dot and dw are summed.
"""

from __future__ import annotations

import torch

from .dispatch import as_rows, jit, num_processors, tl
from .residual import load_sum, store_gradient
from .row_tiles import BACKWARD_TILES, FORWARD_TILES
from .tile import Tile
from .tuning import launch


@jit
def _forward_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    w_ptr: tl.tensor,
    y_ptr: tl.tensor,
    sum_ptr: tl.tensor,
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
        w = tl.load(w_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) / num_cols + eps)
        xhat = (x * rstd[:, None]).to(dtype).to(tl.float32)
        tl.store(y_ptr + out_rows + cols[None, :], (w[None, :] * xhat).to(dtype), mask=ok)
    else:
        squares = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, num_cols, COLS):
            block = (start + cols)[None, :]
            ok = row_ok[:, None] & (block < num_cols)
            x = load_sum(x_ptr, x_rows + block, residual_ptr, residual_rows + block, ok, HAS_RESIDUAL)
            if HAS_RESIDUAL:
                tl.store(sum_ptr + out_rows + block, x.to(dtype), mask=ok)
            squares += x * x
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / num_cols + eps)
        for start in range(0, num_cols, COLS):
            block = (start + cols)[None, :]
            ok = row_ok[:, None] & (block < num_cols)
            # Added again: another thread may have stored this element of the sum, and not have finished.
            x = load_sum(x_ptr, x_rows + block, residual_ptr, residual_rows + block, ok, HAS_RESIDUAL)
            w = tl.load(w_ptr + start + cols, mask=start + cols < num_cols, other=0.0).to(tl.float32)
            xhat = (x * rstd[:, None]).to(dtype).to(tl.float32)
            tl.store(y_ptr + out_rows + block, (w[None, :] * xhat).to(dtype), mask=ok)
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)


@jit
def _row_dot_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    num_cols: tl.tensor,
    x_row_stride: tl.tensor,
    dy_row_stride: tl.tensor,
    COLS: tl.constexpr,
) -> None:
    """dot_N for rows longer than a tile: every column block of the backward pass needs the whole row's value."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COLS], tl.float32)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        ok = cols < num_cols
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + cols, mask=ok, other=0.0).to(tl.float32)
        total += x * w * dy
    tl.store(dot_ptr + row, tl.sum(total) * tl.load(rstd_ptr + row) / num_cols)


@jit
def _backward_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dsum_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    dw_ptr: tl.tensor,
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
    HAS_DSUM: tl.constexpr,
) -> None:
    """Program (p, c) walks the row tiles p, p + P, ... of column block c and keeps its partial dw in registers."""
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_ok = cols < num_cols
    w = tl.load(w_ptr + cols, mask=col_ok, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(chunk * ROWS, num_rows, num_chunks * ROWS):
        rows = first_row + tl.arange(0, ROWS).to(tl.int64)
        ok = (rows < num_rows)[:, None] & col_ok[None, :]
        x_raw = tl.load(x_ptr + rows[:, None] * x_row_stride + cols[None, :], mask=ok, other=0.0)
        dy = tl.load(dy_ptr + rows[:, None] * dy_row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
        xhat = x_raw.to(tl.float32) * rstd[:, None]
        if NEED_DX:
            wdy = w[None, :] * dy
            if WHOLE_ROW:
                dot = tl.sum(wdy * xhat, axis=1) / num_cols
            else:
                dot = tl.load(dot_ptr + rows, mask=rows < num_rows, other=0.0)
            dx = rstd[:, None] * (wdy - xhat * dot[:, None])
            dx_offsets = rows[:, None] * num_cols + cols[None, :]
            dsum_offsets = rows[:, None] * dsum_row_stride + cols[None, :]
            store_gradient(dx, dx_ptr, dx_offsets, dsum_ptr, dsum_offsets, ok, HAS_DSUM)
        if NEED_DW:
            dw += dy * xhat.to(x_raw.dtype).to(tl.float32)
    if NEED_DW:
        tl.store(dw_ptr + chunk.to(tl.int64) * num_cols + cols, tl.sum(dw, axis=0), mask=col_ok)


def launch_forward(
    x_NH: torch.Tensor, residual_NH: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, x + residual where there is one, rstd)."""
    num_rows, num_cols = x_NH.shape
    weight = weight.contiguous()

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        y_NH = torch.empty((num_rows, num_cols), dtype=x_NH.dtype, device=x_NH.device)
        sum_NH = None if residual_NH is None else torch.empty_like(y_NH)
        rstd_N = torch.empty(num_rows, dtype=torch.float32, device=x_NH.device)
        _forward_kernel[(-(-num_rows // rows),)](
            x_NH,
            residual_NH,
            weight,
            y_NH,
            sum_NH,
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
            num_warps=warps,
        )
        return y_NH, sum_NH, rstd_N

    has_residual = residual_NH is not None
    return launch("rms_norm_forward", FORWARD_TILES, run, (num_rows, num_cols), x_NH, weight, residual=has_residual)


def launch_backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    need: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, with dsum added where there is one; dw), as needed, from (x, weight, rstd)."""
    x, weight, rstd_N = saved
    x_NH, dy_NH, weight = as_rows(x), as_rows(dy), weight.contiguous()
    dsum_NH = None if dsum is None else as_rows(dsum)
    num_rows, num_cols = x_NH.shape
    need_dx, need_dw = need

    def run(tile: Tile) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        num_chunks = min(-(-num_rows // rows), tile.programs * num_processors(x.device))
        dx_NH = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device) if need_dx else None
        dw_PH = torch.empty((num_chunks, num_cols), dtype=torch.float32, device=x.device) if need_dw else None
        dot_N = torch.empty_like(rstd_N) if need_dx and not whole_row else None
        if dot_N is not None:
            _row_dot_kernel[(num_rows,)](
                x_NH,
                weight,
                dy_NH,
                rstd_N,
                dot_N,
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
            rstd_N,
            dot_N,
            dx_NH,
            dw_PH,
            num_rows,
            num_cols,
            x_NH.stride(0),
            dy_NH.stride(0),
            0 if dsum_NH is None else dsum_NH.stride(0),
            ROWS=rows,
            COLS=cols,
            WHOLE_ROW=whole_row,
            NEED_DX=need_dx,
            NEED_DW=need_dw,
            HAS_DSUM=dsum_NH is not None,
            num_warps=warps,
        )
        dw = None if dw_PH is None else dw_PH.sum(0).to(weight.dtype)
        return None if dx_NH is None else dx_NH.view(x.shape), dw

    flags = {"dx": need_dx, "dw": need_dw, "dsum": dsum_NH is not None}
    return launch("rms_norm_backward", BACKWARD_TILES, run, (num_rows, num_cols), x_NH, weight, **flags)
