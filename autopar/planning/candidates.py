"""A solved pipeline as a plan: its stages, recompute modes and decisions, priced as any other plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.mesh import Mesh
from autopar.plan import Pipeline, Plan
from autopar.planning.bases import decided_anew, stored_parameters
from autopar.planning.pipelines import Found
from autopar.planning.predict import predict
from autopar.planning.request import Request, operators_at, pricer_for, unequal_of
from autopar.planning.stage_points import pipeline_of
from autopar.planning.unequal.problem import FoundUnequal
from autopar.seats import Seat, envelope
from autopar.sharding.carried import suits
from autopar.sharding.choices import Candidate, Choices, compress, on_axes


def candidate_of(found: Found, request: Request) -> Candidate:
    """The plan of a solved layout on the graph of its micro-batch, with the prediction of its simulation."""
    layout = found.layout
    pipeline = pipeline_of(found.solution, layout.num_positions, found.schedule, layout.offload)
    rows = request.global_batch_size // layout.num_micro_batches
    made = Made(found.base.choices(layout.zero, rows), found.base.price, layout.zero)
    return _candidate(request, layout.mesh, layout.num_micro_batches, made, pipeline)


def unequal_candidate(found: FoundUnequal, request: Request) -> Candidate:
    """The plan of a pipeline whose positions are not alike; if they turn out to be, it is a plan as any other."""
    pipeline, terms = found.pipeline, found.terms
    mesh = envelope([seat.mesh for seat in pipeline.seats])
    seats = tuple(Seat(seat.mesh.over(mesh.axes), seat.group) for seat in pipeline.seats)
    are_alike = request.mixed is None and len(set(seats)) == 1
    pipeline = replace(pipeline, seats=() if are_alike else seats)
    made = Made(on_axes(found.choices, found.axes, mesh.axes), terms.price, terms.zero)
    return _candidate(request, mesh, terms.num_micro_batches, made, pipeline)


@dataclass(frozen=True, slots=True)
class Made:
    """Decisions, and under which price of a byte and ZeRO stage they were made."""

    choices: Choices
    price: float
    zero: int


def _candidate(request: Request, mesh: Mesh, count: int, made: Made, pipeline: Pipeline) -> Candidate:
    graph, operators = operators_at(request, request.global_batch_size // count)
    choices = made.choices
    if not suits(choices, graph, operators, mesh):  # a model that is another one with few rows
        choices = decided_anew(request, graph, operators, mesh, made.price)
        choices = replace(choices, parameters=stored_parameters(choices, mesh.axes, mesh.axes, made.zero))
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
