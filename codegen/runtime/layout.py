"""The place of a rank's part of a tensor in the whole: the global index of every local element.

Counter-based dropout needs it (`dropout.py`): a mask that is a function of the global index is the same for every
plan. Nothing here communicates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_SHARD = re.compile(r"S\((\d+)(?:/(\d+))?\)")


class AxisLike(Protocol):
    """The parts of a mesh axis that this package needs; `mesh.Axis` is the real one, tests simulate others."""

    @property
    def size(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def sum_over(self, x: Tensor) -> Tensor: ...

    def max_over(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Grid:
    """The indices of `Layout.index` as an outer sum: index = rows[:, None] + columns[None, :], both int64.

    `columns` is the part of the last dim; where that is odd, of as many trailing dims as make the rows even. `paired`
    says that this was possible: the columns come in pairs (2i, 2i + 1) and every row starts at an even index.
    """

    rows: Tensor
    columns: Tensor
    paired: bool


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False)
class Layout:
    """The shape of a whole tensor and the axes that shard it: `Layout((8, 16, 32), dp="S(0)", tp="S(2/3)")`.

    Axes are named in mesh order (major first), which is the order in which two axes split one dim; axes not named, and
    those given as "R" or "Rp", do not split. Raises ValueError for placements that are neither, for a dim that does
    not exist, and (on use, when the axis sizes are known) for a dim that does not divide.
    """

    global_shape: tuple[int, ...]
    shards: tuple[tuple[str, int, int], ...]  # (axis name, dim, sections), in mesh order
    _cache: dict[
        tuple[object, torch.device], Grid
    ]  # a layout's indices never change; only their device and rank differ

    def __init__(self, global_shape: tuple[int, ...], **axis: str) -> None:
        shape = tuple(int(size) for size in global_shape)
        shards = []
        for name, text in axis.items():
            if text in ("R", "Rp"):
                continue
            match = _SHARD.fullmatch(text)
            if match is None:
                raise ValueError(f"{name}={text!r} of a layout must be R, Rp, S(dim) or S(dim/sections)")
            dim, sections = int(match[1]), int(match[2] or 1)
            if dim >= len(shape) or sections < 1:
                raise ValueError(f"{name}={text!r} does not fit shape {shape}")
            shards.append((name, dim, sections))
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "shards", tuple(shards))
        object.__setattr__(self, "_cache", {})

    def __repr__(self) -> str:
        axes = "".join(f', {name}="S({dim}{f"/{k}" if k > 1 else ""})"' for name, dim, k in self.shards)
        return f"Layout({self.global_shape}{axes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and (self.global_shape, self.shards) == (other.global_shape, other.shards)

    def __hash__(self) -> int:
        return hash((self.global_shape, self.shards))

    def ranks(self, mesh: object) -> tuple[tuple[int, int], ...]:
        """(size, rank) of each sharding axis on this rank; `mesh` may be None if no axis shards."""
        axes: list[AxisLike] = [getattr(mesh, name) for name, _, _ in self.shards]
        return tuple((axis.size, axis.rank) for axis in axes)

    def local_shape(self, mesh: object) -> tuple[int, ...]:
        """The shape of this rank's part."""
        shape = list(self.global_shape)
        for (name, dim, _), (size, _) in zip(self.shards, self.ranks(mesh), strict=True):
            if shape[dim] % size:
                raise ValueError(f"axis {name} of {size} ranks does not divide dim {dim} of {self}")
            shape[dim] //= size
        return tuple(shape)

    def _splits(self, dim: int, mesh: object) -> list[tuple[int, int, int, int]]:
        """Return the cuts of `dim` that lead to this rank's part: (sections, axis size, rank, length of a piece).

        A dim of k sections is a grid (k, size / k) of which the axis splits the second factor. Several axes on one dim
        are taken from most to fewest sections (the finer grid is inside the coarser), then in mesh order.
        """
        on_dim = [
            (k, n, r) for (_, d, k), (n, r) in zip(self.shards, self.ranks(mesh), strict=True) if d == dim and n > 1
        ]
        splits = []
        left = self.global_shape[dim]
        for sections, size, rank in sorted(on_dim, key=lambda shard: -shard[0]):
            length, rest = divmod(left, sections * size)
            if rest:
                raise ValueError(f"{size} ranks with {sections} sections do not divide dim {dim} of {self}")
            splits.append((sections, size, rank, length))
            left //= size
        return splits

    def coordinates(self, dim: int, mesh: object, device: torch.device | str = "cpu") -> Tensor:
        """The global coordinates in `dim` of this rank's part: int64 [local size]."""
        coordinates = torch.arange(self.global_shape[dim], device=device)
        for sections, size, rank, length in self._splits(dim, mesh):
            coordinates = coordinates.view(sections, size, length)[:, rank].reshape(-1)
        return coordinates

    def grid(self, mesh: object, device: torch.device | str) -> Grid:
        """This rank's indices as an outer sum of leading and trailing dims. Cached per rank and device."""
        device = torch.device(device)
        if type(torch.empty(0, device=device)) is not Tensor:  # a dry run with fake tensors: none must stay behind
            return self._make_grid(mesh, device)
        cache_key = (self.ranks(mesh), device)
        if cache_key not in self._cache:
            self._cache[cache_key] = self._make_grid(mesh, device)
        return self._cache[cache_key]

    def _make_grid(self, mesh: object, device: torch.device) -> Grid:
        paired_from = self._paired_from(mesh)
        last = max(len(self.global_shape) - 1, 0)
        first = last if paired_from is None else paired_from
        rows = self._outer_sum(range(first), mesh, device)
        columns = self._outer_sum(range(first, len(self.global_shape)), mesh, device)
        return Grid(rows, columns, paired_from is not None)

    def _outer_sum(self, dims: range, mesh: object, device: torch.device) -> Tensor:
        """The flat sum over `dims` of coordinate times stride: int64."""
        total = torch.zeros(1, dtype=torch.int64, device=device)
        for dim in dims:
            stride = math.prod(self.global_shape[dim + 1 :])
            total = (total[:, None] + self.coordinates(dim, mesh, device)[None, :] * stride).reshape(-1)
        return total

    def _paired_from(self, mesh: object) -> int | None:
        """The last dim such that the dims from it on, flattened, consist of pairs of indices (2i, 2i + 1), if any.

        The local indices are runs without a gap, all of one length and starting at its multiples: as long as the
        trailing dims that nothing splits, times the shortest piece of the innermost split dim. Even runs are pairs.
        """
        run = 1
        for dim in reversed(range(len(self.global_shape))):
            splits = self._splits(dim, mesh)
            run *= min((length for *_, length in splits), default=self.global_shape[dim])
            if run % 2 == 0:
                return dim
            if splits:
                return None
        return None

    def row_offset(self, batch_offset: int) -> int:
        """Return how far `batch_offset` rows in dim 0 move every index."""
        return batch_offset * math.prod(self.global_shape[1:]) if batch_offset else 0

    def index(self, mesh: object, device: torch.device | str = "cpu", batch_offset: int = 0) -> Tensor:
        """The global linear (row-major) index of each local element: int64 of the local shape.

        Args:
            batch_offset: added to the coordinate in dim 0. Micro-batch m of a tensor whose dim 0 is the batch starts at
                row m * global_shape[0], so that accumulating micro-batches meets the indices of the whole batch.
        """
        grid = self.grid(mesh, device)
        index = grid.rows[:, None] + grid.columns[None, :]
        return index.add_(self.row_offset(batch_offset)).view(self.local_shape(mesh))

    def offset(self, mesh: object, batch_offset: int = 0) -> int:
        """The global linear index of this rank's first element."""
        strides = [math.prod(self.global_shape[dim + 1 :]) for dim in range(len(self.global_shape))]
        first = sum(int(self.coordinates(dim, mesh)[0]) * stride for dim, stride in enumerate(strides))
        return first + self.row_offset(batch_offset)


def whole(shape: torch.Size | tuple[int, ...]) -> Layout:
    """The layout of a tensor that no axis splits."""
    unsharded: Mapping[str, str] = {}
    return Layout(tuple(shape), **unsharded)


def arange(start: float, step: float, layout: Layout, mesh: Any, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part of `torch.arange(start, ..., step)` whose whole has the layout's (one-dim) shape."""
    values = layout.index(mesh, mesh.device) * step + start
    return values if dtype is None else values.to(dtype)
