"""Simulate ranks without processes: shard tensors by placement, run every rank's call here, assemble the results.

This is independent of the runtime's shard and reshard code, so that a proof does not rest on the code it proves.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.ir.mesh import AXIS_NAMES, Mesh
from autopar.ir.placement import P, Placement, Placements, R, Rp

Coordinate = tuple[int, ...]
Sizes = tuple[int, ...]
SIMULATED_AXES = ("dp", "tp", "cp", "ep", "ttp", "ddp")


def conjugate(placement: Placement) -> Placement:
    """Return the placement of a value's gradient, see placement.py."""
    return {R: R, Rp: P, P: R}.get(placement, placement)


def coordinates(axis_sizes: Sizes) -> list[Coordinate]:
    """List every rank, last axis fastest."""
    return list(itertools.product(*(range(n) for n in axis_sizes)))


def cut(tensor: Tensor, placements: Placements, axis_sizes: Sizes, coordinate: Coordinate) -> Tensor:
    """Return the rank's slice. On one dim, shards with more sections are cut first; equal ones in mesh order."""
    shards = [axis for axis, place in enumerate(placements) if place.is_shard]
    for axis in sorted(shards, key=lambda axis: (-placements[axis].sections, axis)):
        place, shape = placements[axis], tensor.shape
        grid = (*shape[: place.dim], place.sections, axis_sizes[axis], -1, *shape[place.dim + 1 :])
        section = tensor.reshape(grid).select(place.dim + 1, coordinate[axis])
        tensor = section.reshape(*shape[: place.dim], -1, *shape[place.dim + 1 :])
    return tensor.contiguous()


def distribute(
    tensor: Tensor, placements: Placements, axis_sizes: Sizes, generator: torch.Generator
) -> dict[Coordinate, Tensor]:
    """Return every rank's part: slices for S, copies for R and Rp, random summands for P."""
    partial = [axis for axis, place in enumerate(placements) if place == P]
    ways = coordinates(tuple(axis_sizes[axis] for axis in partial))
    summands = dict(zip(ways, _summands(tensor, len(ways), generator), strict=True))
    return {
        rank: cut(summands[tuple(rank[axis] for axis in partial)], placements, axis_sizes, rank)
        for rank in coordinates(axis_sizes)
    }


def _summands(tensor: Tensor, count: int, generator: torch.Generator) -> list[Tensor]:
    if count == 1:
        return [tensor]
    if tensor.dtype == torch.bool:
        raise ValueError("a bool tensor cannot be a sum")
    if tensor.dtype.is_floating_point:
        parts = [torch.randn(tensor.shape, generator=generator).to(tensor) for _ in range(count - 1)]
    else:
        parts = [torch.randint(-9, 9, tensor.shape, generator=generator).to(tensor) for _ in range(count - 1)]
    return [*parts, tensor - sum(parts)]


@lru_cache(maxsize=1024)
def _positions(shape: tuple[int, ...], placements: Placements, axis_sizes: Sizes, rank: Coordinate) -> Tensor:
    """Return the index in the whole of every element of a rank's part."""
    return cut(torch.arange(math.prod(shape)).reshape(shape), placements, axis_sizes, rank)


def assembled(
    parts: dict[Coordinate, Tensor], placements: Placements, axis_sizes: Sizes, shape: tuple[int, ...]
) -> list[Tensor]:
    """Assemble the whole value for each group of ranks that should have all of it: join slices, add summands.

    Return one tensor for each coordinate on the replicated axes; in a correct result all of them equal the value.
    Raises ValueError if a part has the wrong shape.
    """
    replicated = [axis for axis, place in enumerate(placements) if place.is_replicated]
    totals: dict[Coordinate, Tensor] = {}
    for rank, part in parts.items():
        positions = _positions(shape, placements, axis_sizes, rank)
        if positions.shape != part.shape:
            raise ValueError(f"local shape {tuple(part.shape)}, expected {tuple(positions.shape)}")
        key = tuple(rank[axis] for axis in replicated)
        # bool has no sum; int64 keeps a wrong partial sum of bools visible.
        dtype = torch.int64 if part.dtype == torch.bool else part.dtype
        total = totals.setdefault(key, torch.zeros(math.prod(shape), dtype=dtype))
        total.index_add_(0, positions.flatten(), part.detach().to(dtype).flatten())
    return [total.reshape(shape) for total in totals.values()]


@dataclass(slots=True)
class _Board:
    """The ranks of one group exchange a tensor here. A rank that fails breaks the barrier for all."""

    size: int
    barrier: threading.Barrier
    slots: list[Tensor | None]

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.slots[rank] = tensor.detach().clone()
        self.barrier.wait(timeout=60)
        tensors = [slot for slot in self.slots if slot is not None]
        self.barrier.wait(timeout=60)
        return tensors


_Boards = dict[tuple[tuple[int, ...], Coordinate], _Board]
"""Boards by the indices of a group's axes, and its coordinate on the others."""


