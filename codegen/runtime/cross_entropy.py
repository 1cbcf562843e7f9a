"""Cross-entropy over a vocabulary that may be sharded, as a sum over tokens divided by a given count.

Shapes: N tokens of this rank, V vocabulary entries of this rank, W = V * axis size the whole vocabulary.
With x the logits of a token, t its target and s the label smoothing (as torch.nn.CrossEntropyLoss defines it):

    loss     = lse(x) - (1 - s) x_t - s / W sum_j x_j
    dloss/dx = softmax(x)_j - (1 - s) [j = t] - s / W
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

if TYPE_CHECKING:
    from .layout import AxisLike

# Float32 temporaries hold this many elements on CPU and GPU: rows are worked on in chunks, so that N x V temporaries
# never exist beside the logits and their gradient.
_ELEMENTS_PER_CHUNK_CPU = 1 << 18
_ELEMENTS_PER_CHUNK_GPU = 1 << 26


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    num_targets: Tensor | float,
    ignore_index: int = -100,
    vocab_axis: AxisLike | None = None,
    label_smoothing: float = 0.0,
    own_classes: int | None = None,
) -> Tensor:
    """The loss of this rank's tokens: sum over targets that are not ignored, divided by `num_targets`.

    Args:
        logits: [N, V], this rank's slice of the vocabulary if `vocab_axis` is given; any floating dtype.
        target: int64 [N], global class numbers, equal on all ranks of `vocab_axis`.
        num_targets: the divisor, usually the valid targets of all ranks and the whole (micro-)batch: a 0-dim tensor or
            a number; need not be whole. Where it is 0 the loss is nan and its gradient 0, as of torch's mean.
        ignore_index: tokens with this target have no loss and no gradient.
        vocab_axis: the axis over which dim 1 of the logits is sharded in equal consecutive parts.
        own_classes: how many of the first classes a target may name, what follows being padding; all by default.

    Returns a 0-dim tensor, float32 for half precision logits, else their dtype; equal on all ranks of `vocab_axis`, of
    which each gets the gradient of its own logits. Saves for backward the logits, lse [N] and the target, no softmax.
    Not differentiable twice. Raises IndexError for targets outside the vocabulary on CPU (not on a GPU).
    """
    if logits.dim() != 2 or target.shape != logits.shape[:1]:
        raise ValueError(f"logits [N, V] and target [N] expected, got {tuple(logits.shape)}, {tuple(target.shape)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be between 0 and 1, got {label_smoothing}")
    if vocab_axis is not None and vocab_axis.size == 1:
        vocab_axis = None
    num_classes = own_classes or logits.shape[1] * (1 if vocab_axis is None else vocab_axis.size)
    if target.device.type == "cpu":
        wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
        if bool(wrong.any()):
            raise IndexError(f"target {int(target[wrong][0])} is not one of the {num_classes} classes")
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if isinstance(num_targets, Tensor):
        divisor = num_targets.detach().to(logits.device, dtype)
    else:  # made on the device: a copy from the host would wait for it
        divisor = torch.full((), num_targets, dtype=dtype, device=logits.device)
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target, 1 / divisor, ignore_index, vocab_axis, label_smoothing
    )
    return loss


def count_valid(target: Tensor, ignore_index: int = -100) -> Tensor:
    """Return how many of this rank's targets count: a 0-dim int64 tensor."""
    return (target != ignore_index).sum()


def _chunks(logits: Tensor) -> list[slice]:
    """Slices of rows of `logits` [N, V] with at most _ELEMENTS_PER_CHUNK_* elements (at least one row); all rows of a
    tensor without memory."""
    if logits.is_meta:
        return [slice(0, logits.shape[0])]
    limit = _ELEMENTS_PER_CHUNK_CPU if logits.device.type == "cpu" else _ELEMENTS_PER_CHUNK_GPU
    height = max(1, limit // max(1, logits.shape[1]))
    return [slice(top, top + height) for top in range(0, logits.shape[0], height)]


def _held_targets(target: Tensor, num_held: int, axis: AxisLike | None) -> tuple[Tensor, Tensor]:
    """(column of each token's target among this rank's `num_held`, clamped; whether it is one of them)."""
    column = target if axis is None else target - axis.rank * num_held
    is_local = (column >= 0) & (column < num_held)
    return column.clamp(0, num_held - 1), is_local


class _CrossEntropy(torch.autograd.Function):
    """(logits, target, weight) -> weight * sum of losses; see the head of this file."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: Tensor,
        target: Tensor,
        weight: Tensor,
        ignore_index: int,
        axis: AxisLike | None,
        smoothing: float,
    ) -> Tensor:
        dtype = weight.dtype
        column, is_local = _held_targets(target, logits.shape[1], axis)
        lse = torch.empty(logits.shape[0], dtype=dtype, device=logits.device)
        # Per token: (1 - s) x_t + s / W sum_j x_j, of this rank's columns; ranks add up.
        picked = logits.gather(1, column[:, None])[:, 0].to(dtype).mul_(1.0 - smoothing).masked_fill_(~is_local, 0.0)
        num_classes = logits.shape[1] * (1 if axis is None else axis.size)
        for rows in _chunks(logits):
            x = logits[rows].to(dtype)
            torch.logsumexp(x, 1, out=lse[rows])
            if smoothing:
                picked[rows] += x.sum(1).mul_(smoothing / num_classes)
        if axis is not None:
            lse, picked = _over_ranks(lse, picked, axis)
        valid = target != ignore_index
        ctx.save_for_backward(logits, target, lse, weight)
        ctx.options = (ignore_index, axis, smoothing)  # type: ignore[attr-defined]
        return (lse - picked).masked_fill_(~valid, 0.0).sum() * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, weight = ctx.saved_tensors  # type: ignore[attr-defined]
        ignore_index, axis, smoothing = ctx.options  # type: ignore[attr-defined]
        column, is_local = _held_targets(target, logits.shape[1], axis)
        num_classes = logits.shape[1] * (1 if axis is None else axis.size)
        per_token = (grad * weight).expand_as(lse).masked_fill(target == ignore_index, 0.0)
        at_target = per_token.mul(smoothing - 1.0).masked_fill_(~is_local, 0.0)
        out = torch.empty_like(logits)
        same_dtype = logits.dtype == lse.dtype
        for rows in _chunks(logits):
            # In place in the result where no cast is needed.
            g = out[rows] if same_dtype else torch.empty(logits[rows].shape, dtype=lse.dtype, device=lse.device)
            torch.sub(logits[rows], lse[rows, None], out=g).exp_()
            if smoothing:
                g.sub_(smoothing / num_classes)
            g.mul_(per_token[rows, None]).scatter_add_(1, column[rows, None], at_target[rows, None])
            if not same_dtype:
                out[rows] = g
        return out, None, None, None, None, None


def _over_ranks(lse: Tensor, picked: Tensor, axis: AxisLike) -> tuple[Tensor, Tensor]:
    """lse and picked logits of the whole vocabulary from each rank's own, stably: two collectives of N and 2 N."""
    largest = axis.max_over(lse)
    # A rank whose logits are all -inf contributes exp(-inf) = 0; if all ranks' are, the result is nan as in one piece.
    total = axis.sum_over(torch.stack([torch.exp(lse - largest), picked]))
    return largest + total[0].log(), total[1]
