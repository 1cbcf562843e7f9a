"""Cut one rank's part of a batch on the host, by the placements of the program's inputs. Needs no process group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import DataError
from autopar.ir.mesh import Mesh
from codegen.program import PipelineProgram, Program, Spec
from codegen.runtime.batch_checks import BatchError, LocalBatch, check_batch, check_guards
from codegen.runtime.mesh import Axis
from codegen.runtime.mesh import Mesh as RankMesh
from codegen.runtime.parameters import Param, shard


def local_batch(program: Program | PipelineProgram, batch: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Return a rank's part of a global batch, by input name. In a pipeline these are the inputs that its stages read.

    Raises DataError for a batch that the program was not made for.
    """
    any_stage, num_micro_batches = program.any, program.any.num_micro_batches
    wanted = {name: Param(spec.shape, dtype=spec.dtype) for name, spec in program.inputs.items()}
    guards = {guard.text: (guard.of, guard.value) for guard in any_stage.guards}
    try:
        check_batch(batch, wanted, num_micro_batches, unused=any_stage.unused_inputs, fixed=any_stage.fixed_inputs)
        check_guards(batch, guards)
    except BatchError as error:
        raise DataError(str(error)) from None
    mesh, mesh_rank, inputs = inputs_of(program, rank)
    local = {name: _part(batch[name], spec, num_micro_batches, mesh, mesh_rank) for name, spec in inputs.items()}
    return LocalBatch(local, {}, batch) if guards else local


def inputs_of(program: Program | PipelineProgram, rank: int) -> tuple[Mesh, int, Mapping[str, Spec]]:
    """Return the rank's mesh, its number in that mesh, and the inputs that its stages read."""
    if isinstance(program, PipelineProgram):
        pipeline_rank, mesh_rank = program.place(rank)
        return Mesh(*program.meshes[pipeline_rank]), mesh_rank, program.inputs_of(pipeline_rank)
    return Mesh(program.axes, program.axis_sizes), rank, program.inputs


def _part(whole: torch.Tensor, spec: Spec, num_micro: int, mesh: Mesh, rank: int) -> torch.Tensor:
    is_batched = bool(spec.shape) and tuple(whole.shape) == (spec.shape[0] * num_micro, *spec.shape[1:])
    if not is_batched:
        return cut(whole, spec, mesh, rank)
    return torch.cat([cut(chunk, spec, mesh, rank) for chunk in whole.chunk(num_micro)])


def cut(tensor: torch.Tensor, spec: Spec, mesh: Mesh, rank: int) -> torch.Tensor:
    """Return a rank's shard of one tensor."""
    return shard(tensor, dict(spec.placements), mesh_of(mesh, rank))


def mesh_of(mesh: Mesh, rank: int) -> RankMesh:
    """Return the mesh as one rank sees it, without processes."""
    coordinate = mesh.coordinate(rank)
    axes = tuple(Axis(name, size, coordinate[name]) for name, size in zip(mesh.axes, mesh.sizes, strict=True))
    return RankMesh(axes, Axis("world", mesh.num_ranks, rank), torch.device("cpu"))