def _board(boards: _Boards, axes: tuple[int, ...], outside: Coordinate, size: int) -> _Board:
    """Return the group's board; its first rank creates it (setdefault is atomic)."""
    key = axes, outside
    return boards.get(key) or boards.setdefault(key, _Board(size, threading.Barrier(size), [None] * size))


@dataclass(frozen=True, slots=True)
class Arrived:
    """A tensor that is already available."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True, slots=True)
class SimulatedAxis:
    """The part of the runtime's Axis that lowerings use."""

    name: str
    size: int
    rank: int
    board: _Board
    group: None = None

    def sum_over(self, x: Tensor, wait: bool = True) -> Tensor:
        """Return the sum over the axis' ranks; no gradient. It is complete on return, with or without wait."""
        return torch.stack(self.board.exchange(self.rank, x)).sum(0)

    def max_over(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the axis' ranks; no gradient."""
        return torch.stack(self.board.exchange(self.rank, x)).amax(0)

    def gather_parts(self, part: Tensor) -> Tensor:
        """[*part] -> [n, *part]: every rank's part; no gradient."""
        return torch.stack(self.board.exchange(self.rank, part))

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """[n, *part] -> [*part]: the sum over ranks of their parts[this rank]; no gradient."""
        return torch.stack(self.board.exchange(self.rank, parts))[:, self.rank].sum(0)

    def exchange_parts(self, parts: Tensor) -> Tensor:
        """[n, *part] -> [n, *part]: result[i] is rank i's parts[this rank]; no gradient."""
        return torch.stack(self.board.exchange(self.rank, parts))[:, self.rank]

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """[sum(sent), ...] -> [sum(received), ...]: from rank after rank, its rows for this one; no gradient."""
        ends = self.board.exchange(self.rank, torch.tensor(sent).cumsum(0))
        parts = self.board.exchange(self.rank, rows)
        arrived = [
            part[end[self.rank] - count : end[self.rank]]
            for part, end, count in zip(parts, ends, received, strict=True)
        ]
        return torch.cat(arrived)

    def pass_on(self, part: Tensor, hops: int = 1) -> Arrived:
        """Return what the rank `hops` before this one passes on; no gradient."""
        return Arrived(self.board.exchange(self.rank, part)[(self.rank - hops) % self.size])


@dataclass(frozen=True, slots=True)
class SimulatedMesh:
    """One rank's mesh: axes by name (`mesh.dp`) and by index."""

    axes: tuple[SimulatedAxis, ...]
    rank: int
    world_size: int
    boards: _Boards
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def joint(self, names: tuple[str, ...]) -> SimulatedAxis:
        """Return the named axes as one axis, the last one fastest."""
        joined = [number for number, axis in enumerate(self.axes) if axis.name in names]
        if len(joined) == 1:
            return self.axes[joined[0]]
        size, rank = 1, 0
        for number in joined:
            size, rank = size * self.axes[number].size, rank * self.axes[number].size + self.axes[number].rank
        outside = tuple(axis.rank for number, axis in enumerate(self.axes) if number not in joined)
        return SimulatedAxis("+".join(names), size, rank, _board(self.boards, tuple(joined), outside, size))

    def __getattr__(self, name: str) -> SimulatedAxis:
        for axis in object.__getattribute__(self, "axes"):
            if axis.name == name:
                return axis  # type: ignore[no-any-return]
        if name in AXIS_NAMES:
            return SimulatedAxis(name, 1, 0, _Board(1, threading.Barrier(1), [None]))
        raise AttributeError(name)


def simulated_mesh(axis_sizes: Sizes) -> Mesh:
    """Return the mesh that a program of the simulated ranks is lowered for."""
    return Mesh(SIMULATED_AXES[: len(axis_sizes)], axis_sizes)


def meshes(axis_sizes: Sizes) -> dict[Coordinate, SimulatedMesh]:
    """Return one mesh per rank; ranks share boards along each axis."""
    boards: _Boards = {}
    ranks = coordinates(axis_sizes)
    mesh_of = {}
    for number, rank in enumerate(ranks):
        axes = []
        for axis, size in enumerate(axis_sizes):
            board = _board(boards, (axis,), rank[:axis] + rank[axis + 1 :], size)
            axes.append(SimulatedAxis(SIMULATED_AXES[axis], size, rank[axis], board))
        mesh_of[rank] = SimulatedMesh(tuple(axes), number, len(ranks), boards)
    return mesh_of


def run_ranks(ranks: Sequence[Coordinate], work: Callable[[Coordinate], Any], together: bool) -> dict[Coordinate, Any]:
    """Run `work` for every rank: one by one, or as threads if they communicate. The first error is raised."""
    if not together:
        return {rank: work(rank) for rank in ranks}
    results: dict[Coordinate, Any] = {}
    errors: list[Exception] = []

    def run(rank: Coordinate) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 - raised by the caller below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results
