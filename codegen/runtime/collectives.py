"""Flat collectives on a process group, under names that torch 2.11 to 2.13 have in common.

torch 2.13 deprecates `all_gather_into_tensor` and `reduce_scatter_tensor` for `*_single`, which 2.11 lacks.
Every function takes contiguous tensors and returns a work handle with `async_op=True`, else None.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Group = Any
"""A `torch.distributed.ProcessGroup`, or None for an axis of one rank."""


class Work(Protocol):
    """A collective under way. `wait` blocks the caller (gloo) or the current stream (NCCL)."""

    def wait(self) -> Any: ...


_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_MOVED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8})
"""Dtypes that every backend moves as they are."""


def as_sent(x: Tensor) -> Tensor:
    """The bytes of x, flat (gloo compares shapes), in a dtype that every backend moves (gloo: not bool, fp8, int16)."""
    flat = x.view(-1)
    return flat if x.dtype in _MOVED else flat.view(torch.uint8)


def all_gather(output: Tensor, part: Tensor, group: Group, async_op: bool = False) -> Work | None:
    """output [n, *part] (any shape of n times the elements): every rank's `part`, in rank order."""
    work: Work | None = _all_gather(as_sent(output), as_sent(part), group=group, async_op=async_op)
    return work


def reduce_scatter(output: Tensor, parts: Tensor, group: Group, async_op: bool = False) -> Work | None:
    """output [*part]: the sum over ranks of their `parts[rank]`, with parts [n, *part] (any shape)."""
    work: Work | None = _reduce_scatter(output.view(-1), parts.view(-1), group=group, async_op=async_op)
    return work


def all_reduce(x: Tensor, group: Group, async_op: bool = False, largest: bool = False) -> Work | None:
    """Sum (or maximum) over the ranks, in place."""
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    work: Work | None = dist.all_reduce(x, op=op, group=group, async_op=async_op)
    return work


def broadcast(x: Tensor, source: int, group: Group) -> Work | None:
    """Starts to fill x with what rank `source` of the group has there."""
    work: Work | None = dist.broadcast(as_sent(x), group=group, async_op=True, group_src=source)
    return work


def all_to_all(output: Tensor, parts: Tensor, group: Group, async_op: bool = False) -> Work | None:
    """output[i] is what rank i has in its `parts[this rank]`; both [n, *part]."""
    work: Work | None = dist.all_to_all_single(as_sent(output), as_sent(parts), group=group, async_op=async_op)
    return work


def all_to_all_rows(output: Tensor, rows: Tensor, received: list[int], sent: list[int], group: Group) -> None:
    """output [sum(received), ...] is, in rank order, the runs of rows [sum(sent), ...] that each rank has for this one:
    sent[i] are for rank i, received[i] come from it."""
    width = rows.shape[1:].numel()
    arriving, leaving = ([count * width for count in counts] for counts in (received, sent))
    dist.all_to_all_single(as_sent(output), as_sent(rows), arriving, leaving, group=group)


def pass_on(output: Tensor, part: Tensor, rank: int, group: Group, hops: int = 1) -> list[Work]:
    """Starts to send `part` to the rank so many after `rank` of the group, and to receive that of the one as far before
    it."""
    size = dist.get_world_size(group)
    sends = dist.P2POp(dist.isend, as_sent(part), group=group, group_peer=(rank + hops) % size)
    receives = dist.P2POp(dist.irecv, as_sent(output), group=group, group_peer=(rank - hops) % size)
    return list(dist.batch_isend_irecv([sends, receives]))
