"""A solved pipeline as a plan: its stages, recompute modes and decisions, priced as any other plan."""

from __future__ import annotations

from dataclasses import replace

from autopar.mesh import Mesh
from autopar.plan import Pipeline, Plan
from autopar.planning.pipelines import Found
from autopar.planning.predict import predict
from autopar.planning.request import Candidate, Request, operators_at, pricer_for, unequal_of
from autopar.planning.stage_points import pipeline_of
from autopar.planning.unequal.problem import FoundUnequal
from autopar.seats import Seat, envelope
from autopar.sharding.choices import Choices, compress, on_axes


def candidate_of(found: Found, request: Request) -> Candidate:
    """The plan of a solved layout on the graph of its micro-batch, with the prediction of its simulation."""
    layout = found.layout
    pipeline = pipeline_of(found.solution, layout.num_positions, found.schedule, layout.offload)
    return _candidate(request, layout.mesh, layout.num_micro_batches, found.base.choices(layout.zero), pipeline)


def unequal_candidate(found: FoundUnequal, request: Request) -> Candidate:
    """The plan of a pipeline whose positions are not alike; if they turn out to be, it is a plan as any other."""
    pipeline, count = found.pipeline, found.terms.num_micro_batches
    mesh = envelope([seat.mesh for seat in pipeline.seats])
    seats = tuple(Seat(seat.mesh.over(mesh.axes), seat.group) for seat in pipeline.seats)
    are_alike = request.mixed is None and len(set(seats)) == 1
    pipeline = replace(pipeline, seats=() if are_alike else seats)
    return _candidate(request, mesh, count, on_axes(found.choices, found.axes, mesh.axes), pipeline)


def _candidate(request: Request, mesh: Mesh, count: int, choices: Choices, pipeline: Pipeline) -> Candidate:
    graph, operators = operators_at(request, request.global_batch_size // count)
    scopes = compress(graph, operators, mesh, choices)
    plan = Plan(
        graph.name,
        str(request.whole),
        mesh,
        request.global_batch_size,
        count,
        request.precision,
        scopes,
        pipeline=pipeline,
        compression=request.training.compression,
        fp8=request.fp8,
    )
    pricer = pricer_for(request, mesh, count, pipeline.offload)
    prediction = predict(graph, operators, pricer, choices, pipeline, unequal_of(request, plan))
    return Candidate(replace(plan, prediction=prediction), graph, operators, choices, None)
