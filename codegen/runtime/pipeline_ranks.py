"""The processes of each pipeline rank (consecutive ones, the pipeline ranks in any order), and their meshes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .mesh import Mesh, timeout_of_all

Shape = tuple[tuple[str, ...], tuple[int, ...]]
"""Axis names and sizes."""


def tiled(num_ranks: Sequence[int], first_ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """The first process of each pipeline rank. num_ranks: of each; first_ranks: where they are not in the order of
    pipeline ranks.

    Raises ValueError unless the pipeline ranks own the processes from 0 on, each once.
    """
    if not first_ranks:
        return tuple(itertools.accumulate(num_ranks, initial=0))[:-1]
    if len(first_ranks) != len(num_ranks):
        raise ValueError(f"{len(first_ranks)} first ranks for {len(num_ranks)} pipeline ranks")
    end = 0
    for first, count, pipeline_rank in sorted(zip(first_ranks, num_ranks, range(len(num_ranks)), strict=True)):
        if first != end:
            raise ValueError(
                f"pipeline rank {pipeline_rank} begins at rank {first}, where the ranks before it end at {end}: first "
                f"ranks {tuple(first_ranks)} of meshes of {', '.join(map(str, num_ranks))} ranks leave a gap or overlap"
            )
        end = first + count
    return tuple(first_ranks)


def create_stage_mesh(
    shapes: Sequence[Shape],
    device: torch.device | str = "cpu",
    *,
    first_ranks: Sequence[int] | None = None,
    joints: Sequence[Collection[tuple[str, ...]]] = (),
    timeout: timedelta | None = None,
) -> Mesh:
    """The one of several meshes that this process belongs to; each is over consecutive processes.

    shapes: axes and sizes of each. first_ranks: where each begins, if not where the last ends. joints: for each, what
    `joint` may be asked for. timeout: of its collectives; that of the default process group if None. Every process must
    call it with equal arguments. Raises ValueError if the number of processes is another.
    """
    timeout, counts = timeout or timeout_of_all(), [math.prod(sizes) for _, sizes in shapes]
    meshes = [
        Mesh.over(axes, sizes, device, timeout=timeout, first_rank=first, joints=joints[index] if joints else ())
        for index, ((axes, sizes), first) in enumerate(zip(shapes, tiled(counts, first_ranks), strict=True))
    ]
    running = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    stage_mesh = next((mesh for mesh in meshes if mesh is not None), None)
    if stage_mesh is None or sum(counts) != running:
        raise ValueError(f"the meshes are over {sum(counts)} processes together, but {running} run")
    return stage_mesh
