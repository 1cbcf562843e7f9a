"""What meshes the miniatures of a plan have: its axes cut to two ranks each, on no more processes than a machine holds.

Where the axes need more, several miniatures have some of them each. Where pipeline ranks of the plan have meshes of
their own, there is a miniature of two neighbours that differ, too: an axis that has unlike numbers of ranks there has
one rank here and two there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.ir.mesh import PIPELINE_AXIS, Mesh
from autopar.plan import Plan

MOST_RANKS, MOST_MINIATURES, MOST_UNLIKE = 8, 3, 2


@dataclass(frozen=True, slots=True)
class Cut:
    """One miniature's mesh. degrees: ranks of every axis, of the envelope where there are stage_meshes, which are those
    of its two pipeline ranks."""

    degrees: Mapping[str, int]
    stage_meshes: tuple[Mesh, ...] = ()

    @property
    def num_ranks(self) -> int:
        return sum(mesh.num_ranks for mesh in self.stage_meshes) or math.prod(self.degrees.values())

    def __str__(self) -> str:
        if self.stage_meshes:
            return f"pp2 ({', '.join(str(mesh.compact) for mesh in self.stage_meshes)})"
        return " x ".join(f"{axis}{size}" for axis, size in self.degrees.items()) or "one rank"


def cuts_of(plan: Plan) -> tuple[list[Cut], tuple[str, ...]]:
    """The miniatures' meshes, and what of the plan's none of them has."""
    axes = _axes(plan)
    sets = axis_sets(axes)
    missing = _pairs(axes) - {pair for each in sets for pair in _pairs(each)}
    left = (
        [f"axes that no miniature has together: {', '.join('x'.join(p) for p in sorted(missing))}"] if missing else []
    )
    cuts = [Cut(dict.fromkeys(each, 2)) for each in sets]
    neighbours = _neighbours(plan)
    cuts += [_unlike(plan.mesh.axes, *pair) for pair in neighbours[:MOST_UNLIKE]]
    more = [f"{one.compact} beside {other.compact}" for one, other in neighbours[MOST_UNLIKE:]]
    left += [f"pipeline ranks that no miniature has: {', '.join(more)}"] if more else []
    return cuts or [Cut({})], tuple(left)


def _axes(plan: Plan) -> tuple[str, ...]:
    """Axes of the plan with several ranks, that of the pipeline first."""
    own = tuple(axis for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True) if size > 1)
    return ((PIPELINE_AXIS,) if plan.pipeline.num_pipeline_ranks > 1 else ()) + own


def axis_sets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Which axes each miniature has: all, or of several those that have the most pairs of axes together."""
    most = int(math.log2(MOST_RANKS))
    if len(axes) <= most:
        return [axes] if axes else []
    candidates = list(itertools.combinations(axes, most))
    chosen: list[tuple[str, ...]] = []
    open_pairs = _pairs(axes)
    while open_pairs and len(chosen) < MOST_MINIATURES:
        best = max(candidates, key=lambda each: len(open_pairs & _pairs(each)))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen


def _pairs(axes: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(itertools.combinations(axes, 2))


def _neighbours(plan: Plan) -> list[tuple[Mesh, Mesh]]:
    """Pairs of pipeline ranks that follow one another on meshes of their own: unlike ones, or one that is alike."""
    meshes = [each.mesh for each in plan.pipeline.stage_meshes]
    pairs = list(dict.fromkeys(itertools.pairwise(meshes)))
    unlike = [(one, other) for one, other in pairs if one.sizes != other.sizes]
    return unlike or pairs[:1]


def _unlike(axes: tuple[str, ...], one: Mesh, other: Mesh) -> Cut:
    """Two pipeline ranks with an axis' larger number cut to two and a smaller one to one; equal ones that make too many
    processes are left out, the last first, and then others."""
    sizes = {axis: _pair(one.size(axis), other.size(axis)) for axis in axes}
    for axis in sorted(axes, key=lambda a: (sizes[a][0] != sizes[a][1], -axes.index(a))):
        meshes = tuple(Mesh(axes, tuple(sizes[a][i] for a in axes)) for i in (0, 1))
        if sum(mesh.num_ranks for mesh in meshes) <= MOST_RANKS:
            break
        sizes[axis] = 1, 1
    meshes = tuple(Mesh(axes, tuple(sizes[a][i] for a in axes)) for i in (0, 1))
    return Cut({PIPELINE_AXIS: 2} | {axis: max(pair) for axis, pair in sizes.items() if max(pair) > 1}, meshes)


def _pair(one: int, other: int) -> tuple[int, int]:
    if one == other:
        return min(one, 2), min(one, 2)
    return (1, 2) if one < other else (2, 1)
