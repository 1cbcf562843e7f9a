"""Small planning problems that several test files share: models on meta, wide enough for parallel plans to pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from autopar.costs import evaluate
from autopar.costs.placer import Placer
from autopar.costs.price import Pricer
from autopar.costs.rates import Training, is_cpu
from autopar.costs.saved import saved_tensors
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph, LayerRun, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.planning.request import Request, decode, pricer_for
from autopar.planning.search_space import SearchSpace, build_search_space
from autopar.settings.constraints import Constraints
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, operators_of
from autopar.sharding.scopes import scopes_of
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from search.intra_op import solve
from search.problem import Problem

BATCH = 8


@cache
def graph_of(name: str, rows: int = BATCH, width: int = 512) -> Graph:
    with torch.device("meta"):
        example = EXAMPLES[name](layers=3, batch_size=BATCH, seq_len=32, width=width, vocab_size=1024)
    return trace(example.model, example.inputs, example.loss_fn, batch_size=rows)


def hostless(cluster: Cluster) -> Cluster:
    """A cluster whose hosts take no time, as they would hide behind layers of a usual size."""
    return replace(cluster, device=replace(cluster.device, host_call_seconds=0.0))


def request_for(name: str, cluster: str = "4 a100-80g", **constraints: Any) -> Request:
    """On hosts that take no time: the models are so small that nothing else would count."""

    def traced(rows: int) -> Graph:
        return graph_of(name, rows)

    limits = Constraints.parse(constraints)
    return Request(BatchedTrace(traced), hostless(Cluster.parse(cluster)), BATCH, "fp32", Training(), limits)


@dataclass(frozen=True)
class Setting:
    """One model on one mesh: the space of its plans."""

    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    pricer: Pricer
    search_space: SearchSpace

    def without_overlap(self) -> Setting:
        """The same where no sum runs beside weight gradients."""
        pricer = replace(self.pricer, rates=replace(self.pricer.rates, overlap_share=0.0))
        search_space = build_search_space(self.graph, self.operators, pricer, request_for("llama").constraints)
        return Setting(self.graph, self.operators, pricer, search_space)

    def assignment(self, seed: int) -> tuple[tuple[int, ...], Assignment]:
        """Option numbers and decisions of the optimum (seed 0), or of one under random extra costs."""
        problem = self.search_space.problem
        if seed:
            random = np.random.default_rng(seed)
            scale = solve(problem).objective / 10
            noisy = [replace(v, costs=v.costs + scale * random.random(v.num_options)) for v in problem.variables]
            problem = Problem(tuple(noisy), problem.edges, problem.limit)
        chosen = solve(problem).assignment
        return chosen, decode(self.search_space, chosen)


@cache
def setting(name: str, mesh: str, micro_batches: int = 1, width: int = 512) -> Setting:
    request = request_for(name)
    graph = graph_of(name, BATCH // micro_batches, width)
    operators = operators_of(graph)
    pricer = pricer_for(request, Mesh.parse(mesh), micro_batches)
    return Setting(graph, operators, pricer, build_search_space(graph, operators, pricer, request.constraints))


def searched_activation_bytes(it: Setting, assignment: Assignment) -> float:
    """What calls keep for one micro-batch, as the search of sharding counts it: resharded copies are left out."""
    top, total = {p.name for p in it.graph.parameters}, 0.0
    for scope in scopes_of(it.graph):
        own = top | {p.name for p in (scope.layer.parameters if scope.layer else ())}
        kept = saved_tensors(scope.nodes, scope.metas, frozenset(own), on_cpu=is_cpu(it.pricer.cluster))
        for node in scope.nodes:
            key = scope.name, node.name
            refs = kept.get(node.name, ())
            total += scope.count * it.pricer.saved_bytes(it.operators[key], assignment.operators[key], refs)
    return total


def take_nothing_for_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions take for granted what the search does, which has no program: that no decision parts what kernels
    could join."""
    monkeypatch.setattr(evaluate, "priced", lambda program, graph, operators, pricer: pricer)


def shared_reshard_seconds(it: Setting, assignment: Assignment) -> float:
    """Seconds of a step that the search counts for every reader of a reshard, and programs run for the first alone."""
    place, total = Placer(it.graph, assignment), 0.0
    for scope in scopes_of(it.graph):
        uses: list[tuple[Ref, Placements]] = []
        for node in scope.nodes:
            uses += zip(node.inputs, assignment.operators[scope.name, node.name].inputs, strict=True)
        for run in (piece for piece in it.graph.body if isinstance(piece, LayerRun)):
            formal = [assignment.tensors[run.layer.name, Ref(name)] for name, _ in run.layer.inputs]
            if not scope.name:
                uses += zip(run.args, formal, strict=True)
            elif scope.name == run.layer.name:
                uses += [(run.layer.outputs[output], formal[position]) for position, output in run.carried]
        for (ref, target), count in Counter(uses).items():
            seconds = it.pricer.rates.reshard_seconds(place.where(scope, ref), target, scope.metas[ref])
            total += (count - 1) * seconds * scope.count * it.pricer.training.num_micro_batches
    return total
