"""Plans that the tests of certificates share, each traced and planned once in a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import autopar
from autopar.compiled import CompiledProgram
from benchmarks.verify_pipelines import mixed_cluster
from codegen.program import PipelineProgram
from cost_models.machine import Cluster
from cost_models.mixed_cluster import AnyCluster
from examples.models import EXAMPLES
from tests.autopar.requests import hostless


def compiled(
    name: str, cluster: AnyCluster | str, factory: dict[str, Any] | None = None, precision: str = "fp32", **limits: Any
) -> CompiledProgram:
    example = EXAMPLES[name](**(factory or {}))
    return autopar.compile(
        example.model,
        cluster,
        example_inputs=example.inputs,
        loss_fn=example.loss_fn,
        precision=precision,
        constraints=limits,
    )


@cache
def dense() -> CompiledProgram:
    """Grouped heads under every axis that a dense model has, as a pipeline."""
    return compiled("llama_gqa", "8 h100-sxm", {"layers": 4}, pp=2, dp=2, tp=2, micro_batches=2, schedule="1f1b")


@cache
def megatron() -> CompiledProgram:
    """Tensor parallelism as Megatron has it, which a model as small as this would not choose, on a host that takes no
    time: where devices wait for it, fewer and larger reshards are chosen."""
    cut = {f"*.{name}.weight": {"tp": "S(0)"} for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
    cut |= {f"*.{name}.weight": {"tp": "S(1)"} for name in ("o_proj", "down_proj")}
    return compiled("llama", hostless(Cluster.parse("2 h100-sxm")), None, dp=1, tp=2, parameters=cut)


@cache
def mixture() -> CompiledProgram:
    return compiled("mixtral", "8 h100-sxm", None, dp=4, ep=2, tp=2, micro_batches=1)


@cache
def unlike() -> CompiledProgram:
    """Pipeline ranks of one, one and two ranks, whose optimizer's state the host holds."""
    limits = {"pp": 3, "tp": 1, "zero": 1, "schedule": "1f1b", "micro_batches": 4, "recompute": "selective"}
    return compiled("gpt2", mixed_cluster((2, 1, 1)), {"layers": 4}, **limits, offload="optimizer")


def pipeline(program: CompiledProgram) -> PipelineProgram:
    assert isinstance(program.program, PipelineProgram)
    return program.program
