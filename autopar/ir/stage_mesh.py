"""The meshes of pipeline ranks that are not all alike: meshes of several sizes, groups of unlike nodes.

All pipeline ranks have the plan's axes, so that its decisions are valid for all of them. An axis may have one rank on
one of them and several on another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.ir.mesh import AXIS_NAMES, Mesh
from codegen.source.text import meshes_text


@dataclass(frozen=True, slots=True)
class StageMesh:
    """One pipeline rank's mesh. mesh: over the plan's axes. group: index of the cluster's group of equal nodes.

    Prints as `dp2 x tp4`, or `dp2 x tp4 of group 1`.
    """

    mesh: Mesh
    group: int = 0

    def __str__(self) -> str:
        return str(self.mesh) + (f" of group {self.group}" if self.group else "")

    @classmethod
    def parse(cls, text: str) -> StageMesh:
        """Parse the text of `str`. Raises ValueError."""
        match = re.fullmatch(r"(.*?)(?: of group (\d+))?", text.strip())
        assert match is not None
        return cls(Mesh.parse(match.group(1)), int(match.group(2) or 0))


def envelope(meshes: Sequence[Mesh]) -> Mesh:
    """Return a mesh with all axes, each of the least common multiple of its sizes: what divides evenly on it divides
    evenly on every mesh."""
    axes = tuple(axis for axis in AXIS_NAMES if any(mesh.size(axis) > 1 for mesh in meshes))
    return Mesh(axes, tuple(math.lcm(*(mesh.size(axis) for mesh in meshes)) for axis in axes))


def first_ranks(stage_meshes: Sequence[StageMesh]) -> tuple[int, ...]:
    """Return the first rank of each pipeline rank.

    Ranks are numbered group by group. Within a group larger meshes come first, so that no mesh that fits into a node
    spans two nodes.
    """
    order = sorted(range(len(stage_meshes)), key=lambda i: (stage_meshes[i].group, -stage_meshes[i].mesh.num_ranks))
    firsts = itertools.accumulate((stage_meshes[i].mesh.num_ranks for i in order), initial=0)
    first_of = dict(zip(order, firsts, strict=False))
    return tuple(first_of[i] for i in range(len(stage_meshes)))


def stage_meshes_text(stage_meshes: Sequence[StageMesh]) -> str:
    """Return `pp3 (2 of dp2 x tp4, dp4)`; equal neighbors are counted."""
    return meshes_text([(stage_mesh.mesh.axes, stage_mesh.mesh.sizes) for stage_mesh in stage_meshes])
