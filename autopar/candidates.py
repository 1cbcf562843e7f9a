"""A solved pipeline as a plan: its stages, recompute modes and decisions, priced as any other plan."""

from __future__ import annotations

from autopar.choices import compress
from autopar.pipelines import Found, pipeline_of
from autopar.plan import Plan
from autopar.predict import predict
from autopar.request import Candidate, Request, operators_at, pricer_for


def candidate_of(found: Found, request: Request) -> Candidate:
    """The plan of a solved layout on the graph of its micro-batch, with the prediction of its simulation."""
    layout, base = found.layout, found.base
    graph, operators = operators_at(request, request.global_batch_size // layout.num_micro_batches)
    choices = base.choices(layout.zero)
    pipeline = pipeline_of(found.solution, layout.num_positions, found.schedule, layout.offload)
    pricer = pricer_for(request, layout.mesh, layout.num_micro_batches, layout.offload)
    plan = Plan(
        graph.name,
        str(request.cluster),
        layout.mesh,
        request.global_batch_size,
        layout.num_micro_batches,
        request.precision,
        compress(graph, operators, layout.mesh, choices),
        predict(graph, operators, pricer, choices, pipeline),
        pipeline=pipeline,
    )
    return Candidate(plan, graph, operators, choices, None)
