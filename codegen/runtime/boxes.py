"""A rank's elements of a tensor as boxes of the whole tensor, which is how files hold and hand out parts of one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .mesh import Mesh
from .parameters import Param, runs


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor `name` that this rank stores: `value` (a view of the stored memory) at `offsets`."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    value: Tensor


def pieces_of(name: str, spec: Param, mesh: Mesh, values: Tensor, start: int = 0) -> list[Piece]:
    """Elements start, start + 1, ... of this rank's flattened local tensor, as boxes of the global one."""
    local, stop = spec.local_shape(mesh), start + values.numel()
    runs_of_dims = [runs(dim, spec, mesh) for dim in range(len(local))]
    pieces = []
    for first, offsets, sizes in _boxes(local, start, stop):
        box = values[first - start : first - start + math.prod(sizes)].view(sizes)
        for cut in itertools.product(*(_cuts(*ranges) for ranges in zip(runs_of_dims, offsets, sizes, strict=True))):
            value = box
            for dim, (begin, _, length) in enumerate(cut):
                value = value.narrow(dim, begin, length)
            pieces.append(Piece(name, spec.shape, tuple(at for _, at, _ in cut), value))
    return pieces


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, before: int = 0
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(flat start, offsets, sizes) of the fewest boxes that make up elements start to stop of a row-major tensor."""
    if stop <= start:
        return
    if not shape:
        yield before, (), ()
        return
    row = math.prod(shape[1:])
    full_from, full_to = -(-start // row), stop // row
    if full_from < full_to:
        parts = [(start, full_from * row), (full_to * row, stop)]
    elif full_from == full_to:
        parts = [(start, full_from * row), (full_from * row, stop)]
    else:
        parts = [(start, stop)]
    for index, (lo, hi) in enumerate(parts):
        if index == 1 and full_from < full_to:
            offsets = (full_from, *(0 for _ in shape[1:]))
            yield before + full_from * row, offsets, (full_to - full_from, *shape[1:])
        at = lo // row
        for first, offsets, sizes in _boxes(shape[1:], lo - at * row, hi - at * row, before + at * row):
            yield first, (at, *offsets), (1, *sizes)


def _cuts(runs_of_dim: list[tuple[int, int, int]], offset: int, size: int) -> list[tuple[int, int, int]]:
    """(start in the box, global start, length) of the runs within offset to offset + size."""
    cuts = []
    for local, at, length in runs_of_dim:
        lo, hi = max(local, offset), min(local + length, offset + size)
        if lo < hi:
            cuts.append((lo - offset, at + lo - local, hi - lo))
    return cuts
