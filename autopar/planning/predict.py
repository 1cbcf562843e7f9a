"""The prediction of a plan: its stages priced on their meshes, put together and simulated.

`test_predict` checks that the seconds add up to the search's objective.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

from autopar.costs.cost_table import unit_costs
from autopar.costs.layer_costs import LayerCost, chosen_seconds
from autopar.costs.pipeline_costs import ChainCosts, PipelineCosts, pipeline_costs
from autopar.costs.price import Pricer
from autopar.costs.stage_boundaries import boundary_bytes
from autopar.costs.stage_costs import Simulated
from autopar.ir.graph import Graph
from autopar.ir.plan_data import Pipeline
from autopar.ir.stage_mesh import StageMesh
from autopar.plan import Plan
from autopar.planning.request import Request, pricer_for
from autopar.sharding.assignment import Assignment, Candidate, on_axes
from autopar.sharding.call_options import Operator

Known = tuple[dict[Hashable, dict[str, LayerCost]], Hashable]
"""Cached costs of units, by a candidate's key and its stage meshes."""


def chosen(plan: Plan) -> float:
    """Return the seconds that plan choice compares."""
    return chosen_seconds(plan.prediction.seconds)


def predicted(request: Request, candidate: Candidate, known_units: Known | None = None) -> Candidate:
    """Return the candidate with a new prediction of its plan."""
    prediction = simulate_plan(request, candidate, known_units).prediction
    return replace(candidate, plan=replace(candidate.plan, prediction=prediction))


def one_stage_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, assignment: Assignment
) -> PipelineCosts:
    """Price a plan of one stage that keeps everything. pricer: on the plan's mesh."""
    costs = unit_costs(graph, operators, pricer, assignment)
    return pipeline_costs([_chain_costs(graph, pricer, assignment, costs)], Pipeline(), pricer.cluster)


def simulate_plan(request: Request, candidate: Candidate, known_units: Known | None = None) -> Simulated:
    """Return the plan's timeline and its prediction; a plan without stages is one stage. Every stage is priced on
    the mesh of its pipeline rank."""
    plan, graph, operators = candidate.plan, candidate.graph, candidate.operators
    chains: dict[StageMesh, ChainCosts] = {}
    costs_of, key = known_units or ({}, None)
    for stage_mesh in dict.fromkeys(plan.stage_meshes):
        pricer, assignment = priced_decisions(request, candidate, stage_mesh)
        if (key, stage_mesh) not in costs_of:
            costs_of[key, stage_mesh] = unit_costs(graph, operators, pricer, assignment)
        chains[stage_mesh] = _chain_costs(graph, pricer, assignment, costs_of[key, stage_mesh], stage_mesh.group)
    capacities = [float(request.capacity_bytes(stage_mesh.group)) for stage_mesh in plan.stage_meshes]
    return pipeline_costs(
        [chains[stage_mesh] for stage_mesh in plan.stage_meshes], plan.pipeline, request.whole
    ).simulated(capacities)


def priced_decisions(request: Request, candidate: Candidate, stage_mesh: StageMesh) -> tuple[Pricer, Assignment]:
    """Return the prices on the mesh of a pipeline rank, and the plan's decisions on its axes."""
    plan = candidate.plan
    group, mesh = request.of_group(stage_mesh.group), stage_mesh.mesh.compact
    has_first_pass = candidate.graph.has_first_pass
    pricer = pricer_for(group, mesh, plan.num_micro_batches, plan.pipeline.offload, has_first_pass)
    return pricer, on_axes(candidate.assignment, plan.mesh.axes, mesh.axes)


def _chain_costs(
    graph: Graph, pricer: Pricer, assignment: Assignment, costs: Mapping[str, LayerCost], group: int = 0
) -> ChainCosts:
    """Price every unit of the chain under decisions on the pricer's mesh, in a group of nodes."""
    return ChainCosts(
        graph=graph,
        pricer=pricer,
        parameters=assignment.parameters,
        costs=costs,
        boundary_bytes=boundary_bytes(graph, pricer.mesh, assignment),
        group=group,
    )
