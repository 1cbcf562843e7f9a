"""Sums of the rows of each token, which lie sorted by expert: put back, weighted and added up in one pass, both ways.

Formula, for rows_NB sorted by expert, with places_N for each choice the place of its row, k choices of each token in a
row, and order_N the choice at each place:

    y_TB        = sum_j round(rows[places[t k + j]] * weights[t k + j])         round: to y's dtype, as unfused calls do
    drows_NB    = dy[order // k] * weights[order]
    dweights_N  = sum_b(dy[n // k] * rows[places[n]])

Shapes: T tokens, N = T k rows, B features. Sums are fp32, over choices in their order, and rounded once. y has the
dtype to which rows and weights promote. Without weights y is the gradient of `tokens[order // k]`.

Unfused, rows are read and written three times forward and five times backward; here once each.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .dispatch import as_rows, jit, launch_device, power_of_2_at_least, tl, use_triton
from .tile import Tile

TILE: Final = Tile(2048)
"""Of columns of one row. All candidates give the same sums of rows, and dweights within fp32 rounding."""


def token_sums_reference(
    rows: torch.Tensor, places: torch.Tensor, choices: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """The formula in torch operations."""
    chosen = rows.index_select(0, places)
    chosen = chosen if weights is None else chosen * weights.view(-1, 1)
    return chosen.view(len(places) // choices, choices, rows.shape[1]).sum(1)


def token_sums(
    rows: torch.Tensor,
    places: torch.Tensor,
    order: torch.Tensor,
    choices: int,
    weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sums over the choices of each token; differentiable once in rows and weights.

    Args:
        rows: `[N, B]` sorted by expert, any strides.
        places: `[N]` int64, for each choice the place of its row.
        order: `[N]` int64, for each place its choice: the inverse of places.
        choices: k, which divides N.
        weights: `[N]` or `[N, 1]`, or None for 1.

    Returns:
        `[N / k, B]` of the dtype to which rows and weights promote, contiguous on the Triton path.

    Raises:
        ValueError: shapes do not agree.
    """
    if rows.dim() != 2 or len(rows) % choices or {len(places), len(order)} != {len(rows)}:
        raise ValueError(
            f"rows must be [N, B] with N a multiple of {choices}, places and order [N]; "
            f"got {tuple(rows.shape)}, {tuple(places.shape)}, {tuple(order.shape)}"
        )
    if weights is not None and weights.numel() != len(rows):
        raise ValueError(f"weights must have a number for each of {len(rows)} rows; got {tuple(weights.shape)}")
    if not use_triton(rows, weights):
        return token_sums_reference(rows, places, choices, weights)
    y: torch.Tensor = _TokenSums.apply(rows, weights, places, order, choices)  # type: ignore[no-untyped-call]
    return y


@jit
def _sum_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    places_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_cols: tl.tensor,
    num_choices: tl.tensor,
    rows_row_stride: tl.tensor,
    COLS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * COLS + tl.arange(0, COLS)
    ok = cols < num_cols
    total = tl.zeros([COLS], dtype=tl.float32)
    for choice in range(num_choices):
        row = token * num_choices + choice
        place = tl.load(places_ptr + row)
        part = tl.load(rows_ptr + place * rows_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
        if HAS_WEIGHTS:
            part = (part * tl.load(weights_ptr + row).to(tl.float32)).to(y_ptr.dtype.element_ty).to(tl.float32)
        total += part
    tl.store(y_ptr + token * num_cols + cols, total.to(y_ptr.dtype.element_ty), mask=ok)


@jit
def _row_gradient_kernel(
    dy_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    order_ptr: tl.tensor,
    drows_ptr: tl.tensor,
    dweights_ptr: tl.tensor,
    num_cols: tl.tensor,
    num_choices: tl.tensor,
    dy_row_stride: tl.tensor,
    rows_row_stride: tl.tensor,
    COLS: tl.constexpr,
    NEED_DROWS: tl.constexpr,
    NEED_DWEIGHTS: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(order_ptr + place)
    dy_start = dy_ptr + row // num_choices * dy_row_stride
    weight = tl.load(weights_ptr + row).to(tl.float32)
    products = tl.zeros([COLS], dtype=tl.float32)
    for start in range(0, num_cols, COLS):
        cols = start + tl.arange(0, COLS)
        ok = cols < num_cols
        dy = tl.load(dy_start + cols, mask=ok, other=0.0).to(tl.float32)
        if NEED_DROWS:
            drows = (dy * weight).to(drows_ptr.dtype.element_ty)
            tl.store(drows_ptr + place * num_cols + cols, drows, mask=ok)
        if NEED_DWEIGHTS:
            products += dy * tl.load(rows_ptr + place * rows_row_stride + cols, mask=ok, other=0.0).to(tl.float32)
    if NEED_DWEIGHTS:
        tl.store(dweights_ptr + row, tl.sum(products, axis=0).to(dweights_ptr.dtype.element_ty))


class _TokenSums(torch.autograd.Function):
    """Saves rows and weights, where it has weights, and the order."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        places: torch.Tensor,
        order: torch.Tensor,
        choices: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows if weights is not None else None, weights, order)
        ctx.choices = choices
        rows_NB, num_cols = as_rows(rows), rows.shape[1]
        dtype = rows.dtype if weights is None else torch.promote_types(rows.dtype, weights.dtype)
        y = torch.empty((len(rows) // choices, num_cols), dtype=dtype, device=rows.device)
        _, cols, _, warps = TILE.fit(num_cols)
        with launch_device(rows):
            _sum_kernel[(len(y), -(-num_cols // cols))](
                rows_NB,
                None if weights is None else weights.contiguous(),
                places,
                y,
                num_cols,
                choices,
                rows_NB.stride(0),
                COLS=cols,
                HAS_WEIGHTS=weights is not None,
                num_warps=warps,
            )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weights, order = ctx.saved_tensors
        if weights is None:
            return dy.index_select(0, order // ctx.choices), None, None, None, None
        need_drows, need_dweights, *_ = ctx.needs_input_grad
        dy_TB, rows_NB, num_cols = as_rows(dy), as_rows(rows), rows.shape[1]
        drows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) if need_drows else None
        dweights = torch.empty(weights.shape, dtype=weights.dtype, device=rows.device) if need_dweights else None
        cols = min(power_of_2_at_least(num_cols), TILE.most)
        with launch_device(rows):
            _row_gradient_kernel[(len(rows),)](
                dy_TB,
                rows_NB,
                weights.contiguous(),
                order,
                drows,
                dweights,
                num_cols,
                ctx.choices,
                dy_TB.stride(0),
                rows_NB.stride(0),
                COLS=cols,
                NEED_DROWS=need_drows,
                NEED_DWEIGHTS=need_dweights,
                num_warps=TILE.num_warps(cols),
            )
        return drows, dweights, None, None, None
