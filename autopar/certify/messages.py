"""Prove tensors that cross between stages: the parts sent to each rank make up the part it should hold.

The run time's own plan of boxes (`codegen/runtime/transfer.py`) is executed here. Every element of each rank's part
must be written once, with the value of the whole tensor at that place, forward and, for the gradient, backward. The
program's meshes are halved on axes that both ends have until they are small; dims are as long as their sections and
ranks need.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from autopar.certify.certificate import Findings, grouped
from autopar.ir.placement import Placement, Placements
from autopar.proofs.simulated_ranks import coordinates, cut
from codegen.program import PipelineProgram, Spec
from codegen.runtime.parameters import Param
from codegen.runtime.pipeline_ranks import tiled
from codegen.runtime.transfer import StageMesh, plan_slices

MOST_RANKS, MOST_ELEMENTS = 64, 1 << 20
Crossing = tuple[Spec, StageMesh, Spec, StageMesh]
"""The spec and mesh that send, and the spec and mesh that receive."""


def prove_messages(program: PipelineProgram) -> Findings:
    """Move every distinct tensor that crosses between stages, and its gradient."""
    proven: dict[object, int] = {}
    failures: list[str] = []
    gaps: list[tuple[str, str]] = []
    num_crossings = num_boxes = 0
    for place, crossing in _crossings(program):
        num_crossings += 1
        sent, source, received, target = crossing
        for spec, source_mesh, read_spec, target_mesh in (crossing, (received, target, sent, source)):
            if spec is received and not sent.requires_grad:
                continue
            shape, places = _small(spec, source_mesh, read_spec, target_mesh)
            key = shape, places, source_mesh, target_mesh
            if key in proven:
                continue
            if math.prod(shape) > MOST_ELEMENTS:
                gaps.append((place, "its sections do not get smaller"))
                continue
            proven[key], fault = _move(shape, places, source_mesh, target_mesh)
            num_boxes += proven[key]
            failures += [f"{place}{' back' if spec is received else ''}: {fault}"] if fault else []
    return Findings(
        subject="messages",
        counts={
            "tensors that cross between stages": num_crossings,
            "distinct ways, there and back": len(proven),
            "boxes moved": num_boxes,
        },
        failures=tuple(failures),
        gaps=grouped(gaps),
    )


def _crossings(program: PipelineProgram) -> Iterator[tuple[str, Crossing]]:
    firsts = tiled(program.ranks_of_stage_meshes, program.first_ranks)
    shapes = program.meshes
    for number, stage in enumerate(program.stages):
        for name, sent in stage.program.sends.items():
            for reader in program.readers(number, name):
                sender, receiver = stage.pipeline_rank, program.stages[reader].pipeline_rank
                if sender == receiver:
                    continue
                sender_shape, receiver_shape = _cut(shapes[sender], shapes[receiver])
                # The order of the two decides who sends what.
                first = (
                    (0, math.prod(sender_shape[1]))
                    if firsts[sender] < firsts[receiver]
                    else (math.prod(receiver_shape[1]), 0)
                )
                received = program.stages[reader].program.receives[name]
                source, target = StageMesh(*sender_shape, first[0]), StageMesh(*receiver_shape, first[1])
                yield f"{name} of stage {number} for stage {reader}", (sent.spec, source, received.spec, target)


Shape = tuple[tuple[str, ...], tuple[int, ...]]


def _cut(first: Shape, second: Shape) -> tuple[Shape, Shape]:
    """Halve axes of both meshes, the largest first, until they are small."""
    sizes, others = list(first[1]), list(second[1])
    while max(math.prod(sizes), math.prod(others)) > MOST_RANKS:
        even = [i for i, (a, b) in enumerate(zip(sizes, others, strict=True)) if a % 2 == b % 2 == 0 and max(a, b) > 2]
        if not even:
            break
        largest = max(even, key=lambda i: max(sizes[i], others[i]))
        sizes[largest] //= 2
        others[largest] //= 2
    return (first[0], tuple(sizes)), (second[0], tuple(others))


def _small(
    sent: Spec, source_mesh: StageMesh, read_spec: Spec, target_mesh: StageMesh
) -> tuple[tuple[int, ...], tuple[Placements, ...]]:
    """Return dims that both grids divide, and the tensor's placements at both ends."""
    ends = [(_placements(spec, mesh), mesh.sizes) for spec, mesh in ((sent, source_mesh), (read_spec, target_mesh))]
    shape = []
    for dim in range(len(sent.shape)):
        ways = [
            math.lcm(*(p.sections for p in places if p.is_shard and p.dim == dim))
            * math.prod(size for p, size in zip(places, sizes, strict=True) if p.is_shard and p.dim == dim)
            for places, sizes in ends
        ]
        shape.append(math.lcm(*ways) * (1 if max(ways) > 1 else 2))
    return tuple(shape), tuple(places for places, _ in ends)


def _placements(spec: Spec, mesh: StageMesh) -> Placements:
    texts = dict(spec.placements)
    return tuple(Placement.parse(texts.get(axis, "R")) for axis in mesh.axes)


def _move(
    shape: tuple[int, ...], places: tuple[Placements, ...], source_mesh: StageMesh, target_mesh: StageMesh
) -> tuple[int, str]:
    """Return the number of moved boxes and the fault, "" if there is none."""
    whole = torch.arange(math.prod(shape)).reshape(shape)
    (source_param, parts), (target_param, targets) = (
        _parts(whole, p, mesh) for p, mesh in zip(places, (source_mesh, target_mesh), strict=True)
    )
    try:
        boxes = plan_slices(source_param, source_mesh, target_param, target_mesh)
    except ValueError as error:
        return 0, str(error)
    received = {rank: torch.full_like(part, -1) for rank, part in targets.items()}
    for box in boxes:
        if box.source not in parts or box.target not in received:
            return 0, f"rank {box.source} sends to rank {box.target}"
        into = received[box.target][box.target_box]
        if bool((into >= 0).any()):
            return 0, f"rank {box.target} gets elements twice"
        into.copy_(parts[box.source][box.source_box])
    wrong = [rank for rank, part in received.items() if not torch.equal(part, targets[rank])]
    return len(boxes), f"rank {wrong[0]} does not get exactly the elements of its part" if wrong else ""


def _parts(whole: Tensor, places: Placements, mesh: StageMesh) -> tuple[Param, dict[int, Tensor]]:
    """Return the run time's description of a tensor, and each process' part as the simulation shards it."""
    texts: dict[str, Any] = {axis: str(place) for axis, place in zip(mesh.axes, places, strict=True)}
    ranks = zip(mesh.ranks, coordinates(mesh.sizes), strict=True)
    return Param(tuple(whole.shape), **texts), {rank: cut(whole, places, mesh.sizes, at) for rank, at in ranks}
