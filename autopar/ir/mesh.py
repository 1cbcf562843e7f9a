"""The device mesh: named axes over the ranks of a cluster.

Axes are ordered from the slowest varying rank stride (first) to the fastest (last), so that the last axis
connects neighbors, usually inside one node.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.ir.placement import Placements, Rp
from codegen.axis_records import AXES

AXIS_NAMES = tuple(AXES)
"""Tensor parallelism has two axes where its ranks are a grid: `ttp` is to `tp` what `ddp` is to `dp`, the outer one. No
name ends in a digit, as a size follows it in texts."""

(PIPELINE_AXIS,) = (name for name, kind in AXES.items() if kind.has_stages)
"""The axis of the pipeline, which a plan has beside its mesh."""

SHARDING_AXES = tuple(name for name, kind in AXES.items() if not kind.has_stages)

DATA_AXES = tuple(name for name, kind in AXES.items() if kind.cuts_batch)
"""Axes that shard the batch; `ep` shards the experts of a mixture beside it."""

TOKEN_AXES = tuple(name for name, kind in AXES.items() if kind.cuts_tokens)

TENSOR_AXES = tuple(name for name, kind in AXES.items() if kind.cuts_features)
"""Axes that cut features. Where experts are folded, they cut tokens and experts of a mixture's layers instead."""

EXPERT_AXES = tuple(name for name, kind in AXES.items() if kind.cuts_experts)
"""Axes over which the experts of a mixture may be shared out, as one axis."""

ZERO_AXES = tuple(name for name, kind in AXES.items() if kind.shards_optimizer)
"""Axes over which ZeRO shards what all their ranks have whole; over `ddp` are copies of its shards."""


def zero_axes(axes: tuple[str, ...], placements: Placements) -> tuple[int, ...]:
    """Return the indices of the axes over which ZeRO shards a tensor with these placements.

    These are the ZERO_AXES on which every rank has the whole tensor and a partial sum of its gradient.
    """
    named = zip(axes, placements, strict=True)
    return tuple(number for number, (axis, p) in enumerate(named) if axis in ZERO_AXES and p == Rp)


@dataclass(frozen=True, slots=True)
class Mesh:
    """`Mesh(("dp", "tp"), (2, 4))` prints as `dp2 x tp4`; a mesh of one rank prints as `single`.

    Axes of one rank are left out, except where several meshes must have the same axes.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.sizes) or len(set(self.axes)) != len(self.axes):
            raise ValueError(f"axes {self.axes} and sizes {self.sizes} must pair up without repetition")
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"an axis has one rank at least, got {self.axes} of {self.sizes}")

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the axis' size; 1 for an axis that the mesh does not have."""
        return self.sizes[self.axes.index(axis)] if axis in self.axes else 1

    @property
    def num_data_ranks(self) -> int:
        """Count the ranks that have different rows of the batch."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    @property
    def num_token_ranks(self) -> int:
        """Count the ranks that have different tokens."""
        return math.prod(self.size(axis) for axis in TOKEN_AXES)

    @property
    def degrees(self) -> dict[str, int]:
        """Return the sizes of all axes but the pipeline's, as constraints name them: dp with ep inside it."""
        return {axis: self.size(axis) for axis in SHARDING_AXES} | {"dp": self.num_data_ranks // self.size("ddp")}

    def stride(self, axis: str) -> int:
        """Return the distance between neighboring ranks of one group of `axis`."""
        return math.prod(self.sizes[self.axes.index(axis) + 1 :])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the rank's index on every axis."""
        return {axis: rank // self.stride(axis) % size for axis, size in zip(self.axes, self.sizes, strict=True)}

    @property
    def compact(self) -> Mesh:
        """Return the mesh without axes of one rank."""
        kept = [(axis, size) for axis, size in zip(self.axes, self.sizes, strict=True) if size > 1]
        return Mesh(tuple(axis for axis, _ in kept), tuple(size for _, size in kept))

    def over(self, axes: tuple[str, ...]) -> Mesh:
        """Return the same ranks with exactly these axes, of one rank where the mesh lacks them."""
        return Mesh(axes, tuple(self.size(axis) for axis in axes))

    def __str__(self) -> str:
        named = zip(self.axes, self.sizes, strict=True)
        return " x ".join(f"{axis}{size}" for axis, size in named if size > 1) or "single"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse `"dp2 x tp4"`. Axes of size 1 are dropped. Raises ValueError with the legal form."""
        if text.strip() == "single":
            return cls((), ())
        pairs = [re.fullmatch(r"([a-z]+)([0-9]{1,9})", part.strip()) for part in text.split("x ")]
        if not all(pairs):
            raise ValueError(f"not a mesh: {text!r}; write axes and sizes, for example 'dp2 x tp4', or 'single'")
        named = [(m.group(1), int(m.group(2))) for m in pairs if m]
        if any(n < 1 for _, n in named):
            raise ValueError(f"an axis has one rank at least, got {text!r}")
        return cls(tuple(a for a, n in named if n > 1), tuple(n for _, n in named if n > 1))
