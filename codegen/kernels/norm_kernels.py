"""Kernels of layer norms and RMS norms, with an addition to the residual stream before or after them.

norm_launches.py launches them. Constants choose the norm:

    CENTERED      a layer norm (layer_norm.py has the formula) takes the mean away from each row, an RMS norm does not
    ROUNDS_XHAT   xhat is rounded to x's dtype before the weight, as RMS norms of Llama do (rms_norm.py)
    HAS_WEIGHT    without one it is 1
    OFFSET        is added to the weight in fp32: 1 where models store the weight's difference from 1
    SUM_BEFORE    the norm is that of x + residual, rounded as by an addition before it. The sum is a result too, and
                  its gradient has that of its other readers added
    SUM_AFTER     the residual is added to the rounded norm of x, and the sum is rounded

Shapes: N rows, H hidden, P row chunks of the backward pass (partial sums of dw and db). Arithmetic is fp32 whatever the
dtypes of x, w and b; mean, rstd, dot, avg and the partial sums are fp32. The tile decides in which order mean, rstd,
dot, avg, dw and db are summed. A row longer than the largest tile is read in blocks, which costs another pass or two.
"""

from __future__ import annotations

from .dispatch import jit, tl


@jit
def _load(ptr: tl.tensor, rows: tl.tensor, row_stride: tl.tensor, cols: tl.tensor, ok: tl.tensor) -> tl.tensor:
    """A tile in fp32, zeros where not ok."""
    return tl.load(ptr + rows[:, None] * row_stride + cols[None, :], mask=ok, other=0.0).to(tl.float32)


@jit
def _load_sum(
    x_ptr: tl.tensor,
    x_row_stride: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    ok: tl.tensor,
    SUM_BEFORE: tl.constexpr,
) -> tl.tensor:
    """The tile of x, or of x + residual rounded to x's dtype, in fp32, zeros where not ok."""
    x = _load(x_ptr, rows, x_row_stride, cols, ok)
    if SUM_BEFORE:
        x += _load(residual_ptr, rows, residual_row_stride, cols, ok)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    return x


@jit
def _difference(x: tl.tensor, mean: tl.tensor, ok: tl.tensor, CENTERED: tl.constexpr) -> tl.tensor:
    """x - mean if centered, else x; zeros where not ok."""
    if CENTERED:
        x = tl.where(ok, x - mean[:, None], 0.0)
    return x


@jit
def _weight(
    w_ptr: tl.tensor, cols: tl.tensor, num_cols: tl.tensor, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr
) -> tl.tensor:
    """The weight of the columns `cols` in fp32, with the offset; 1 where there is none."""
    if HAS_WEIGHT:
        w = tl.load(w_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)
    else:
        w = tl.full(cols.shape, 1.0, tl.float32)
    if OFFSET != 0.0:
        w += OFFSET
    return w


@jit
def _output(
    xhat: tl.tensor,
    w: tl.tensor,
    b_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    residual_row_stride: tl.tensor,
    rows: tl.tensor,
    cols: tl.tensor,
    ok: tl.tensor,
    num_cols: tl.tensor,
    dtype: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDS_XHAT: tl.constexpr,
    SUM_AFTER: tl.constexpr,
) -> tl.tensor:
    """xhat * w + b of the columns `cols`, in `dtype`; plus the residual where it is added after the norm."""
    if ROUNDS_XHAT:
        xhat = xhat.to(dtype).to(tl.float32)
    y = xhat * w[None, :]
    if HAS_BIAS:
        y += tl.load(b_ptr + cols, mask=cols < num_cols, other=0.0).to(tl.float32)[None, :]
    if SUM_AFTER:
        y = y.to(dtype).to(tl.float32) + _load(residual_ptr, rows, residual_row_stride, cols, ok)
    return y.to(dtype)


