"""AdamW over many tensors in one launch: fp32 master and state, and the copy that the model computes with.

Formula (Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization", algorithm 2, in the order of operations
of torch.optim.AdamW), for step t = 1, 2, ..., elementwise:

    g    = clip_factor * gradient
    p    = p * (1 - lr * weight_decay)
    m    = m + (1 - beta1) * (g - m)
    v    = v * beta2 + (1 - beta2) * g * g
    p    = p - lr / (1 - beta1 ** t) * (m / (sqrt(v) / sqrt(1 - beta2 ** t) + eps))
    copy = round(p)                                    to the copy's dtype

p, m, v and arithmetic are fp32, gradients fp32, bf16 or fp16. What depends on t and lr alone is computed in fp64 from
device scalars (1 - 0.999 ** 1 in fp32 has a relative error of 3e-5), so that no step waits for the device, and both
may change within a captured graph. Bytes moved per element: 24 for p, m and v, the gradient's size, the copy's size: 28
for a bf16 gradient and a bf16 copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from .chunk_table import CHUNK, ChunkTable, chunk_of, chunk_table, column_pointer, load_tile, store_tile
from .dispatch import jit, launch_device, tl
from .tile import Tile
from .tuning import choose

# A program holds the tiles of four columns at once: twice the warps of a single tile, so fewer registers each.
TILES: Final = (
    Tile(2048, per_warp=256),
    Tile(2048),
    Tile(1024, per_warp=256),
    Tile(4096, per_warp=256),
    Tile(4096),
)


@dataclass(frozen=True, slots=True, eq=False)
class AdamWTable:
    """The tensors that `adamw_` updates; made by `adamw_table`.

    Attributes:
        chunks: columns parameter, gradient, m, v and, where `has_copies`, copy.
        weight_decays_T: fp64, of the rows of `chunks`, on their device.
    """

    chunks: ChunkTable
    weight_decays_T: torch.Tensor
    has_copies: bool


def adamw_table(
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    copies: Sequence[torch.Tensor] | None = None,
    weight_decays: float | Sequence[float] = 0.01,
) -> AdamWTable:
    """The table of tensors that are updated together; uploaded once, so their memory must stay where it is.

    Args:
        parameters, exp_avgs, exp_avg_sqs: fp32 (fp64 on the reference path), contiguous.
        gradients: of one floating dtype.
        copies: receive the new parameters, of one floating dtype.
        weight_decays: one for all, or one for each parameter.

    Raises:
        ValueError: tensors do not fit together (see `chunk_table`), or parameters and state are not of one dtype.
    """
    decays = [weight_decays] * len(parameters) if isinstance(weight_decays, (int, float)) else list(weight_decays)
    if len(decays) != len(parameters):
        raise ValueError(f"{len(parameters)} parameters need as many weight decays, got {len(decays)}")
    state_dtypes = {tensor.dtype for column in (parameters, exp_avgs, exp_avg_sqs) for tensor in column}
    if state_dtypes - {torch.float32} and state_dtypes != {torch.float64}:
        raise ValueError(f"parameters and their state must be fp32, or all fp64, got {state_dtypes}")
    columns = [parameters, gradients, exp_avgs, exp_avg_sqs, *([] if copies is None else [copies])]
    chunks = chunk_table(*columns)
    kept = [decay for decay, parameter in zip(decays, parameters, strict=True) if parameter.numel()]
    device = parameters[0].device if parameters else None
    return AdamWTable(chunks, torch.tensor(kept, dtype=torch.float64, device=device), copies is not None)


def adamw_(
    table: AdamWTable,
    step: torch.Tensor,
    lr: float | torch.Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    clip_factor: torch.Tensor | None = None,
) -> None:
    """One step, in place: one launch for all tensors, and a few on scalars. Gradients are read, not changed.

    Args:
        step: 0-dim, the steps made so far, on the tensors' device; becomes one more.
        lr: a number, or a 0-dim tensor on that device.
        betas: in [0, 1).
        clip_factor: 0-dim, on that device; None: 1.
    """
    step.add_(1)
    if not table.chunks.columns[0]:
        return
    dtype = table.chunks.columns[0][0].dtype
    factors_3, decays_T = _factors(step, lr, betas, clip_factor, table.weight_decays_T, dtype)
    if not table.chunks.on_kernels:
        adamw_reference_(table, factors_3, decays_T, betas, eps)
        return
    parameter, gradient, *_ = table.chunks.bases

    def run_tile(tile: Tile) -> None:
        """Writes what is there already, so that a measurement needs no copies; the copy column is due anyway."""
        # Factors 0, 1, 0, made on the device: numbers of the host would be waited for, within what is timed.
        unchanged_3 = torch.eye(3, dtype=factors_3.dtype, device=factors_3.device)[1]
        _launch(table, tile, unchanged_3, torch.ones_like(decays_T), (1.0, 1.0), 1.0)

    with launch_device(parameter):
        shape, copies = (table.chunks.num_chunks, CHUNK), table.has_copies
        tile = choose("adamw", TILES, run_tile, shape, parameter, gradient, copies=copies)
        _launch(table, tile, factors_3, decays_T, betas, eps)


def _launch(
    table: AdamWTable,
    tile: Tile,
    factors_3: torch.Tensor,
    decays_T: torch.Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    parameter, gradient, exp_avg, exp_avg_sq, *copy = table.chunks.bases
    _, block, _, warps = tile.fit(CHUNK)
    _adamw_kernel[(table.chunks.num_chunks,)](
        parameter,
        gradient,
        exp_avg,
        exp_avg_sq,
        copy[0] if copy else None,
        table.chunks.offsets_TK,
        table.chunks.numels_T,
        table.chunks.chunks_P2,
        decays_T,
        factors_3,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        NUM_COLUMNS=len(table.chunks.columns),
        CHUNK=CHUNK,
        BLOCK=block,
        ALIGNED=table.chunks.is_aligned,
        HAS_COPY=table.has_copies,
        num_warps=warps,
    )


def adamw_reference_(
    table: AdamWTable, factors_3: torch.Tensor, decays_T: torch.Tensor, betas: tuple[float, float], eps: float
) -> None:
    """The formula in torch operations, tensor by tensor; factors and decays as `_factors` gives them."""
    step_size, correction_sqrt, clip = factors_3.unbind()
    for row, tensors in enumerate(zip(*table.chunks.columns, strict=True)):
        parameter, gradient, exp_avg, exp_avg_sq, *copy = tensors
        g = gradient.to(parameter.dtype) * clip
        parameter.mul_(decays_T[row])
        exp_avg.lerp_(g, 1 - betas[0])
        exp_avg_sq.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        parameter.sub_(step_size * (exp_avg / (exp_avg_sq.sqrt() / correction_sqrt + eps)))
        if copy:
            copy[0].copy_(parameter.view_as(copy[0]))


def _factors(
    step: torch.Tensor,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    clip_factor: torch.Tensor | None,
    weight_decays_T: torch.Tensor,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """((lr / (1 - beta1 ** t), sqrt(1 - beta2 ** t), clip factor), 1 - lr * weight decay `[T]`), rounded once."""
    t = step.double()
    # 1 - beta ** t = -expm1(t * log(beta)): no digits cancel. log(0) has no value; 1 - 0 ** t is 1.
    correction1, correction2 = (-torch.expm1(t * math.log(b)) if b else torch.ones_like(t) for b in betas)
    lr_double = lr.double() if isinstance(lr, torch.Tensor) else lr
    clip = torch.ones_like(t) if clip_factor is None else clip_factor.double()
    factors_3 = torch.stack([lr_double / correction1, correction2.sqrt(), clip])
    return factors_3.to(dtype), (1 - lr_double * weight_decays_T).to(dtype)


@jit
def _adamw_tile(
    parameter_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    copy_ptr: tl.tensor,
    start: tl.tensor,
    left: tl.tensor,
    decay: tl.tensor,
    factors_ptr: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    eps: tl.tensor,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_COPY: tl.constexpr,
) -> None:
    step_size = tl.load(factors_ptr)
    correction_sqrt = tl.load(factors_ptr + 1)
    clip = tl.load(factors_ptr + 2)
    index = start + tl.arange(0, BLOCK)
    gradient = load_tile(gradient_ptr + index, left, MASKED, BLOCK) * clip
    exp_avg = load_tile(exp_avg_ptr + index, left, MASKED, BLOCK)
    exp_avg_sq = load_tile(exp_avg_sq_ptr + index, left, MASKED, BLOCK)
    parameter = load_tile(parameter_ptr + index, left, MASKED, BLOCK) * decay
    exp_avg += one_minus_beta1 * (gradient - exp_avg)
    exp_avg_sq = exp_avg_sq * beta2 + one_minus_beta2 * gradient * gradient
    denominator = tl.div_rn(tl.sqrt_rn(exp_avg_sq), correction_sqrt) + eps
    parameter -= step_size * tl.div_rn(exp_avg, denominator)
    store_tile(exp_avg_ptr + index, exp_avg, left, MASKED, BLOCK)
    store_tile(exp_avg_sq_ptr + index, exp_avg_sq, left, MASKED, BLOCK)
    store_tile(parameter_ptr + index, parameter, left, MASKED, BLOCK)
    if HAS_COPY:
        store_tile(copy_ptr + index, parameter, left, MASKED, BLOCK)


@jit
def _adamw_kernel(
    parameter_ptr: tl.tensor,
    gradient_ptr: tl.tensor,
    exp_avg_ptr: tl.tensor,
    exp_avg_sq_ptr: tl.tensor,
    copy_ptr: tl.tensor,
    offsets_ptr: tl.tensor,
    numels_ptr: tl.tensor,
    chunks_ptr: tl.tensor,
    decays_ptr: tl.tensor,
    factors_ptr: tl.tensor,
    one_minus_beta1: tl.tensor,
    beta2: tl.tensor,
    one_minus_beta2: tl.tensor,
    eps: tl.tensor,
    NUM_COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_COPY: tl.constexpr,
) -> None:
    row, first, left = chunk_of(chunks_ptr, numels_ptr)
    parameter = column_pointer(parameter_ptr, offsets_ptr, row, first, 0, NUM_COLUMNS, ALIGNED)
    gradient = column_pointer(gradient_ptr, offsets_ptr, row, first, 1, NUM_COLUMNS, ALIGNED)
    exp_avg = column_pointer(exp_avg_ptr, offsets_ptr, row, first, 2, NUM_COLUMNS, ALIGNED)
    exp_avg_sq = column_pointer(exp_avg_sq_ptr, offsets_ptr, row, first, 3, NUM_COLUMNS, ALIGNED)
    copy = parameter
    if HAS_COPY:
        copy = column_pointer(copy_ptr, offsets_ptr, row, first, 4, NUM_COLUMNS, ALIGNED)
    decay = tl.load(decays_ptr + row)
    length = tl.minimum(left, CHUNK).to(tl.int32)
    whole = length // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        _adamw_tile(
            parameter, gradient, exp_avg, exp_avg_sq, copy, start, BLOCK, decay, factors_ptr,
            one_minus_beta1, beta2, one_minus_beta2, eps, False, BLOCK, HAS_COPY,
        )  # fmt: skip
    if whole < length:
        _adamw_tile(
            parameter, gradient, exp_avg, exp_avg_sq, copy, whole, length - whole, decay, factors_ptr,
            one_minus_beta1, beta2, one_minus_beta2, eps, True, BLOCK, HAS_COPY,
        )  # fmt: skip
