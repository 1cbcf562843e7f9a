"""Planning on several ranks: rank 0 plans and sends its plan to the others; the models of all ranks are compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autopar.costs.emitted import mixtures_of
from autopar.errors import PlanError
from autopar.ir.graph import Graph, LayerRun
from autopar.planning.planner import SearchResult
from autopar.planning.request import Request, pricer_for
from autopar.sharding.assignment import Candidate
from codegen.passes.once_per_node import Neighbors


def planned_together(request: Request, plan: Callable[[], SearchResult]) -> SearchResult:
    """Return the result of `plan`, under torch.distributed that of rank 0: its candidate or its error is sent to all
    ranks.

    The graph is sent too. Two processes may trace one model into graphs whose calls differ in order and name: a set
    of strings that forward iterates over is ordered by the process's hash seed. Ranks that run different programs
    wait for each other forever. Raises PlanError on every rank if the models of the ranks differ in more than that.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return plan()
    outline = outline_of(request.trace(request.global_batch_size))
    message: list[Any] = [None]
    result: SearchResult | None = None
    if dist.get_rank() == 0:
        try:
            result = plan()
            message = [(result.best, outline)]
        except Exception as error:  # must reach the other ranks, which wait for a plan
            message = [error]
    dist.broadcast_object_list(message, src=0)
    if isinstance(message[0], Exception):
        raise message[0]
    best, first = message[0]
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, outline == first)
    if not all(others):
        raise PlanError(
            "the ranks have different models or example inputs",
            values=f"rank {others.index(False)} differs from rank 0 in parameters, inputs or operators",
            alternatives="the same model, loss and shapes of a batch on every rank",
        )
    return result or SearchResult((best,), (), (), is_given=True)


def neighbors_of(request: Request, best: Candidate) -> Neighbors:
    """Return how many ranks that share out experts share a node, for rows that cross between nodes once per node.
    Rank 0's view of the cluster decides: ranks that send other rows wait for each other forever. On unlike stage
    meshes rows go straight."""
    plan = best.plan
    pricer = pricer_for(request, plan.mesh, plan.num_micro_batches)
    mixtures = [] if plan.pipeline.stage_meshes else mixtures_of(best.operators.values(), plan.mesh)
    broadcast = [{mixture: pricer.contractions.rows.neighbors(*mixture) for mixture in mixtures}]
    if broadcast[0] and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(broadcast, src=0)
    return lambda *mixture: broadcast[0].get(mixture, 0)


def outline_of(graph: Graph) -> tuple[Any, ...]:
    """Return the properties of a graph that do not depend on the order and names of its calls."""
    nodes = [n for piece in graph.body for n in (piece.layer.nodes if isinstance(piece, LayerRun) else (piece,))]
    calls = Counter((node.op, node.outputs) for node in nodes)
    stored = sorted((p.name, p.meta.shape, str(p.meta.dtype), p.is_buffer) for p in graph.parameters)
    return graph.name, graph.inputs, stored, calls