@jit
def forward_kernel(
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
    SUM_BEFORE: tl.constexpr,
    SUM_AFTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    ROUNDS_XHAT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Normalize rows that fit the tile."""
    # 64-bit row numbers: N * H passes 2 ** 31 for long contexts.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    cols = tl.arange(0, COLS)
    ok = row_ok[:, None] & (cols < num_cols)[None, :]
    out = rows[:, None] * num_cols + cols[None, :]
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x = _load_sum(x_ptr, x_row_stride, residual_ptr, residual_row_stride, rows, cols, ok, SUM_BEFORE)
    if SUM_BEFORE:
        tl.store(sum_ptr + out, x.to(dtype), mask=ok)
    w = _weight(w_ptr, cols, num_cols, HAS_WEIGHT, OFFSET)
    mean = tl.sum(x, axis=1) / num_cols
    difference = _difference(x, mean, ok, CENTERED)
    rstd = tl.rsqrt(tl.sum(difference * difference, axis=1) / num_cols + eps)
    y = _output(
        difference * rstd[:, None],
        w,
        b_ptr,
        residual_ptr,
        residual_row_stride,
        rows,
        cols,
        ok,
        num_cols,
        dtype,
        HAS_BIAS,
        ROUNDS_XHAT,
        SUM_AFTER,
    )
    tl.store(y_ptr + out, y, mask=ok)
    if CENTERED:
        tl.store(mean_ptr + rows, mean, mask=row_ok)
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)


@jit
def forward_blocks_kernel(
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
    SUM_BEFORE: tl.constexpr,
    SUM_AFTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    ROUNDS_XHAT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Normalize longer rows. A sum is added again in each pass: who stored an element of it may not have finished."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_ok = rows < num_rows
    out_rows = rows[:, None] * num_cols
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    total = tl.zeros([ROWS, COLS], tl.float32)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        ok = row_ok[:, None] & (cols < num_cols)[None, :]
        x = _load_sum(x_ptr, x_row_stride, residual_ptr, residual_row_stride, rows, cols, ok, SUM_BEFORE)
        if SUM_BEFORE:
            tl.store(sum_ptr + out_rows + cols[None, :], x.to(dtype), mask=ok)
        total += x if CENTERED else x * x
    mean = tl.sum(total, axis=1) / num_cols
    if CENTERED:
        tl.store(mean_ptr + rows, mean, mask=row_ok)
        total = tl.zeros([ROWS, COLS], tl.float32)
        for start in range(0, num_cols, COLS):
            cols = start + tl.arange(0, COLS)
            ok = row_ok[:, None] & (cols < num_cols)[None, :]
            x = _load_sum(x_ptr, x_row_stride, residual_ptr, residual_row_stride, rows, cols, ok, SUM_BEFORE)
            difference = _difference(x, mean, ok, CENTERED)
            total += difference * difference
    rstd = tl.rsqrt(tl.sum(total, axis=1) / num_cols + eps)
    tl.store(rstd_ptr + rows, rstd, mask=row_ok)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        ok = row_ok[:, None] & (cols < num_cols)[None, :]
        x = _load_sum(x_ptr, x_row_stride, residual_ptr, residual_row_stride, rows, cols, ok, SUM_BEFORE)
        w = _weight(w_ptr, cols, num_cols, HAS_WEIGHT, OFFSET)
        xhat = _difference(x, mean, ok, CENTERED) * rstd[:, None]
        y = _output(
            xhat,
            w,
            b_ptr,
            residual_ptr,
            residual_row_stride,
            rows,
            cols,
            ok,
            num_cols,
            dtype,
            HAS_BIAS,
            ROUNDS_XHAT,
            SUM_AFTER,
        )
        tl.store(y_ptr + out_rows + cols[None, :], y, mask=ok)


@jit
def row_means_kernel(
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
    CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """dot_N and avg_N for rows longer than a tile: every column block of the backward pass needs the whole row's."""
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    if CENTERED:
        mean = tl.load(mean_ptr + row)
    dot = tl.zeros([COLS], tl.float32)
    avg = tl.zeros([COLS], tl.float32)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        ok = cols < num_cols
        x = tl.load(x_ptr + row * x_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        w = _weight(w_ptr, cols, num_cols, HAS_WEIGHT, OFFSET)
        # dy is 0 where not ok, so the products are.
        if CENTERED:
            dot += w * dy * ((x - mean) * rstd)
            avg += w * dy
        else:
            dot += x * w * dy
    if CENTERED:
        tl.store(dot_ptr + row, tl.sum(dot) / num_cols)
        tl.store(avg_ptr + row, tl.sum(avg) / num_cols)
    else:
        tl.store(dot_ptr + row, tl.sum(dot) * rstd / num_cols)


@jit
def _row_mean(
    products: tl.tensor,
    mean_ptr: tl.tensor,
    rows: tl.tensor,
    row_ok: tl.tensor,
    num_cols: tl.tensor,
    WHOLE_ROW: tl.constexpr,
) -> tl.tensor:
    """The mean of each row's products `[ROWS, 1]`: where they are a part of the row only, what mean_ptr has of it."""
    mean = tl.sum(products, axis=1) / num_cols if WHOLE_ROW else tl.load(mean_ptr + rows, mask=row_ok, other=0.0)
    return mean[:, None]


@jit
def backward_kernel(
    x_ptr: tl.tensor,
    w_ptr: tl.tensor,
    dy_ptr: tl.tensor,
    dsum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dot_ptr: tl.tensor,
    avg_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
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
    CENTERED: tl.constexpr,
    ROUNDS_XHAT: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Program (p, c) walks the row tiles p, p + P, ... of column block c and keeps its partial sums in registers.

    It stores those of dw, then those of db, as they are needed, in row p of `[P, H]`.
    """
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    col_ok = cols < num_cols
    w = _weight(w_ptr, cols, num_cols, HAS_WEIGHT, OFFSET)
    dw = tl.zeros([ROWS, COLS], tl.float32)
    db = tl.zeros([ROWS, COLS], tl.float32)
    for first_row in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first_row + tl.arange(0, ROWS).to(tl.int64)
        row_ok = rows < num_rows
        ok = row_ok[:, None] & col_ok[None, :]
        x = _load(x_ptr, rows, x_row_stride, cols, ok)
        if CENTERED:
            x -= tl.load(mean_ptr + rows, mask=row_ok, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=row_ok, other=0.0)[:, None]
        xhat = x * rstd
        dy = _load(dy_ptr, rows, dy_row_stride, cols, ok)
        if NEED_DX:
            wdy = w[None, :] * dy
            dx = wdy - xhat * _row_mean(wdy * xhat, dot_ptr, rows, row_ok, num_cols, WHOLE_ROW)
            if CENTERED:
                dx -= _row_mean(wdy, avg_ptr, rows, row_ok, num_cols, WHOLE_ROW)
            dx *= rstd
            if HAS_DSUM:
                dx += _load(dsum_ptr, rows, dsum_row_stride, cols, ok)
            tl.store(dx_ptr + rows[:, None] * num_cols + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=ok)
        if NEED_DW:
            dw += dy * (xhat.to(x_ptr.dtype.element_ty).to(tl.float32) if ROUNDS_XHAT else xhat)
        if NEED_DB:
            db += dy
    out = tl.program_id(0).to(tl.int64) * num_cols + cols
    if NEED_DW:
        tl.store(partial_ptr + out, tl.sum(dw, axis=0), mask=col_ok)
        out += tl.num_programs(0).to(tl.int64) * num_cols
    if NEED_DB:
        tl.store(partial_ptr + out, tl.sum(db, axis=0), mask=col_ok)
