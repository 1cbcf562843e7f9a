"""Launches of norms, layer_norm.py, rms_norm.py and those with a sum, and what autograd saves for their gradients.

Shapes and precisions are in norm_kernels.py.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from .column_sums import column_sums
from .dispatch import as_rows, num_processors
from .norm_kernels import backward_kernel, forward_blocks_kernel, forward_kernel, row_means_kernel
from .tile import Tile
from .tuning import launch

FORWARD_TILES: Final = (
    Tile(16384, least=2048),
    Tile(16384, least=2048, per_warp=256),
    Tile(16384, least=2048, per_warp=1024),
    Tile(16384, least=1024, per_warp=256),
    Tile(16384, least=4096),
    Tile(8192, least=2048),
)
# Smaller than the forward ones: there are also w, dy and the sums of dw and db to hold.
BACKWARD_TILES: Final = (
    Tile(8192, least=2048),
    Tile(8192, least=2048, per_warp=256),
    Tile(8192, least=2048, per_warp=1024),
    Tile(8192, least=4096),
    Tile(8192, least=2048, programs=2),
    Tile(8192, least=2048, per_warp=256, programs=2),
)


class Form(NamedTuple):
    """The kind of a norm, by the constants of norm_kernels.py."""

    centered: bool
    rounds_xhat: bool
    offset: float = 0.0


LAYER_NORM: Final = Form(centered=True, rounds_xhat=False)


def rms_norm_form(offset: float, rounds_once: bool) -> Form:
    """The form of an RMS norm; rounds_once: after the weight only."""
    return Form(centered=False, rounds_xhat=not rounds_once, offset=offset)


def launch_forward(
    x_NH: torch.Tensor,
    residual_NH: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    form: Form,
    sum_after: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """(y; x + residual where that is normalized; mean if centered; rstd).

    sum_after: the residual is added to the norm of x, which gives y.
    """
    num_rows, num_cols = x_NH.shape
    sum_before = residual_NH is not None and not sum_after
    weight, bias = (None if parameter is None else parameter.contiguous() for parameter in (weight, bias))

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        y_NH = torch.empty((num_rows, num_cols), dtype=x_NH.dtype, device=x_NH.device)
        sum_NH = torch.empty_like(y_NH) if sum_before else None
        rstd_N = torch.empty(num_rows, dtype=torch.float32, device=x_NH.device)
        mean_N = torch.empty_like(rstd_N) if form.centered else None
        kernel = forward_kernel if whole_row else forward_blocks_kernel
        kernel[(-(-num_rows // rows),)](
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
            SUM_BEFORE=sum_before,
            SUM_AFTER=sum_after,
            HAS_BIAS=bias is not None,
            CENTERED=form.centered,
            ROUNDS_XHAT=form.rounds_xhat,
            HAS_WEIGHT=weight is not None,
            OFFSET=form.offset,
            num_warps=warps,
        )
        return y_NH, sum_NH, mean_N, rstd_N

    name = "layer_norm_forward" if form.centered else "rms_norm_forward"
    flags = {"residual": sum_before, "sum_after": sum_after, "bias": bias is not None}
    tensors = (x_NH,) if weight is None else (x_NH, weight)
    return launch(name, FORWARD_TILES, run, (num_rows, num_cols), *tensors, **flags)


def _row_means(
    x_NH: torch.Tensor,
    weight: torch.Tensor | None,
    dy_NH: torch.Tensor,
    mean_N: torch.Tensor | None,
    rstd_N: torch.Tensor,
    tile: Tile,
    form: Form,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dot; avg if centered) where the backward needs them: of rows that are longer than the tile."""
    num_rows, num_cols = x_NH.shape
    _, cols, whole_row, warps = tile.fit(num_cols)
    if whole_row:
        return None, None
    dot_N = torch.empty_like(rstd_N)
    avg_N = None if mean_N is None else torch.empty_like(rstd_N)
    strides = x_NH.stride(0), dy_NH.stride(0)
    row_means_kernel[(num_rows,)](
        *(x_NH, weight, dy_NH, mean_N, rstd_N, dot_N, avg_N, num_cols, *strides),
        COLS=cols,
        CENTERED=form.centered,
        HAS_WEIGHT=weight is not None,
        OFFSET=form.offset,
        num_warps=warps,
    )
    return dot_N, avg_N


