"""A plan from the user: checked against the model, the cluster and the request's options, and priced again."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from autopar.errors import PlanError
from autopar.ir.chain import buffer_across_units, chain
from autopar.ir.graph import Graph, layer_names
from autopar.ir.mesh import PIPELINE_AXIS, ZERO_AXES
from autopar.plan import Plan
from autopar.planning.planner import SearchResult, price_plan
from autopar.planning.refit import refit
from autopar.planning.request import Request, operators_at
from autopar.settings.constraints import Constraints
from autopar.settings.fp8 import check_fp8
from autopar.sharding.assignment import Candidate, expand
from autopar.sharding.call_options import options_of
from autopar.sharding.legal_placements import LegalPlacements
from cost_models.mixed_cluster import AnyCluster
from cost_models.schedule import SCHEDULES, placement


def plan_of_user(
    request: Request, plan: Plan, global_batch_size: int | None, before: Graph | None = None
) -> SearchResult:
    """Price a user's plan with the request's compression, fp8 and basis. before: as `reprice` takes it.

    Raises PlanError for a plan that contradicts the request's constraints or the option `global_batch_size`.
    """
    plan = replace(plan, compression=request.training.compression, fp8=request.fp8, basis=request.basis)
    check_agreement(plan, request.constraints, global_batch_size)
    return reprice(request, plan, before)


def reprice(request: Request, plan: Plan, before: Graph | None = None) -> SearchResult:
    """Validate a plan against the model and predict it again, with its compression and fp8.

    before: the model that the plan was written for, if it is this model with other numbers. The plan is then refitted.
    Raises PlanError, and ConstraintError for a plan in fp8 on a cluster without fp8.
    """
    request = replace(request.compressed(plan.compression), fp8=plan.fp8)
    if plan.fp8:
        check_fp8(request.whole, plan.precision)
    _check_devices(plan, request.whole)
    if plan.precision != request.precision:
        raise PlanError(
            f"{plan.at('precision')}: the plan is for another precision than the program",
            values=f"the plan has {plan.precision}, the program has {request.precision}",
            alternatives=f"precision={plan.precision!r}, or a plan for {request.precision}",
        )
    if plan.global_batch_size % (plan.num_micro_batches * plan.mesh.num_data_ranks):
        raise PlanError(
            f"{plan.at('micro_batches')}: the plan's micro-batches do not divide its batch",
            values={
                "global_batch_size": plan.global_batch_size,
                "micro_batches": plan.num_micro_batches,
                "mesh": str(plan.mesh),
            },
            alternatives="a batch that is a multiple of micro-batches times data-parallel ranks",
        )
    reason = request.trace.whole_batch_reason(plan.num_micro_batches)
    if reason is not None:
        raise PlanError(
            "micro_batches: the model needs its whole batch at once, in one micro-batch",
            values=f"{plan.num_micro_batches} micro-batches, but {reason}",
            alternatives="micro_batches: 1",
        )
    graph, operators = operators_at(request, plan.global_batch_size // plan.num_micro_batches)
    if before is not None:
        options = {key: options_of(operator, plan.mesh) for key, operator in operators.items()}
        plan = refit(plan, before, graph, LegalPlacements(graph, options, plan.mesh))
    check_pipeline(plan, graph)
    assignment = expand(graph, operators, plan)
    candidate: Candidate = price_plan(graph, operators, request, plan, assignment)
    return SearchResult((candidate,), (), (), is_given=True)


def _check_devices(plan: Plan, cluster: AnyCluster) -> None:
    """Raise PlanError unless the plan's pipeline ranks take all devices of every group of nodes."""
    used = [0] * len(cluster.groups)
    for stage_mesh in plan.stage_meshes:
        if stage_mesh.group >= len(used):
            raise PlanError(
                f"{plan.at('pipeline', 'positions')}: a pipeline rank is in a group that the cluster does not have",
                values=f"group {stage_mesh.group} of {cluster}",
                alternatives=", ".join(f"group {i}: {group}" for i, group in enumerate(cluster.groups)),
            )
        used[stage_mesh.group] += stage_mesh.mesh.num_ranks
    for number, group in enumerate(cluster.groups):
        if used[number] != group.num_devices:
            where = f" {group}" if len(used) > 1 else ""
            raise PlanError(
                f"{plan.at('mesh')}: the plan's mesh does not fill the cluster{where}",
                values=f"{plan.mesh_text} has {used[number]} ranks for {group.num_devices} devices",
                alternatives="a cluster of that size, or a new plan",
            )


