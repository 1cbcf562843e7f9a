"""Batches of other shapes than the first one's: a program of the same plan for each, made when such a batch comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.compile import compile_with
from autopar.compiled import CompiledProgram
from autopar.errors import DataError
from autopar.plan import Plan
from autopar.settings.compile_options import CompileOptions
from autopar.training.config import TrainerConfig
from autopar.training.loaders import num_rows

MOST_SHAPES = 32
"""Shapes that the batches of one run may have. Each takes a second or more to compile, and some memory."""


def is_of_another_shape(program: CompiledProgram, named: Mapping[str, Any]) -> bool:
    """Return whether a batch differs from the program's in sizes alone. The step reports all other differences."""
    inputs, stage = program.program.inputs, program.program.any
    if not named.keys() <= {*inputs, *stage.unused_inputs, *stage.fixed_inputs}:
        return False
    for name, spec in inputs.items():
        value, wanted = named.get(name), getattr(torch, spec.dtype)
        if not isinstance(value, torch.Tensor) or value.dim() != len(spec.shape) or not value.numel():
            return False
        is_rounded = wanted.is_floating_point and wanted.itemsize < 4 and value.dtype == torch.float32
        if value.dtype != wanted and not is_rounded:
            return False
    return True


def program_of_shape(program: CompiledProgram, config: TrainerConfig, batch: Any, num_shapes: int) -> CompiledProgram:
    """Compile a program of the same plan for a batch's shapes. num_shapes: the shapes so far.

    Raises DataError for rows that ranks cannot share evenly, and for too many shapes.
    """
    if num_shapes >= MOST_SHAPES:
        raise DataError(
            f"the batches of a run have at most {MOST_SHAPES} shapes, or values that decide what forward does, since "
            "each needs a program",
            values=f"one more, of {num_rows(batch)} rows",
            alternatives=["pad sequences to a few lengths (buckets)", "one length and DataLoader(drop_last=True)"],
        )
    same = {**config.common, "constraints": None, "global_batch_size": None, "compression": None, "fp8": None}
    options = CompileOptions(
        example_inputs=batch,
        loss_fn=program.loss_fn,
        optimizer=program.optimizer,
        **(same | {"plan": plan_for_rows(program.plan, num_rows(batch))}),
    )
    return compile_with(program.model, program.cluster, options)


def plan_for_rows(plan: Plan, rows: int) -> Plan:
    """Return the plan with the most micro-batches, up to its own, that divide the rows. Raises DataError without
    any."""
    ranks = plan.mesh.num_data_ranks
    for count in range(plan.num_micro_batches, 0, -1):
        if rows % (count * ranks) == 0:
            return replace(plan, num_micro_batches=count, global_batch_size=rows)
    raise DataError(
        "the rows of a batch are divided among the data-parallel ranks",
        values=f"{rows} rows on {plan.mesh_text}",
        alternatives=[f"a multiple of {ranks} rows", "DataLoader(drop_last=True)", f"{plan.global_batch_size} rows"],
    )
