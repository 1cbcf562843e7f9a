"""The switch `backend`: who runs what a layer computes between collectives.

"eager" is torch itself. "inductor" compiles the layers' regions (`codegen/runtime/compiled_layers.py`); layers that
recompute selectively run eagerly under it. "async-tp", asynchronous tensor parallelism, is eager too, with linear
layers and the collectives of tp before and after them as one call (`codegen/async_tp.py`). Plans are neither chosen nor
priced for either.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.settings.fp8 import require_fp8
from codegen.program import PipelineProgram, Program
from codegen.runtime.compiled_layers import COMPILE_SECONDS, why_unavailable
from cost_models.mixed import AnyCluster

EAGER = ("backend='eager'",)
NOTHING_ASYNCHRONOUS = (
    "backend='async-tp' changes nothing: no linear layer stands alone after an all_gather, or before a reduce_scatter, "
    "of rows on tp (which plans with tp and sequences cut between layers have)"
)


def check_layers_compile(backend: str, recompute: str | None) -> None:
    """Raises ConstraintError where inductor would compile no layer. recompute: the mode that all are pinned to."""
    if backend == "inductor" and recompute == "selective":
        raise ConstraintError(
            "inductor decides what a compiled layer keeps, so layers that recompute selectively are not compiled",
            values="backend='inductor' with recompute=selective",
            alternatives=["recompute=none, offload or full", *EAGER],
        )


def with_backend(program: Program | PipelineProgram, backend: str) -> Program | PipelineProgram:
    """The program for that backend. Raises ConstraintError where inductor would have no layer to compile."""
    if backend == "inductor" and not any(map(_compiles, program.programs)):
        raise ConstraintError(
            "backend='inductor' compiles layers, and this program has none that it could",
            values=f"{program.name}: no repeated layers, or all of them recompute selectively",
            alternatives=["recompute=none, offload or full", *EAGER],
        )
    return program.map(lambda stage: replace(stage, backend=backend))


def _compiles(stage: Program) -> bool:
    """Whether some layer does not recompute selectively."""
    modes = {name: [mode for mode, _ in runs] for name, runs in stage.recompute.items()}
    return any(mode != "selective" for layer in stage.layer_names for mode in modes.get(layer, ["none"]))


def require_backend(program: Program | PipelineProgram, cluster: AnyCluster) -> None:
    """Raises ConstraintError if this machine cannot run the program: its backend, or its products in fp8."""
    on_gpu = torch.cuda.is_available() and not is_cpu(cluster.groups[0])
    device = torch.device("cuda" if on_gpu else "cpu")
    require_fp8(program, device)
    if program.any.backend != "inductor":
        return
    reason = why_unavailable(device)
    if reason:
        raise ConstraintError("backend='inductor' cannot compile on this machine", values=reason, alternatives=EAGER)


def patience_seconds(program: Program | PipelineProgram) -> float:
    """How long ranks must wait for one another at least: for one that compiles, long."""
    return COMPILE_SECONDS if program.any.backend == "inductor" else 0.0