def launch_backward(
    saved: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor],
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    need: tuple[bool, bool, bool],
    form: Form,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx, with dsum added where there is one; dw; db), as needed, from (x, weight, bias, mean if centered, rstd)."""
    x, weight, bias, mean_N, rstd_N = saved
    x_NH, dy_NH, weight = as_rows(x), as_rows(dy), None if weight is None else weight.contiguous()
    dsum_NH = None if dsum is None else as_rows(dsum)
    num_rows, num_cols = x_NH.shape
    need_dx, need_dw, need_db = need
    dtypes = [p.dtype for p, is_needed in ((weight, need_dw), (bias, need_db)) if is_needed and p is not None]

    def run(tile: Tile) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        num_chunks = min(-(-num_rows // rows), tile.programs * num_processors(x.device))
        dx_NH = torch.empty((num_rows, num_cols), dtype=x.dtype, device=x.device) if need_dx else None
        partial_KPH = None
        if dtypes:
            shape = (len(dtypes), num_chunks, num_cols)
            partial_KPH = torch.empty(shape, dtype=torch.float32, device=x.device)
        dot_N, avg_N = _row_means(x_NH, weight, dy_NH, mean_N, rstd_N, tile, form) if need_dx else (None, None)
        backward_kernel[(num_chunks, -(-num_cols // cols))](
            *(x_NH, weight, dy_NH, dsum_NH, mean_N, rstd_N, dot_N, avg_N, dx_NH, partial_KPH),
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
            NEED_DB=need_db,
            HAS_DSUM=dsum_NH is not None,
            CENTERED=form.centered,
            ROUNDS_XHAT=form.rounds_xhat,
            HAS_WEIGHT=weight is not None,
            OFFSET=form.offset,
            num_warps=warps,
        )
        return dx_NH, [] if partial_KPH is None else column_sums(partial_KPH, dtypes)

    name = "layer_norm_backward" if form.centered else "rms_norm_backward"
    flags = {"dx": need_dx, "dw": need_dw, "db": need_db, "dsum": dsum_NH is not None}
    tensors = (x_NH,) if weight is None else (x_NH, weight)
    dx_NH, sums = launch(name, BACKWARD_TILES, run, (num_rows, num_cols), *tensors, **flags)
    dw = sums[0] if need_dw else None
    db = sums[-1] if need_db else None
    return None if dx_NH is None else dx_NH.view(x.shape), dw, db


class Norm(torch.autograd.Function):
    """Saves x itself (not a contiguous copy: x is alive anyway), the parameters, rstd and, if centered, mean.

    The gradients are computed only as asked for, so a schedule may take dx now and the others later.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, form: Form
    ) -> torch.Tensor:
        y_NH, _, mean_N, rstd_N = launch_forward(as_rows(x), None, weight, bias, eps, form)
        ctx.save_for_backward(x, weight, bias, mean_N, rstd_N)
        ctx.form = form
        return y_NH.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw, db = launch_backward(ctx.saved_tensors, dy, None, ctx.needs_input_grad[:3], ctx.form)
        return dx, dw, db, None, None


class NormAdd(torch.autograd.Function):
    """Saves what a norm of x alone does. The residual's gradient is that of the sum itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        form: Form,
    ) -> torch.Tensor:
        rows = as_rows(x), as_rows(residual)
        y_NH, _, mean_N, rstd_N = launch_forward(*rows, weight, bias, eps, form, sum_after=True)
        ctx.save_for_backward(x, weight, bias, mean_N, rstd_N)
        ctx.form = form
        return y_NH.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        need_dx, need_dresidual, need_dw, need_db, *_ = ctx.needs_input_grad
        dx, dw, db = None, None, None
        if need_dx or need_dw or need_db:
            dx, dw, db = launch_backward(ctx.saved_tensors, dy, None, (need_dx, need_dw, need_db), ctx.form)
        return dx, dy if need_dresidual else None, dw, db, None, None


class AddNorm(torch.autograd.Function):
    """Saves the sum, the parameters, rstd and, if centered, mean: nothing that a norm of the sum alone would not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        form: Form,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y_NH, sum_NH, mean_N, rstd_N = launch_forward(as_rows(x), as_rows(residual), weight, bias, eps, form)
        assert sum_NH is not None
        total = sum_NH.view(x.shape)
        ctx.save_for_backward(total, weight, bias, mean_N, rstd_N)
        ctx.form = form
        ctx.set_materialize_grads(False)
        return y_NH.view(x.shape), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:  # only the sum was used
            return dsum, dsum, None, None, None, None
        need_dx, need_dresidual, need_dw, need_db, *_ = ctx.needs_input_grad
        need = need_dx or need_dresidual, need_dw, need_db
        dx, dw, db = launch_backward(ctx.saved_tensors, dy, dsum, need, ctx.form)
        return dx, dx, dw, db, None, None
