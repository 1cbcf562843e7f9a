"""RMS normalisation with a weight, in one pass over memory where a row fits a tile.

Formula (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", section 3, eq. 4), per row:

    rstd_N  = 1 / sqrt(mean_H(x_NH ** 2) + eps)
    xhat_NH = x_NH * rstd_N
    y_NH    = w_H * round(xhat_NH)                     round: to x's dtype, as Llama implementations do

    dx_NH   = rstd_N * (w_H * dy_NH - xhat_NH * dot_N) dot_N = mean_H(w_H * dy_NH * xhat_NH)
    dw_H    = sum_N(dy_NH * round(xhat_NH))

Shapes: N rows (all leading dims), H hidden, P row chunks of the backward pass (partial sums of dw). Arithmetic is
fp32 whatever the dtype of x and w; rstd, dot and the partial sums are fp32. The tile decides in which order rstd, dot
and dw are summed. The kernels also do add_rms_norm.py.
"""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import as_rows, jit, num_processors, tl, use_triton
from .residual import load_sum
from .row_tiles import BACKWARD_TILES, FORWARD_TILES
from .tile import Tile
from .tuning import launch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The formula in torch operations: x `[..., H]`, weight `[H]` -> `[..., H]` in x's dtype (fp64 stays fp64)."""
    x_compute = x.to(torch.promote_types(x.dtype, torch.float32))
    xhat = x_compute * torch.rsqrt(x_compute.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * xhat.to(x.dtype)).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / rms(x)` over the last dim; differentiable once in x and weight.

    Args:
        x: `[..., H]`, any strides.
        weight: `[H]`. Where its dtype is wider than x's, the product is rounded back to x's dtype (Hugging Face's
            module would return the wider one).
        eps: added to the mean square.

    Returns:
        `[..., H]`, contiguous on the Triton path, in x's dtype.

    Raises:
        ValueError: weight is not `[H]`.
    """
    check_weight(x, weight)
    if not use_triton(x, weight):
        return rms_norm_reference(x, weight, eps)
    y: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


def check_weight(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raises ValueError where weight is not `[H]`."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must have shape {tuple(x.shape[-1:])}, the last dim of x; got {tuple(weight.shape)}")


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
            if HAS_DSUM:
                dsum_rows = dsum_ptr + rows[:, None] * dsum_row_stride
                dx += tl.load(dsum_rows + cols[None, :], mask=ok, other=0.0).to(tl.float32)
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=ok)
        if NEED_DW:
            dw += dy * xhat.to(x_raw.dtype).to(tl.float32)
    if NEED_DW:
        tl.store(dw_ptr + chunk.to(tl.int64) * num_cols + cols, tl.sum(dw, axis=0), mask=col_ok)


def launch_forward(
    x_NH: torch.Tensor, residual_NH: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, x + residual where there is one, rstd)."""
    num_rows, num_cols = x_NH.shape

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
    x_NH: torch.Tensor,
    weight: torch.Tensor,
    dy_NH: torch.Tensor,
    dsum_NH: torch.Tensor | None,
    rstd_N: torch.Tensor,
    need_dx: bool,
    need_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, with dsum added where there is one; dw)."""
    num_rows, num_cols = x_NH.shape

    def run(tile: Tile) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        num_chunks = min(-(-num_rows // rows), tile.programs * num_processors(x_NH.device))
        dx_NH = torch.empty((num_rows, num_cols), dtype=x_NH.dtype, device=x_NH.device) if need_dx else None
        dw_PH = torch.empty((num_chunks, num_cols), dtype=torch.float32, device=x_NH.device) if need_dw else None
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
        return dx_NH, None if dw_PH is None else dw_PH.sum(0).to(weight.dtype)

    flags = {"dx": need_dx, "dw": need_dw, "dsum": dsum_NH is not None}
    return launch("rms_norm_backward", BACKWARD_TILES, run, (num_rows, num_cols), x_NH, weight, **flags)


class _RmsNorm(torch.autograd.Function):
    """Saves x itself (not a contiguous copy: x is alive anyway), weight and rstd.

    The two gradients are computed only as asked for, so a schedule may take dx now and dw later.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y_NH, _, rstd_N = launch_forward(as_rows(x), None, weight.contiguous(), eps)
        ctx.save_for_backward(x, weight, rstd_N)
        return y_NH.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, rstd_N = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        dx_NH, dw = launch_backward(as_rows(x), weight.contiguous(), as_rows(dy), None, rstd_N, need_dx, need_dw)
        return None if dx_NH is None else dx_NH.view(x.shape), dw, None
