"""The switch `backend`: the executor of the computation between collectives.

"eager" is torch itself. "inductor" compiles the layers' regions (`codegen/runtime/compiled_layers.py`); layers with
selective recomputation run eagerly under it. "async-tp", asynchronous tensor parallelism, also runs eagerly and fuses
linear layers with the tp collectives before and after them (`codegen/passes/async_tp.py`). The choice of a plan and its
price do not depend on the backend.
"""

from __future__ import annotations

import torch

from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.lowering.completion import EAGER
from autopar.settings.fp8 import require_fp8
from codegen.program import PipelineProgram, Program
from codegen.runtime.compiled_layers import COMPILE_SECONDS, why_unavailable
from cost_models.mixed_cluster import AnyCluster

NOTHING_ASYNCHRONOUS = (
    "backend='async-tp' changes nothing: no linear layer directly follows an all_gather of rows on tp, or precedes a "
    "reduce_scatter (plans with tp that shard sequences between layers have such layers)"
)


def check_layers_compile(backend: str, recompute: str | None) -> None:
    """Raise ConstraintError if inductor would compile no layer. recompute: the mode that all layers are pinned to."""
    if backend == "inductor" and recompute == "selective":
        raise ConstraintError(
            "inductor cannot compile layers with selective recomputation, as it decides itself what a layer keeps",
            values="backend='inductor' with recompute=selective",
            alternatives=["recompute=none, offload or full", *EAGER],
        )


def require_backend(program: Program | PipelineProgram, cluster: AnyCluster) -> None:
    """Raise ConstraintError if this machine cannot run the program's backend or its fp8 products."""
    on_gpu = torch.cuda.is_available() and not is_cpu(cluster.groups[0])
    device = torch.device("cuda" if on_gpu else "cpu")
    require_fp8(program, device)
    if program.any.backend != "inductor":
        return
    reason = why_unavailable(device)
    if reason:
        raise ConstraintError("backend='inductor' cannot compile on this machine", values=reason, alternatives=EAGER)


def patience_seconds(program: Program | PipelineProgram) -> float:
    """Return the least time that ranks wait for one another, which is long for a program that compiles."""
    return COMPILE_SECONDS if program.any.backend == "inductor" else 0.0
