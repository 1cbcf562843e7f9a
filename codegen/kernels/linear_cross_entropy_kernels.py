"""The steps of linear_cross_entropy.py on a chunk of logits, by a kernel or, elsewhere, in torch operations.

Formulas there. Shapes: C rows of a chunk, V columns, which are the entries of the vocabulary from `first_class` on.
Arithmetic is fp32 (fp64 for fp64 on the torch path). The tile decides in which order a row's exponentials are summed.
"""

from __future__ import annotations

import torch

from .cross_entropy import BACKWARD_TILES as ELEMENT_TILES
from .cross_entropy import FORWARD_TILES as STATISTICS_TILES
from .dispatch import jit, launch_device, tl, use_triton
from .online_softmax import row_statistics
from .tile import Tile
from .tuning import launch


@jit
def _statistics_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    stats_ptr: tl.tensor,
    num_classes: tl.tensor,
    row_stride: tl.tensor,
    stats_stride: tl.tensor,
    first_class: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """(maximum, sum of exp(logits - maximum), the target's logit or 0) of one row, to stats `[3, C]`."""
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    row_max, row_sum = row_statistics(logits_row, num_classes, BLOCK)
    column = tl.load(target_ptr + row) - first_class
    is_local = (column >= 0) & (column < num_classes)
    x_target = tl.load(logits_row + column, mask=is_local, other=0.0).to(tl.float32)
    tl.store(stats_ptr + row, row_max)
    tl.store(stats_ptr + stats_stride + row, row_sum)
    tl.store(stats_ptr + 2 * stats_stride + row, x_target)


@jit
def _gradient_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    max_ptr: tl.tensor,
    logsum_ptr: tl.tensor,
    num_classes: tl.tensor,
    blocks_per_row: tl.tensor,
    row_stride: tl.tensor,
    first_class: tl.tensor,
    all_classes: tl.tensor,
    ignore_index: tl.tensor,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """dlogits, times UNIT, in the place of the logits: a program reads and writes the same elements."""
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < num_classes
    target = tl.load(target_ptr + row)
    row_max = tl.load(max_ptr + row)
    logsum = tl.load(logsum_ptr + row)
    pointers = logits_ptr + row * row_stride + cols
    x = tl.load(pointers, mask=ok, other=float("-inf")).to(tl.float32)
    gradient = tl.exp(x - row_max - logsum) - tl.where(cols + first_class == target, 1.0, 0.0)
    gradient = tl.where((target >= 0) & (target < all_classes), gradient, float("nan"))
    # Selected, not multiplied by 0: an ignored row's logits may be nan.
    gradient = tl.where(target == ignore_index, 0.0, gradient * UNIT)
    tl.store(pointers, gradient.to(logits_ptr.dtype.element_ty), mask=ok)


@jit
def _scale_kernel(
    in_ptr: tl.tensor, scale_ptr: tl.tensor, out_ptr: tl.tensor, num_elements: tl.tensor, BLOCK: tl.constexpr
) -> None:
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = index < num_elements
    value = tl.load(in_ptr + index, mask=ok, other=0.0).to(tl.float32) * tl.load(scale_ptr)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=ok)


def statistics(logits_CV: torch.Tensor, target_C: torch.Tensor, first_class: int, stats_3C: torch.Tensor) -> None:
    """Fills stats with what `_statistics_kernel` says, of the columns that start with entry `first_class`."""
    num_rows, num_classes = logits_CV.shape
    if use_triton(logits_CV):

        def run(tile: Tile) -> None:
            _, block, _, warps = tile.fit(num_classes)
            _statistics_kernel[(num_rows,)](
                logits_CV,
                target_C,
                stats_3C,
                num_classes,
                logits_CV.stride(0),
                stats_3C.stride(0),
                first_class,
                BLOCK=block,
                num_warps=warps,
            )

        launch("linear_cross_entropy_statistics", STATISTICS_TILES, run, (num_rows, num_classes), logits_CV)
        return
    x = logits_CV.to(stats_3C.dtype)
    column = target_C - first_class
    is_local = (column >= 0) & (column < num_classes)
    largest = x.amax(1)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    stats_3C[0] = largest
    stats_3C[1] = (x - shift[:, None]).exp_().sum(1)
    stats_3C[2] = x.gather(1, column.clamp(0, num_classes - 1)[:, None])[:, 0].masked_fill(~is_local, 0.0)


def to_gradient(
    logits_CV: torch.Tensor,
    target_C: torch.Tensor,
    max_C: torch.Tensor,
    logsum_C: torch.Tensor,
    first_class: int,
    all_classes: int,
    ignore_index: int,
    unit: float,
    tile: Tile,
) -> None:
    """Overwrites the logits with dlogits times `unit`."""
    num_rows, num_classes = logits_CV.shape
    if use_triton(logits_CV):
        _, block, _, warps = tile.fit(num_classes)
        blocks_per_row = -(-num_classes // block)
        with launch_device(logits_CV):
            _gradient_kernel[(num_rows * blocks_per_row,)](
                logits_CV,
                target_C,
                max_C,
                logsum_C,
                num_classes,
                blocks_per_row,
                logits_CV.stride(0),
                first_class,
                all_classes,
                ignore_index,
                UNIT=unit,
                BLOCK=block,
                num_warps=warps,
            )
        return
    column = target_C - first_class
    is_local = (column >= 0) & (column < num_classes)
    gradient = ((logits_CV.to(max_C.dtype) - max_C[:, None]) - logsum_C[:, None]).exp_()
    at_target = -is_local.to(gradient.dtype)
    gradient.scatter_add_(1, column.clamp(0, num_classes - 1)[:, None], at_target[:, None])
    gradient.masked_fill_(((target_C < 0) | (target_C >= all_classes))[:, None], torch.nan)
    logits_CV.copy_(gradient.mul_(unit).masked_fill_((target_C == ignore_index)[:, None], 0.0))


def scaled(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor * scale` in `dtype`, multiplied in fp32: torch would first round a 0-dim scale to the tensor's dtype."""
    if not use_triton(tensor, scale):
        return (tensor.to(scale.dtype) * scale).to(dtype)

    def run(tile: Tile) -> torch.Tensor:
        _, block, _, warps = tile.fit(tensor.numel())
        out = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        _scale_kernel[(-(-tensor.numel() // block),)](tensor, scale, out, tensor.numel(), BLOCK=block, num_warps=warps)
        return out

    half = dtype.itemsize == 2
    return launch("linear_cross_entropy_scale", ELEMENT_TILES, run, (tensor.numel(),), tensor, half=half)
