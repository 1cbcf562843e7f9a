"""Common factors of two shapes with the same number of elements: the corresponding dims of a view."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViewFactors:
    """Factors of each dim of both shapes, major to minor, with their sizes; `blocked` ones have no counterpart."""

    source: tuple[tuple[str, ...], ...]
    target: tuple[tuple[str, ...], ...]
    sizes: dict[str, int]
    blocked: frozenset[str]


def view_factors(source: Shape, target: Shape) -> ViewFactors:
    """Match two row-major shapes of equal element count.

    Dims are taken in minimal groups of equal product. Inside a group, both sides are peeled from the major end, each
    time by the greatest common divisor of the two current dims, until these are coprime; then likewise from the minor
    end. What remains in the middle (such as 3 x 4 seen as 4 x 3) has no common loop and is blocked.

    Sharding any common factor is correct: a rank owns the same elements on both sides, in the same local order. A
    factor is named by its source and target dims, which together identify it. The name does not depend on the sizes of
    other dims, so a decision for one batch size is valid for another. Raises ValueError if the element counts differ.
    """
    if math.prod(source) != math.prod(target):
        raise ValueError(f"a view cannot turn {source} into {target}")
    work = _Work([[] for _ in source], [[] for _ in target])
    if 0 in source:
        _block(work, source, target)
    for left, right in _groups(source, target) if 0 not in source else ():
        _match(work, source, target, left, right)
    return ViewFactors(
        tuple(tuple(f) for f in work.source),
        tuple(tuple(f) for f in work.target),
        work.sizes,
        frozenset(work.blocked),
    )


@dataclass(slots=True)
class _Work:
    """The factors so far."""

    source: list[list[str]]
    target: list[list[str]]
    sizes: dict[str, int] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)

    def new(self, name: str, size: int) -> str:
        self.sizes[name] = size
        return name


def _block(work: _Work, source: Shape, target: Shape) -> None:
    """Block the factors of empty tensors, which have nothing to shard."""
    for side, dims, shape in (("from", work.source, source), ("to", work.target, target)):
        for index, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            dim.append(work.new(f"{side}{index}", size))
    work.blocked |= work.sizes.keys()


def _groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Return minimal runs of dims with equal products, without dims of size 1, which have no factor."""
    left = [i for i, size in enumerate(source) if size != 1]
    right = [i for i, size in enumerate(target) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(left):
        left_dims, right_dims = [left[i]], [right[j]]
        a, b = source[left[i]], target[right[j]]
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a *= source[left[i]]
                left_dims.append(left[i])
                i += 1
            else:
                b *= target[right[j]]
                right_dims.append(right[j])
                j += 1
        groups.append((left_dims, right_dims))
    return groups


def _match(work: _Work, source: Shape, target: Shape, left: Sequence[int], right: Sequence[int]) -> None:
    """Add the factors of one group, see `view_factors`."""
    rest_left = {i: source[i] for i in left}
    rest_right = {j: target[j] for j in right}
    major = _peel(work, rest_left, rest_right, list(left), list(right))
    minor = _peel(work, rest_left, rest_right, list(reversed(left)), list(reversed(right)))
    for name, side, rest, dims, heads, tails in (
        ("from", work.source, rest_left, left, major[0], minor[0]),
        ("to", work.target, rest_right, right, major[1], minor[1]),
    ):
        for dim in dims:
            side[dim] += heads.get(dim, [])
            if rest[dim] > 1:
                opaque = work.new(f"{name}{dim}", rest[dim])
                work.blocked.add(opaque)
                side[dim].append(opaque)
            side[dim] += reversed(tails.get(dim, []))


def _peel(
    work: _Work, rest_left: dict[int, int], rest_right: dict[int, int], left: list[int], right: list[int]
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Return common factors from one end of a group, in order, by dim, and divide the rests by them."""
    left_factors: dict[int, list[str]] = {}
    right_factors: dict[int, list[str]] = {}
    while True:
        left = [i for i in left if rest_left[i] > 1]
        right = [j for j in right if rest_right[j] > 1]
        if not left or not right:
            return left_factors, right_factors
        i, j = left[0], right[0]
        size = math.gcd(rest_left[i], rest_right[j])
        if size == 1:
            return left_factors, right_factors
        factor = work.new(f"v{i}to{j}", size)
        left_factors.setdefault(i, []).append(factor)
        right_factors.setdefault(j, []).append(factor)
        rest_left[i] //= size
        rest_right[j] //= size
