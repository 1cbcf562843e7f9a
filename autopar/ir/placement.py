"""The placement of one tensor on one mesh axis, and what it implies for the tensor's gradient.

A tensor has one placement per mesh axis. There are four kinds, and each has a *conjugate*: the placement of its
gradient on the same axis. Programs are correct by construction: every operator option states the placements of its
inputs and outputs, and the backward of every reshard is its transpose (see `codegen/runtime/reshard.py`).

    print form   meaning of the value on n ranks                 its gradient
    R            the same on every rank                          the same on every rank (R)
    Rp           the same on every rank                          partial: the sum over ranks is the gradient (P)
    S(d)         rank r holds the r-th of n equal slices of d    sharded alike (S(d))
    S(d/k)       dim d is k equal sections, each split over n    sharded alike (S(d/k))
    P            partial: the sum over ranks is the value        the same on every rank (R)

`R` is a value that every rank computes and differentiates identically. `Rp` is a replicated value that ranks *use*
differently (a weight under data parallelism, the input of a column-parallel linear), so each rank's autograd has only a
share of the gradient. Going from `R` to `Rp` moves nothing forward and all-reduces backward: this is Megatron's `f`,
and also DistributedDataParallel's gradient synchronization.

A fused QKV weight needs `S(d/k)` (k = 3: each of q, k, v is split over heads). A view that merges a replicated dim with
a sharded one also gives it (k = size of the outer dim).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, cast

Kind = Literal["R", "Rp", "S", "P"]

_FORM = re.compile(r"(R|Rp|P)|S\((\d+)(?:/(\d+))?\)")
_KNOWN: dict[tuple[Kind, int, int], Placement] = {}


@dataclass(frozen=True, slots=True, order=True)
class Placement:
    """One tensor on one axis. `dim` and `sections` are meaningful for kind "S" only.

    Equal placements are one object, because millions of them are compared and hashed as parts of keys.
    """

    kind: Kind
    dim: int = -1
    sections: int = 1

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __new__(cls, kind: Kind, dim: int = -1, sections: int = 1) -> Placement:
        key = kind, dim, sections
        return _KNOWN.get(key) or _KNOWN.setdefault(key, object.__new__(cls))

    def __reduce__(self) -> tuple[Any, ...]:
        return Placement, (self.kind, self.dim, self.sections)

    def __post_init__(self) -> None:
        if self.kind == "S":
            if self.dim < 0 or self.sections < 1:
                raise ValueError(f"a shard needs dim >= 0 and sections >= 1, got {self.dim}, {self.sections}")
        elif self.kind not in ("R", "Rp", "P") or self.dim != -1 or self.sections != 1:
            raise ValueError(f"not a placement: {self.kind!r} with dim {self.dim}, sections {self.sections}")

    def __str__(self) -> str:
        if self.kind != "S":
            return self.kind
        return f"S({self.dim})" if self.sections == 1 else f"S({self.dim}/{self.sections})"

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Parse the text of `str`. Raises ValueError with the legal forms."""
        match = _FORM.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a placement: {text!r}; write R, Rp, P, S(dim) or S(dim/sections)")
        kind, dim, sections = match.groups()
        return cls(cast(Kind, kind)) if kind else cls("S", int(dim), int(sections or 1))

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def is_replicated(self) -> bool:
        return self.kind in ("R", "Rp")


R = Placement("R")
Rp = Placement("Rp")
P = Placement("P")


@cache
def S(dim: int, sections: int = 1) -> Placement:
    """Return a shard of `dim`; with sections > 1, each of the equal sections of `dim` is sharded."""
    return Placement("S", dim, sections)


Placements = tuple[Placement, ...]
"""One placement per mesh axis, in mesh order (major axis first)."""


def local_shape(shape: tuple[int, ...], placements: Placements, axis_sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one rank's shard. Raises ValueError if a sharded dim (or its section) does not divide."""
    local = list(shape)
    for placement, size in zip(placements, axis_sizes, strict=True):
        if placement.is_shard:
            if placement.dim >= len(shape) or local[placement.dim] % size:
                raise ValueError(f"{placement} over {size} ranks does not divide shape {shape}")
            local[placement.dim] //= size
    return tuple(local)


def divides(shape: tuple[int, ...], placements: Placements, axis_sizes: tuple[int, ...]) -> bool:
    """Whether all shards have equal size, with several axes on one dim and sections counted exactly.

    A dim with sections k is a grid (k, size / k): a shard with sections k splits the second factor, one with
    fewer sections splits a part of the first.
    """
    shards = [(p.dim, p.sections, n) for p, n in zip(placements, axis_sizes, strict=True) if p.kind == "S"]
    if len(shards) == 1:
        dim, sections, ranks = shards[0]
        return dim >= len(shape) or shape[dim] % (sections * ranks) == 0
    for dim in {dim for dim, _, _ in shards if dim < len(shape)}:
        size = shape[dim]
        on_dim = [(k, n) for d, k, n in shards if d == dim]
        levels = sorted({k for k, _ in on_dim})
        for index, level in enumerate(levels):
            end = levels[index + 1] if index + 1 < len(levels) else size
            span, rest = divmod(end, level)
            ways = 1
            for sections, ranks in on_dim:
                ways *= ranks if sections == level else 1
            if rest or span % ways:
                return False
    return True


@dataclass(frozen=True, slots=True)
class Stored:
    """A parameter's decision: its placement on each axis, and its ZeRO stage (over `mesh.zero_axes`)."""

    placements: Placements
    zero: int = 0
