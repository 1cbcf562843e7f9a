"""Every searched parallel config with unlike stage meshes on pipeline ranks.

A pipeline may have one stage mesh in each group of nodes, and two if there is one group; all pipeline ranks together
take all devices. A group of n devices has n / a pipeline ranks with its one mesh of a devices, or x with a devices
and y with b devices, x, y >= 1, with x a + y b = n. As in Alpa (Zheng et al., OSDI 2022, section 5.2) a stage mesh
is a share of one node, or some whole nodes, of one group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

from autopar.ir.stage_mesh import StageMesh
from autopar.planning.equal_configs import micro_batch_counts, offloads, zero_stages
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, divisors
from autopar.planning.shared_assignments import SharedAssignments
from autopar.planning.solved_layers import MULTIPLIERS, named_mesh
from autopar.planning.stage_points import CLOSED_FORMS, SEARCHED_SCHEDULES
from cost_models.machine import Cluster

MANY_DEVICES = 8
"""Devices of a group of several nodes above which a submesh has at least half a node."""


def unequal_configs(request: Request, assignments: SharedAssignments, num_units: int) -> Iterator[ParallelConfig]:
    """Yield all configs that agree with the constraints."""
    for config in without_parameters(request, assignments, num_units):
        yield from variants(request, config)


def without_parameters(request: Request, assignments: SharedAssignments, num_units: int) -> Iterator[ParallelConfig]:
    """Yield configs with open parameter settings: ZeRO stage 0 and no offload stand for all."""
    counts = micro_batch_counts(request.global_batch_size, request.constraints.micro_batches)
    for count in filter(request.splits, counts):
        rows = request.global_batch_size // count
        for meshes in mesh_sets(request, assignments, num_units, rows):
            numbers = tuple(sorted(numbers_of_ranks(request, num_units, meshes)))
            multipliers = assignments.multipliers(max(stage_mesh.mesh.size("tp") for stage_mesh in meshes), rows)
            for schedule, multiplier in itertools.product(schedules(request), multipliers):
                yield ParallelConfig(
                    stage_meshes=meshes,
                    pipeline_ranks=numbers,
                    rows=rows,
                    num_micro_batches=count,
                    zero=0,
                    multiplier=multiplier,
                    offload="",
                    schedule=schedule,
                )


def variants(request: Request, config: ParallelConfig) -> Iterator[ParallelConfig]:
    """Yield the config with every ZeRO stage and offload."""
    data = max(stage_mesh.mesh.num_data_ranks for stage_mesh in config.stage_meshes)
    for zero in zero_stages(request, data, config.num_micro_batches):
        for offload in offloads(request, zero):
            yield replace(config, zero=zero, offload=offload)


def mesh_sets(
    request: Request, assignments: SharedAssignments, num_units: int, rows: int
) -> Iterator[tuple[StageMesh, ...]]:
    """Yield sets of stage meshes for micro-batches of `rows` rows: one of every group, or two of the only one."""
    legal = [list(_stage_meshes(request, number, rows)) for number in range(len(request.whole.groups))]
    sets = itertools.product(*legal) if len(legal) > 1 else itertools.combinations(legal[0], 2)
    for meshes in sets:
        degrees, data = [s.mesh.size("tp") for s in meshes], [s.mesh.num_data_ranks for s in meshes]
        tp = max(degrees)
        has_room = assignments.has_data(tp, rows) or max(data) == 1
        is_cut = all(tp % degree == 0 for degree in degrees) and rows % math.lcm(*data) == 0
        is_legal = is_cut and has_room and numbers_of_ranks(request, num_units, meshes)
        if is_legal and assignments.assignment(tp, rows, MULTIPLIERS[0]) is not None:
            yield meshes


def numbers_of_ranks(request: Request, num_units: int, meshes: tuple[StageMesh, ...]) -> set[int]:
    """Return how many pipeline ranks with these meshes, each at least once, take all devices; at most one per unit."""
    totals = {0}
    for number, group in enumerate(request.whole.groups):
        first, *others = [stage_mesh.mesh.num_ranks for stage_mesh in meshes if stage_mesh.group == number]
        counts = range(1, group.num_devices // first + 1)
        rests = {n: group.num_devices - n * first for n in counts}
        if others:
            numbers = {n + rest // others[0] for n, rest in rests.items() if rest and rest % others[0] == 0}
        else:
            numbers = {n for n, rest in rests.items() if not rest}
        totals = {a + b for a in totals for b in numbers}
    pinned = request.constraints.degrees.get("pp")
    return {n for n in totals if n <= num_units and pinned in (None, n)}


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Return numbers of devices of a submesh, such that submeshes laid out largest first never straddle two nodes.

    On one node any number; otherwise halves of a node (of many devices, at least half a node), and whole nodes,
    doubled while they fit.
    """
    per_node, nodes = cluster.devices_per_node, cluster.num_nodes
    if nodes == 1:
        return list(range(1, per_node + 1))
    smallest = per_node // 2 if cluster.num_devices > MANY_DEVICES else 1
    parts = [n for k in range(per_node.bit_length()) if per_node % 2**k == 0 and (n := per_node // 2**k) >= smallest]
    wholes = {per_node * 2**k for k in range(nodes.bit_length()) if 2**k <= nodes} | {per_node * nodes}
    return sorted({*parts, *wholes})


def _stage_meshes(request: Request, number: int, rows: int) -> Iterator[StageMesh]:
    """Yield submeshes of a group that divide its devices and a micro-batch."""
    group, degrees = request.whole.groups[number], request.constraints.degrees
    for size in submesh_sizes(group):
        for tp in divisors(size):
            data = size // tp
            pinned = degrees.get("tp", tp) == tp and degrees.get("dp", data) == data
            if pinned and rows % data == 0 and tp <= group.devices_per_node:
                yield StageMesh(named_mesh(data, tp), number)


def schedules(request: Request) -> tuple[str, ...]:
    """Return the possible schedules of a pipeline. Under zero bubble one micro-batch ends sooner, too: its weight
    gradients overlap the backwards of earlier stages."""
    pinned = request.constraints.schedule
    if pinned is not None:
        return (pinned,) if pinned in CLOSED_FORMS else ()
    return SEARCHED_SCHEDULES
