"""A plan's mesh and batch in words, as reports begin with them."""

from __future__ import annotations

import itertools

from autopar.program import GeneratedProgram


def axes_words(compiled: GeneratedProgram) -> str:
    """`dp = 4 ranks across nodes, tp = 8 ranks inside a node`."""
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
    """`pipeline ranks 0-1: dp2 x tp4 of 8 a100-80g; pipeline rank 2: dp4 of 4 l4`."""
    parts, first = [], 0
    for stage_mesh, run in itertools.groupby(compiled.plan.stage_meshes):
        last = first + len(list(run)) - 1
        numbers = f"pipeline rank {first}" if first == last else f"pipeline ranks {first}-{last}"
        parts.append(f"{numbers}: {stage_mesh.mesh} of {compiled.cluster.groups[stage_mesh.group]}")
        first = last + 1
    return "; ".join(parts)


def batch_words(compiled: GeneratedProgram) -> str:
    """`256 rows a step: 4 micro-batches of 8 rows per dp rank`."""
    plan = compiled.plan
    whole, count = plan.global_batch_size // plan.num_micro_batches, plan.num_micro_batches
    rows = sorted({whole // stage_mesh.mesh.num_data_ranks for stage_mesh in plan.stage_meshes})
    noun = "micro-batch" if count == 1 else "micro-batches"
    twice = ", whose forwards run twice, first for sums over the batch" if compiled.best.graph.has_first_pass else ""
    each = "row" if rows == [1] else "rows"
    return (
        f"{plan.global_batch_size} rows a step: {count} {noun} of {' or '.join(map(str, rows))} {each} "
        f"per dp rank{twice}"
    )


def precision_words(compiled: GeneratedProgram) -> str:
    """`bf16`, and what is in fp8."""
    plan = compiled.plan
    return plan.precision + (", linear layers of repeated layers in fp8 (e4m3)" if plan.fp8 else "")
