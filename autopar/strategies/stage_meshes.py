"""The stage meshes of a given strategy: one of equal size for each pipeline rank, in one group of equal nodes.

A plain cluster has one group. With groups of unlike nodes (cost_models/mixed_cluster.py), a pipeline rank has ddp x dp
x cp x tp devices of one group. Whole pipeline ranks fill every group. A strategy may name the group of each pipeline
rank by `groups`; otherwise pipeline ranks follow the order of the groups. No collective spans two groups. Messages
between pipeline ranks do, over the link that joins the groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.errors import ConstraintError
from autopar.ir.mesh import Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.request import divisors
from cost_models.mixed_cluster import AnyCluster


def stage_meshes_of(cluster: AnyCluster, mesh: Mesh, pp: int, groups: Sequence[int]) -> tuple[StageMesh, ...]:
    """Return the stage mesh of every pipeline rank. pp x mesh are all devices. groups: of each pipeline rank, () for
    the order of the groups. Raises ConstraintError if pipeline ranks do not fill the groups."""
    sizes = [group.num_devices for group in cluster.groups]
    if any(size % mesh.num_ranks for size in sizes):
        raise ConstraintError(
            "every pipeline rank is inside one group of nodes, and pipeline ranks of this size do not fill the groups",
            values=f"{mesh.num_ranks} devices of each pipeline rank, groups of {', '.join(map(str, sizes))}",
            alternatives=f"ddp x dp x cp x tp of {_legal(sizes)}",
        )
    wanted = [number for number, size in enumerate(sizes) for _ in range(size // mesh.num_ranks)]
    if groups and Counter(groups) != Counter(wanted):
        raise ConstraintError(
            "groups does not give every group of nodes as many pipeline ranks as it has room for",
            values=f"{list(groups)} of {pp} pipeline ranks",
            alternatives=f"{wanted} in any order",
        )
    return tuple(StageMesh(mesh, number) for number in groups or wanted)


def _legal(sizes: Sequence[int]) -> str:
    common = [n for n in divisors(min(sizes)) if all(size % n == 0 for size in sizes)]
    return ", ".join(f"{n} (pp={sum(sizes) // n})" for n in common)