def check_pipeline(plan: Plan, graph: Graph) -> None:
    """Raise PlanError for stages, modes or a schedule that the model's units cannot have."""
    pipeline, units = plan.pipeline, chain(graph)
    if not pipeline.stages:
        return
    ends = [0, *(stage.last for stage in pipeline.stages)]
    starts = [stage.first for stage in pipeline.stages] + [len(units)]
    if ends != starts or any(stage.first >= stage.last for stage in pipeline.stages):
        raise PlanError(
            f"{plan.at('pipeline', 'stages')}: the stages must follow one another over all blocks of the model",
            values=", ".join(f"{stage.first}-{stage.last - 1}" for stage in pipeline.stages),
            alternatives=f"ranges from 0 to {len(units) - 1} without gaps: " + unit_names(units),
        )
    schedules = (*SCHEDULES, "") if pipeline.num_pipeline_ranks == 1 else SCHEDULES
    if pipeline.schedule not in schedules:
        raise PlanError(
            f"{plan.at('pipeline', 'schedule')}: autopar does not have the plan's schedule",
            values=repr(pipeline.schedule),
            alternatives=", ".join(SCHEDULES),
        )
    if pipeline.num_pipeline_ranks > 1:
        _check_stage_count(plan)
        if buffer := buffer_across_units(graph):
            raise PlanError(
                f"{plan.at('pipeline', 'stages')}: one stage would read a buffer that another one updates",
                values=buffer,
                alternatives="one stage",
            )
    for index, stage in enumerate(pipeline.stages):
        for name, runs in stage.recompute.items():
            count = units[stage.first : stage.last].count(name)
            if sum(number for _, number in runs) != count or name not in layer_names(graph):
                raise PlanError(
                    f"{plan.at('pipeline', 'stages', str(index), 'recompute', name)}: the stage of blocks "
                    f"{stage.first}-{stage.last - 1} has {count} layers {name}",
                    values=f"recompute: {', '.join(f'{mode} {number}' for mode, number in runs)}",
                    alternatives="a mode for each of its layers, such as full 3, none 5",
                )


def _check_stage_count(plan: Plan) -> None:
    """Raise PlanError if the schedule gives the pipeline ranks another number of stages than the plan has."""
    pipeline = plan.pipeline
    num_stages, pipeline_ranks = len(pipeline.stages), pipeline.num_pipeline_ranks
    num_chunks = pipeline.num_chunks if SCHEDULES[pipeline.schedule].chooses_chunks else None
    wanted = len(placement(pipeline.schedule, pipeline_ranks, num_chunks))
    if wanted != num_stages:
        raise PlanError(
            f"{plan.at('pipeline', 'schedule')}: {pipeline.schedule} does not fit the number of stages",
            values=f"{num_stages} stages on {pipeline_ranks} pipeline ranks",
            alternatives=f"{wanted} stages"
            + (
                " or another multiple of the pipeline ranks"
                if num_chunks
                else " (or interleaved, for several per pipeline rank)"
            ),
        )


def check_agreement(plan: Plan, limits: Constraints, global_batch_size: int | None) -> None:
    """Raise PlanError if an option of the user contradicts the plan."""
    pipeline = plan.pipeline
    modes = {mode for stage in pipeline.stages for runs in stage.recompute.values() for mode, _ in runs} or {"none"}
    stages = {s.zero for scope in plan.scopes.values() for s in scope.parameters.values()} - {0} or {0}
    pinned: list[tuple[str, object, Any]] = [
        ("global_batch_size", global_batch_size, plan.global_batch_size),
        ("micro_batches", limits.micro_batches, plan.num_micro_batches),
        ("offload", limits.offload, pipeline.offload),
        ("recompute", limits.recompute, modes.pop() if len(modes) == 1 else modes),
        (PIPELINE_AXIS, limits.degrees.get(PIPELINE_AXIS), pipeline.num_pipeline_ranks),
    ]
    if pipeline.num_pipeline_ranks > 1:
        pinned += [("schedule", limits.schedule, pipeline.schedule), ("chunks", limits.chunks, pipeline.num_chunks)]
    if any(plan.mesh.size(axis) > 1 for axis in ZERO_AXES):
        pinned.append(("zero", limits.zero, stages.pop() if len(stages) == 1 else stages))
    if not pipeline.stage_meshes:
        pinned += [(axis, limits.degrees.get(axis), size) for axis, size in plan.mesh.degrees.items()]
    for name, asked, planned in pinned:
        if asked is not None and asked != planned:
            raise PlanError(
                f"{plan.source or 'the plan'} contradicts an option of this call",
                values=f"{name}={asked or 'none'}, and the plan has {planned or 'none'}",
                alternatives=[f"{name} left out", "a new plan"],
            )


def unit_names(units: tuple[str, ...]) -> str:
    """Return the units of a model with their numbers: `0 top 0, 1-8 Block, 9 top 1`."""
    parts = []
    for name, group in itertools.groupby(range(len(units)), key=lambda i: units[i]):
        numbers = list(group)
        parts.append(f"{numbers[0]}{f'-{numbers[-1]}' if len(numbers) > 1 else ''} {name}")
    return ", ".join(parts)
