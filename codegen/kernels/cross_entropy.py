"""Cross entropy per token, without an fp32 copy of the logits and without storing probabilities.

Formula, per row:

    max_N    = max_V(logits_NV)
    logsum_N = log(sum_V(exp(logits_NV - max_N)))
    loss_N   = logsum_N - (logits_N[target_N] - max_N)                          0 where target_N == ignore_index
    dlogits  = (exp(logits_NV - max_N - logsum_N) - onehot_NV) * dloss_N        0 where target_N == ignore_index

max and logsum come from one pass over V in blocks (online_softmax.py). They stay two numbers: their sum would round
away the digits of logsum when logits are large (at 10^4, fp32 resolves 10^-3).

Shapes: N tokens, V vocabulary. Arithmetic is fp32; the forward pass saves max and logsum (fp32, `[N]`) and the logits.
The tile decides in which order logsum is summed.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from .dispatch import as_rows, jit, tl, use_triton
from .online_softmax import row_statistics
from .tile import Tile
from .tuning import launch

FORWARD_TILES: Final = (
    Tile(8192),
    Tile(8192, per_warp=256),
    Tile(8192, per_warp=1024),
    Tile(16384),
    Tile(4096),
    Tile(4096, per_warp=256),
)
BACKWARD_TILES: Final = (Tile(8192), Tile(8192, per_warp=256), Tile(4096), Tile(2048), Tile(1024))


def cross_entropy_reference(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """The formula in torch operations; raises torch's own error for targets outside `[0, V)` on CPU."""
    logits_compute = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits_compute, target, ignore_index=ignore_index, reduction="none")


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Negative log-likelihood of each target; differentiable once in logits.

    No reduction: a mean over this rank's tokens would be wrong under uneven tokens, so the caller sums and divides by
    the global token count.

    Args:
        logits: `[N, V]`, any strides, finite or -inf.
        target: `[N]` int64 in `[0, V)` or equal to `ignore_index`. Outside that, the reference raises `IndexError`
            on CPU; the kernel cannot raise without a device synchronization and gives nan loss and gradients.
        ignore_index: targets of this value have loss 0 and gradient 0.

    Returns:
        Losses `[N]`, fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: shapes are not `[N, V]` and `[N]`, or target is not int64.
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            "logits must be [N, V] and target [N] int64; "
            f"got {tuple(logits.shape)} and {tuple(target.shape)} {target.dtype}"
        )
    if not use_triton(logits) or target.device != logits.device:
        return cross_entropy_reference(logits, target, ignore_index)
    loss: torch.Tensor = _CrossEntropy.apply(logits, target, ignore_index)  # type: ignore[no-untyped-call]
    return loss


@jit
def _forward_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    loss_ptr: tl.tensor,
    max_ptr: tl.tensor,
    logsum_ptr: tl.tensor,
    num_classes: tl.tensor,
    row_stride: tl.tensor,
    ignore_index: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    target = tl.load(target_ptr + row)
    row_max, row_sum = row_statistics(logits_row, num_classes, BLOCK)
    logsum = tl.log(row_sum)
    # The mask keeps a wrong target from reading outside the row; it becomes a nan loss instead.
    in_range = (target >= 0) & (target < num_classes)
    x_target = tl.load(logits_row + target, mask=in_range, other=0.0).to(tl.float32)
    loss = tl.where(in_range, logsum - (x_target - row_max), float("nan"))
    tl.store(loss_ptr + row, tl.where(target == ignore_index, 0.0, loss))
    tl.store(max_ptr + row, row_max)
    tl.store(logsum_ptr + row, logsum)


@jit
def _backward_kernel(
    logits_ptr: tl.tensor,
    target_ptr: tl.tensor,
    max_ptr: tl.tensor,
    logsum_ptr: tl.tensor,
    dloss_ptr: tl.tensor,
    dlogits_ptr: tl.tensor,
    num_classes: tl.tensor,
    blocks_per_row: tl.tensor,
    row_stride: tl.tensor,
    dloss_stride: tl.tensor,
    ignore_index: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    row = (program // blocks_per_row).to(tl.int64)
    cols = (program % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    ok = cols < num_classes
    target = tl.load(target_ptr + row)
    row_max = tl.load(max_ptr + row)
    logsum = tl.load(logsum_ptr + row)
    dloss = tl.load(dloss_ptr + row * dloss_stride).to(tl.float32)
    dloss = tl.where((target >= 0) & (target < num_classes), dloss, float("nan"))
    x = tl.load(logits_ptr + row * row_stride + cols, mask=ok, other=float("-inf")).to(tl.float32)
    dlogits = (tl.exp(x - row_max - logsum) - tl.where(cols == target, 1.0, 0.0)) * dloss
    # Selected, not multiplied by 0: an ignored row may hold nan (padding).
    dlogits = tl.where(target == ignore_index, 0.0, dlogits)
    tl.store(dlogits_ptr + row * num_classes + cols, dlogits.to(dlogits_ptr.dtype.element_ty), mask=ok)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
        # Logits with a strided last dim are copied (see as_rows); a sliced sequence or vocabulary is read in place.
        logits_NV, target_N = as_rows(logits), target.contiguous()
        num_rows, num_classes = logits_NV.shape

        def run(tile: Tile) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            _, block, _, warps = tile.fit(num_classes)
            loss_N = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
            max_N, logsum_N = torch.empty_like(loss_N), torch.empty_like(loss_N)
            _forward_kernel[(num_rows,)](
                logits_NV,
                target_N,
                loss_N,
                max_N,
                logsum_N,
                num_classes,
                logits_NV.stride(0),
                ignore_index,
                BLOCK=block,
                num_warps=warps,
            )
            return loss_N, max_N, logsum_N

        loss_N, max_N, logsum_N = launch(
            "cross_entropy_forward", FORWARD_TILES, run, (num_rows, num_classes), logits_NV
        )
        ctx.save_for_backward(logits, target_N, max_N, logsum_N)
        ctx.ignore_index = ignore_index
        return loss_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss_N: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, target_N, max_N, logsum_N = ctx.saved_tensors
        logits_NV = as_rows(logits)
        num_rows, num_classes = logits_NV.shape

        def run(tile: Tile) -> torch.Tensor:
            _, block, _, warps = tile.fit(num_classes)
            blocks_per_row = -(-num_classes // block)
            dlogits = torch.empty((num_rows, num_classes), dtype=logits.dtype, device=logits.device)
            _backward_kernel[(num_rows * blocks_per_row,)](
                logits_NV,
                target_N,
                max_N,
                logsum_N,
                dloss_N,
                dlogits,
                num_classes,
                blocks_per_row,
                logits_NV.stride(0),
                dloss_N.stride(0),
                ctx.ignore_index,
                BLOCK=block,
                num_warps=warps,
            )
            return dlogits

        dlogits = launch("cross_entropy_backward", BACKWARD_TILES, run, (num_rows, num_classes), logits_NV)
        return dlogits, None, None
