"""A solved pipeline as a plan: its stages, recompute modes and decisions, priced like any other plan."""

from __future__ import annotations

from dataclasses import replace

from autopar.ir.stage_mesh import StageMesh, envelope
from autopar.plan import Plan
from autopar.planning.predict import predicted
from autopar.planning.request import Request
from autopar.planning.shared_costs import KnownCosts
from autopar.planning.solved_layers import solved_anew, stored_parameters
from autopar.planning.stage_problem import PipelineCut
from autopar.sharding.assignment import Candidate, compress
from autopar.sharding.batch_rescaling import suits


def candidate_of(cut: PipelineCut, request: Request, known_costs: KnownCosts | None = None) -> Candidate:
    """Return the plan of a solved config on the graph of its micro-batch, with the prediction of its simulation.

    If all stage meshes are equal, the plan leaves them out. known: cached plan parts.
    """
    known_costs = known_costs or KnownCosts(request)
    capacities = tuple(map(request.capacity_bytes, range(len(request.whole.groups))))
    candidates = known_costs.candidates.setdefault((cut.config, capacities), [])
    for pipeline, candidate in candidates:
        if pipeline == cut.pipeline:
            return candidate  # type: ignore[no-any-return]
    candidate = _candidate(cut, request, known_costs)
    candidates.append((cut.pipeline, candidate))
    return candidate


def _candidate(cut: PipelineCut, request: Request, known_costs: KnownCosts) -> Candidate:
    config, meshes = cut.config, {stage_mesh.mesh for stage_mesh in cut.pipeline.stage_meshes}
    mesh = (
        cut.pipeline.stage_meshes[0].mesh
        if len(meshes) == 1
        else envelope([stage_mesh.mesh for stage_mesh in cut.pipeline.stage_meshes])
    )
    stage_meshes = tuple(
        StageMesh(stage_mesh.mesh.over(mesh.axes), stage_mesh.group) for stage_mesh in cut.pipeline.stage_meshes
    )
    are_alike = request.mixed is None and len(set(stage_meshes)) == 1
    pipeline = replace(cut.pipeline, stage_meshes=() if are_alike else stage_meshes)
    count, rows = config.num_micro_batches, request.global_batch_size // config.num_micro_batches
    graph, operators = known_costs.operators(request, rows)
    key = mesh, config.stage_meshes, config.rows, count, config.zero, config.multiplier
    if key not in known_costs.decided:
        assignment = replace(cut.solved_layer, mesh=mesh).assignment(config.zero, rows)
        if not suits(assignment, graph, operators, mesh):  # a model that differs at few rows
            assignment = solved_anew(request, graph, operators, mesh, config.multiplier)
            stored = stored_parameters(assignment, mesh.axes, mesh.axes, config.zero)
            assignment = replace(assignment, parameters=stored)
        known_costs.decided[key] = assignment, compress(graph, operators, mesh, assignment)
    assignment, scopes = known_costs.decided[key]
    plan = Plan(
        model=graph.name,
        cluster=str(request.whole),
        mesh=mesh,
        global_batch_size=request.global_batch_size,
        num_micro_batches=count,
        precision=request.precision,
        scopes=scopes,
        pipeline=pipeline,
        compression=request.training.compression,
        fp8=request.fp8,
        padded_to=graph.padded_to,
        experts_padded_to=graph.experts_padded_to,
        heads_padded_to=graph.heads_padded_to,
    )
    candidate = Candidate(plan=plan, graph=graph, operators=operators, assignment=assignment, solution=None)
    return predicted(request, candidate, (known_costs.unit_costs, (key, config.offload)))
