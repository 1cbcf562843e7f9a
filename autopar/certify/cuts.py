"""Choose the meshes of a plan's miniatures: two ranks per axis, on no more processes than one machine can run.

If the axes need more processes, several miniatures have some of the axes each. If the plan's pipeline ranks have
different meshes, there are also miniatures of two unlike neighbors. An axis with unequal numbers of ranks has one rank
on one of them and two on the other.
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
    """The mesh of one miniature.

    degrees: ranks of every axis; with stage_meshes, of the mesh that covers both. stage_meshes: the meshes of its two
    pipeline ranks.
    """

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
    """Return the meshes of the miniatures, and which combinations of the plan no miniature has."""
    axes = _axes(plan)
    sets = axis_sets(axes)
    missing = _pairs(axes) - {pair for chosen_axes in sets for pair in _pairs(chosen_axes)}
    left = (
        [f"axes that no miniature has together: {', '.join('x'.join(p) for p in sorted(missing))}"] if missing else []
    )
    cuts = [Cut(dict.fromkeys(chosen_axes, 2)) for chosen_axes in sets]
    neighbors = _neighbors(plan)
    cuts += [_unlike(plan.mesh.axes, *pair) for pair in neighbors[:MOST_UNLIKE]]
    more = [f"{first.compact} beside {second.compact}" for first, second in neighbors[MOST_UNLIKE:]]
    left += [f"pipeline ranks that no miniature has: {', '.join(more)}"] if more else []
    return cuts or [Cut({})], tuple(left)


def _axes(plan: Plan) -> tuple[str, ...]:
    """Return the plan's axes with several ranks, the pipeline axis first."""
    mesh_axes = tuple(axis for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True) if size > 1)
    return ((PIPELINE_AXIS,) if plan.pipeline.num_pipeline_ranks > 1 else ()) + mesh_axes


def axis_sets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the axes of each miniature: all of them, or several sets that cover the most pairs of axes."""
    most = int(math.log2(MOST_RANKS))
    if len(axes) <= most:
        return [axes] if axes else []
    candidates = list(itertools.combinations(axes, most))
    chosen: list[tuple[str, ...]] = []
    open_pairs = _pairs(axes)
    while open_pairs and len(chosen) < MOST_MINIATURES:
        best = max(candidates, key=lambda axis_set: len(open_pairs & _pairs(axis_set)))
        chosen.append(best)
        open_pairs -= _pairs(best)
    return chosen


def _pairs(axes: tuple[str, ...]) -> set[tuple[str, str]]:
    return set(itertools.combinations(axes, 2))


def _neighbors(plan: Plan) -> list[tuple[Mesh, Mesh]]:
    """Return pairs of adjacent pipeline ranks with different meshes: the unlike pairs, or one pair of equal meshes."""
    meshes = [stage_mesh.mesh for stage_mesh in plan.pipeline.stage_meshes]
    pairs = list(dict.fromkeys(itertools.pairwise(meshes)))
    unlike = [(first, second) for first, second in pairs if first.sizes != second.sizes]
    return unlike or pairs[:1]


def _unlike(axes: tuple[str, ...], first: Mesh, second: Mesh) -> Cut:
    """Return the mesh of two unlike pipeline ranks. Each unequal axis has two ranks on the larger one and one on the
    other.

    If that needs too many processes, equal axes are dropped first, the last one first, and then unequal axes.
    """
    sizes = {axis: _pair(first.size(axis), second.size(axis)) for axis in axes}
    for axis in sorted(axes, key=lambda a: (sizes[a][0] != sizes[a][1], -axes.index(a))):
        meshes = tuple(Mesh(axes, tuple(sizes[a][i] for a in axes)) for i in (0, 1))
        if sum(mesh.num_ranks for mesh in meshes) <= MOST_RANKS:
            break
        sizes[axis] = 1, 1
    meshes = tuple(Mesh(axes, tuple(sizes[a][i] for a in axes)) for i in (0, 1))
    return Cut({PIPELINE_AXIS: 2} | {axis: max(pair) for axis, pair in sizes.items() if max(pair) > 1}, meshes)


def _pair(first: int, second: int) -> tuple[int, int]:
    if first == second:
        return min(first, 2), min(first, 2)
    return (1, 2) if first < second else (2, 1)
