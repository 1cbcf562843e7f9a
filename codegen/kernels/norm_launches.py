"""Launches of norms, layer_norm.py, rms_norm.py and those of a sum, and what autograd saves for their gradients.

Shapes and precisions are in norm_kernels.py.
"""

from __future__ import annotations

from typing import Any, Final

import torch

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


def launch_forward(
    x_NH: torch.Tensor,
    residual_NH: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """(y; x + residual where there is one; mean if centered; rstd)."""
    num_rows, num_cols = x_NH.shape
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()

    def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        rows, cols, whole_row, warps = tile.fit(num_cols)
        y_NH = torch.empty((num_rows, num_cols), dtype=x_NH.dtype, device=x_NH.device)
        sum_NH = None if residual_NH is None else torch.empty_like(y_NH)
        rstd_N = torch.empty(num_rows, dtype=torch.float32, device=x_NH.device)
        mean_N = torch.empty_like(rstd_N) if centered else None
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
            HAS_RESIDUAL=residual_NH is not None,
            HAS_BIAS=bias is not None,
            CENTERED=centered,
            num_warps=warps,
        )
        return y_NH, sum_NH, mean_N, rstd_N

    name, shape = f"{'layer' if centered else 'rms'}_norm_forward", (num_rows, num_cols)
    flags = {"residual": residual_NH is not None, "bias": bias is not None}
    return launch(name, FORWARD_TILES, run, shape, x_NH, weight, **flags)


def _row_means(
    x_NH: torch.Tensor,
    weight: torch.Tensor,
    dy_NH: torch.Tensor,
    mean_N: torch.Tensor | None,
    rstd_N: torch.Tensor,
    tile: Tile,
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
        CENTERED=mean_N is not None,
        num_warps=warps,
    )
    return dot_N, avg_N


def launch_backward(
    saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor],
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    need: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """(dx, with dsum added where there is one; dw; db), as needed, from (x, weight, bias, mean if centered, rstd)."""
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
        dot_N, avg_N = _row_means(x_NH, weight, dy_NH, mean_N, rstd_N, tile) if need[0] else (None, None)
        backward_kernel[(num_chunks, -(-num_cols // cols))](
            *(x_NH, weight, dy_NH, dsum_NH, mean_N, rstd_N, dot_N, avg_N, dx_NH, dw_PH, db_PH),
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
            CENTERED=mean_N is not None,
            num_warps=warps,
        )
        dw = None if dw_PH is None else dw_PH.sum(0).to(weight.dtype)
        db = None if db_PH is None or bias is None else db_PH.sum(0).to(bias.dtype)
        return None if dx_NH is None else dx_NH.view(x.shape), dw, db

    name, shape = f"{'rms' if mean_N is None else 'layer'}_norm_backward", (num_rows, num_cols)
    flags = {"dx": need[0], "dw": need[1], "db": need[2], "dsum": dsum_NH is not None}
    return launch(name, BACKWARD_TILES, run, shape, x_NH, weight, **flags)


class Norm(torch.autograd.Function):
    """Saves x itself (not a contiguous copy: x is alive anyway), the parameters, rstd and, if centered, mean.

    The gradients are computed only as asked for, so a schedule may take dx now and the others later.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, centered: bool
    ) -> torch.Tensor:
        y_NH, _, mean_N, rstd_N = launch_forward(as_rows(x), None, weight, bias, eps, centered)
        ctx.save_for_backward(x, weight, bias, mean_N, rstd_N)
        return y_NH.view(x.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dx, dw, db = launch_backward(ctx.saved_tensors, dy, None, ctx.needs_input_grad[:3])
        return dx, dw, db, None, None


class AddNorm(torch.autograd.Function):
    """Saves the sum, the parameters, rstd and, if centered, mean: nothing that a norm of the sum alone would not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        centered: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y_NH, sum_NH, mean_N, rstd_N = launch_forward(as_rows(x), as_rows(residual), weight, bias, eps, centered)
        assert sum_NH is not None
        total = sum_NH.view(x.shape)
        ctx.save_for_backward(total, weight, bias, mean_N, rstd_N)
        ctx.set_materialize_grads(False)
        return y_NH.view(x.shape), total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dsum: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:  # only the sum was used
            return dsum, dsum, None, None, None, None
        need_dx, need_dresidual, need_dw, need_db, *_ = ctx.needs_input_grad
        need = need_dx or need_dresidual, need_dw, need_db
        dx, dw, db = launch_backward(ctx.saved_tensors, dy, dsum, need)
        return dx, dx, dw, db, None, None
