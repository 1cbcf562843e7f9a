"""One rank's part of a batch, cut on the host by the placements of the program's inputs; no process group needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import TraceError
from autopar.mesh import Mesh
from autopar.placement import Placement
from codegen.program import PipelineProgram, Program, Spec


def local_batch(program: Program | PipelineProgram, batch: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Rank's part of a global batch by name; of a pipeline, what the stages at the rank's position read.

    Raises TraceError for shapes that the program was not made for.
    """
    if isinstance(program, PipelineProgram):
        position, rank = program.place(rank)
        mesh, inputs = Mesh(*program.meshes[position]), program.inputs_of(position)
        num_micro_batches = program.any.num_micro_batches
    else:
        mesh, inputs = Mesh(program.axes, program.axis_sizes), program.inputs
        num_micro_batches = program.num_micro_batches
    parts = {}
    for name, spec in inputs.items():
        if name not in batch:
            raise TraceError(f"the batch lacks {name!r}", alternatives=", ".join(program.inputs))
        parts[name] = _part(name, batch[name], spec, num_micro_batches, mesh, rank)
    return parts


def _part(name: str, whole: torch.Tensor, spec: Spec, num_micro: int, mesh: Mesh, rank: int) -> torch.Tensor:
    shape = tuple(whole.shape)
    is_batched = bool(spec.shape) and shape == (spec.shape[0] * num_micro, *spec.shape[1:])
    if not is_batched and shape != spec.shape:
        raise TraceError(
            f"the program was made for another shape of {name}",
            values=f"{shape}",
            alternatives=f"{(spec.shape[0] * num_micro, *spec.shape[1:])}" if spec.shape else f"{spec.shape}",
        )
    chunks = whole.chunk(num_micro) if is_batched else (whole,)
    return torch.cat([cut(chunk, spec, mesh, rank) for chunk in chunks]) if is_batched else cut(whole, spec, mesh, rank)


def cut(tensor: torch.Tensor, spec: Spec, mesh: Mesh, rank: int) -> torch.Tensor:
    """Rank's shard of one tensor; axes in mesh order, so that the first axis is the outer one."""
    where = mesh.coordinate(rank)
    for axis, text in spec.placements:
        placement = Placement.parse(text)
        if placement.is_shard:
            tensor = tensor.chunk(mesh.size(axis), placement.dim)[where[axis]]
    return tensor.contiguous()
