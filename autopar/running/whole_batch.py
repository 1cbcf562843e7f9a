"""Assemble a whole batch from the parts that the ranks have: the inverse of `running/local_batch.py`.

Every rank sends rank 0 the inputs whose part no earlier rank has. A rank's part of a dim consists of runs of global
indices (`codegen.runtime.parameters.runs`); rank 0 copies them to their places.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir.mesh import Mesh
from autopar.running.local_batch import inputs_of, mesh_of
from codegen.program import PipelineProgram, Program, Spec
from codegen.runtime.parameters import Param, parse_placement, runs

Parts = Mapping[str, Tensor]


def share_of_rank(program: Program | PipelineProgram, part: Parts, rank: int) -> dict[str, Tensor]:
    """Return the inputs that a rank sends: those whose part no earlier rank of its mesh has."""
    mesh, place, inputs = inputs_of(program, rank)
    coordinate = mesh.coordinate(place)

    def is_first(spec: Spec) -> bool:
        cut = {axis for axis, text in spec.placements if parse_placement(text)[0] == "S"}
        return not any(coordinate[axis] for axis in mesh.axes if axis not in cut)

    return {name: part[name].detach().cpu() for name, spec in inputs.items() if is_first(spec)}


def assemble(program: Program | PipelineProgram, shares: Sequence[Parts]) -> dict[str, Tensor]:
    """Assemble the whole batch. shares: `share_of_rank` of every rank.

    Raises ValueError where they are no parts of one batch.
    """
    wholes: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    for rank, share in enumerate(shares):
        mesh, place, inputs = inputs_of(program, rank)
        for name, part in share.items():
            spec = inputs[name]
            dims = _runs(spec, mesh, place)
            local = tuple(sum(length for _, _, length in dim_runs) for dim_runs in dims)
            count = _num_micro_batches(part, local, program.any.num_micro_batches)
            shape = (spec.shape[0] * count, *spec.shape[1:]) if spec.shape else ()
            whole = wholes.setdefault(name, part.new_empty(shape))
            if whole.shape != shape or whole.dtype != part.dtype:
                raise ValueError(f"ranks have parts of {name} of different shapes or dtypes")
            absent = missing.setdefault(name, torch.ones(shape, dtype=torch.bool))
            chunks = (_chunks(tensor, count) for tensor in (part, whole, absent))
            for source, target, left in zip(*chunks, strict=True):
                for at, to in _places(dims):
                    target[to], left[to] = source[at], False
    if wholes.keys() != program.inputs.keys() or any(bool(left.any()) for left in missing.values()):
        raise ValueError("the ranks' parts do not make a whole batch")
    return {name: wholes[name] for name in program.inputs}


def _runs(spec: Spec, mesh: Mesh, place: int) -> list[list[tuple[int, int, int]]]:
    """Return, by dim, the (local start, global start, length) of a rank's runs of one micro-batch."""
    placements: dict[str, Any] = dict(spec.placements)
    param, rank_mesh = Param(spec.shape, dtype=spec.dtype, **placements), mesh_of(mesh, place)
    return [runs(dim, param, rank_mesh) for dim in range(len(spec.shape))]


def _num_micro_batches(part: Tensor, local: tuple[int, ...], most: int) -> int:
    """Return whether an input has the rows of all micro-batches or, where all share them, of one."""
    for count in (most, 1):
        if tuple(part.shape) == ((local[0] * count, *local[1:]) if local else ()):
            return count
    raise ValueError(f"a part has shape {tuple(part.shape)}, and the program's has {local} in each micro-batch")


def _chunks(tensor: Tensor, count: int) -> Sequence[Tensor]:
    return tensor.chunk(count) if tensor.dim() and math.prod(tensor.shape) else [tensor]


def _places(dims: list[list[tuple[int, int, int]]]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Yield (slices of the part, slices of the whole), box by box."""
    for box in itertools.product(*dims):
        yield (
            tuple(slice(at, at + length) for at, _, length in box),
            tuple(slice(to, to + length) for _, to, length in box),
        )
