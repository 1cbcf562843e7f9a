"""A plan in words: in one line, and its mesh, batch and precision for the first lines of a report."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from autopar.ir.plan_data import StagePlan
from autopar.plan import Plan
from autopar.program import GeneratedProgram
from autopar.units import counted


def plan_words(plan: Plan) -> str:
    """Return `dp2 x tp2, 4 micro-batches`."""
    return f"{plan.mesh_text}, {counted(plan.num_micro_batches, 'micro-batch')}"


def full_words(plan: Plan) -> str:
    """Return all decisions that hold for the whole plan: `pp2 x dp2, 4 micro-batches, 1f1b, ZeRO-1, ...`."""
    return ", ".join([plan_words(plan), *_further(plan)])


def _further(plan: Plan) -> Iterator[str]:
    if plan.pipeline.schedule:
        yield plan.pipeline.schedule
    if zero_stage(plan):
        yield f"ZeRO-{zero_stage(plan)}"
    modes = recompute_modes(plan)
    yield from (f"{mode} recomputation of {counted(count, 'layer')}" for mode, count in modes.items())
    if plan.pipeline.offload:
        yield f"{plan.pipeline.offload} on the host"


def zero_stage(plan: Plan) -> int:
    """Return the highest ZeRO stage of a parameter."""
    return max((s.zero for scope in plan.scopes.values() for s in scope.parameters.values()), default=0)


def recompute_modes(plan: Plan) -> Counter[str]:
    """Count layers by recomputation mode, without the mode `none`."""
    layers: Counter[str] = Counter()
    for stage in plan.pipeline.stages:
        for runs in stage.recompute.values():
            for mode, count in runs:
                layers[mode] += count if mode != "none" else 0
    return +layers


def recompute_words(stage: StagePlan) -> str:
    """Return `3 full, 5 none`, with class names if the stage has several classes."""
    several = len(stage.recompute) > 1
    parts = [
        (f"{name}: " if several else "") + ", ".join(f"{count} {mode}" for mode, count in runs)
        for name, runs in stage.recompute.items()
    ]
    return "; ".join(parts) or "none"


def axes_words(compiled: GeneratedProgram) -> str:
    """Return `dp = 4 ranks across nodes, tp = 8 ranks inside a node`."""
    if compiled.plan.pipeline.stage_meshes:
        return _stage_meshes_words(compiled)
    mesh, pipeline_ranks = compiled.plan.mesh, compiled.plan.pipeline.num_pipeline_ranks
    cluster, parts = compiled.cluster.groups[0], []
    if pipeline_ranks > 1:
        spans = mesh.num_ranks * pipeline_ranks > cluster.devices_per_node
        parts.append(f"pp = {pipeline_ranks} pipeline ranks {'across nodes' if spans else 'inside a node'}")
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        spans = mesh.stride(axis) * size > cluster.devices_per_node
        parts.append(f"{axis} = {size} ranks {'across nodes' if spans else 'inside a node'}")
    return ", ".join(parts) or "one rank"


def _stage_meshes_words(compiled: GeneratedProgram) -> str:
    """Return `pipeline ranks 0-1: dp2 x tp4 of 8 a100-80g; pipeline rank 2: dp4 of 4 l4`."""
    parts, first = [], 0
    for stage_mesh, run in itertools.groupby(compiled.plan.stage_meshes):
        last = first + len(list(run)) - 1
        numbers = f"pipeline rank {first}" if first == last else f"pipeline ranks {first}-{last}"
        parts.append(f"{numbers}: {stage_mesh.mesh} of {compiled.cluster.groups[stage_mesh.group]}")
        first = last + 1
    return "; ".join(parts)


def batch_words(compiled: GeneratedProgram) -> str:
    """Return `256 rows a step: 4 micro-batches of 8 rows per dp rank`."""
    plan = compiled.plan
    micro_batch_rows, count = plan.global_batch_size // plan.num_micro_batches, plan.num_micro_batches
    rows = sorted({micro_batch_rows // stage_mesh.mesh.num_data_ranks for stage_mesh in plan.stage_meshes})
    first_pass = "; forward runs twice, first for sums over the batch" if compiled.best.graph.has_first_pass else ""
    row_noun = "row" if rows == [1] else "rows"
    sizes = f"{' or '.join(map(str, rows))} {row_noun} per dp rank"
    batch = f"{counted(plan.global_batch_size, 'row')} a step"
    return f"{batch}: {counted(count, 'micro-batch')} of {sizes}{first_pass}"


def precision_words(compiled: GeneratedProgram) -> str:
    """Return `bf16`, and the layers in fp8."""
    plan = compiled.plan
    return plan.precision + (", fp8 (e4m3) for the linear layers of repeated layers" if plan.fp8 else "")
