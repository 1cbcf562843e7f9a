"""Complete a lowered program with its backend, its evaluation, and the example batch's inputs that forward ignores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.errors import ConstraintError, TraceError
from codegen.guards import Guard
from codegen.logits import without_logits
from codegen.program import PipelineProgram, Program
from codegen.source.text import is_plain

EAGER = ("backend='eager'",)


def with_backend(program: Program | PipelineProgram, backend: str) -> Program | PipelineProgram:
    """Return the program for a backend. Raises ConstraintError if inductor would have no layer to compile."""
    if backend == "inductor" and not any(map(_compiles, program.programs)):
        raise ConstraintError(
            "backend='inductor' has no layer to compile in this program",
            values=f"{program.name}: no repeated layers, or all of them use selective recomputation",
            alternatives=["recompute=none, offload or full", *EAGER],
        )
    return program.map(lambda stage: replace(stage, backend=backend))


def _compiles(stage: Program) -> bool:
    """Return whether a layer has another mode than selective recomputation."""
    modes = {name: [mode for mode, _ in runs] for name, runs in stage.recompute.items()}
    return any(mode != "selective" for layer in stage.layer_names for mode in modes.get(layer, ["none"]))


def with_inputs_of(
    program: Program | PipelineProgram, batch: Mapping[str, Any], guards: Iterable[Guard] = ()
) -> Program | PipelineProgram:
    """Return the program with its guards, and with the inputs of the example batch that it does not read.

    Raises TraceError for an input that is neither a tensor nor plain data: tensors inside of containers would become
    constants of the program, and other objects cannot be compared with those of a later batch.
    """
    unused = tuple(n for n, value in batch.items() if isinstance(value, torch.Tensor) and n not in program.inputs)
    fixed, values = {n: value for n, value in batch.items() if not isinstance(value, torch.Tensor)}, tuple(guards)
    for name, value in fixed.items():
        if not is_plain(value):
            raise TraceError(
                "every input of the batch is a tensor, or plain data that never changes",
                values=f"{name} is a {type(value).__name__}",
                alternatives="pass tensors under names of their own; or numbers, text, None, lists and dicts of those",
            )
    return program.map(lambda stage: replace(stage, unused_inputs=unused, fixed_inputs=fixed, guards=values))


def with_evaluation(program: Program | PipelineProgram, no_logits: str, reason: str) -> Program | PipelineProgram:
    """Return the program with the reason for which it cannot evaluate, and without logits if these would differ.

    no_logits, reason: why evaluation differs with the logits and without them; "" if it does not.
    """
    program = program.map(lambda stage: replace(stage, no_evaluation=reason))
    return program.map(without_logits) if no_logits else program
