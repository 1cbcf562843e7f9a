"""Calls of collectives on the process groups of a topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from autopar.profiling.load import Call

Groups = Mapping[tuple[int, int], Any]


def make_groups(shapes: tuple[tuple[int, int], ...]) -> Groups:
    """Return this rank's process group of each (size, stride). Every rank creates all groups in the same order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    groups: dict[tuple[int, int], Any] = {}
    for size, stride in shapes:
        for members in group_members(size, stride, world):
            group = dist.group.WORLD if size == world else dist.new_group(members)
            if rank in members:
                groups[size, stride] = group
    return groups


def group_members(size: int, stride: int, world: int) -> list[list[int]]:
    """Return the ranks of every group: base + i * stride, i < size."""
    bases = [rank for rank in range(world) if rank % (size * stride) < stride]
    return [[base + i * stride for i in range(size)] for base in bases]


def collective(sizes: Mapping[str, Any], groups: Groups, device: torch.device, is_started: bool = False) -> Call:
    """Return a call that moves num_bytes of fp32, as cost_models.collective counts them.

    is_started: an all_gather or reduce_scatter returns a handle right after its start.
    """
    group, size, kind = groups[sizes["group_size"], sizes["stride"]], sizes["group_size"], sizes["kind"]
    # torch 2.13 deprecates the *_tensor names for *_single, which 2.11 lacks.
    library: Any = dist
    all_gather = getattr(library, "all_gather_single", None) or library.all_gather_into_tensor
    reduce_scatter = getattr(library, "reduce_scatter_single", None) or library.reduce_scatter_tensor
    part = torch.ones(max(sizes["num_bytes"] // 4 // size, 1), device=device)
    full, other = (torch.zeros(part.numel() * size, device=device) for _ in range(2))
    if kind == "all_reduce":
        return lambda: dist.all_reduce(full, group=group)
    if kind == "all_gather":
        return lambda: all_gather(full, part, group=group, async_op=is_started)
    if kind == "reduce_scatter":
        return lambda: reduce_scatter(part, full, group=group, async_op=is_started)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, full, group=group)
    place = dist.get_rank(group)
    after, before = (dist.get_global_rank(group, (place + hop) % size) for hop in (1, -1))

    def send_on() -> None:
        # NCCL needs one batch for sends and receives that wait for one another.
        send = dist.P2POp(dist.isend, full, after, group=group)
        receive = dist.P2POp(dist.irecv, other, before, group=group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return send_on
