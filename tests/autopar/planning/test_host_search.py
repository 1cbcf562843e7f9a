"""The search where hosts are slower than their devices: its bounds hold, and what it finds is the best of all."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from autopar.costs.layer_costs import HOST
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.planning.bounds import bound, bound_without_parameters, tightened
from autopar.planning.call_costs import CallCosts
from autopar.planning.candidates import candidate_of
from autopar.planning.host_bound import Stretch, total, with_host
from autopar.planning.one_stage import lower_bound, meshes
from autopar.planning.pipelines import EqualSearch
from autopar.planning.planner import search_plans
from autopar.planning.predict import chosen
from autopar.planning.request import Request, decode, pricer_for
from autopar.planning.search_space import SearchSpace, build_search_space
from autopar.planning.stage_problem import StageProblem
from autopar.sharding.call_options import operators_of
from cost_models.machine import Cluster
from examples.models import mlp
from search.inter_op import PipelineInfeasibleError
from search.intra_op import solve
from search.problem import Problem, Solution
from tests.autopar.requests import request_for


def slow_host(name: str, cluster: str = "4 a100-80g", **constraints: object) -> Request:
    request = request_for(name, cluster, **constraints)
    return replace(request, cluster=Cluster.parse(cluster))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pipelines_are_the_best_of_all_and_bounds_hold(name: str) -> None:
    """Every config solved, none skipped by its bound."""
    request = slow_host(name)
    search, alone = EqualSearch(request), dict[object, float]()
    for config in search.configs():
        with contextlib.suppress(PipelineInfeasibleError):
            alone[config] = StageProblem.of(search.costs, config).solve().objective
            assert bound_without_parameters(search.costs, config) <= alone[config] * (1 + 1e-9)
            assert bound(search.costs, config) <= alone[config] * (1 + 1e-9)
            assert tightened(search.costs, config) <= alone[config] * (1 + 1e-9)
    best = EqualSearch(request).run().solutions[0]
    assert best.objective == pytest.approx(min(alone.values()), rel=1e-9) and len(alone) > 100
    plan = candidate_of(best, request).plan
    assert chosen(plan) == pytest.approx(best.objective, rel=0.1)
    assert plan.prediction.seconds[HOST] > 0.5 * plan.prediction.step_seconds


@pytest.mark.slow
def test_one_stage_is_the_best_of_all_meshes() -> None:
    limits = {"pp": 1, "ddp": 1, "recompute": "none", "offload": "none"}
    request = slow_host("llama", **limits)
    alone = {}
    for mesh in meshes(request):
        pinned = slow_host("llama", **limits, dp=mesh.size("dp"), tp=mesh.size("tp"))
        alone[mesh] = chosen(search_plans(pinned).best.plan)
        assert lower_bound(mesh, request) <= alone[mesh] * (1 + 1e-9)
    best = search_plans(request).best.plan
    assert chosen(best) == pytest.approx(min(alone.values()), rel=1e-12)
    assert math.isfinite(min(alone.values())) and Mesh.parse("dp4") in alone


def narrowed(space: SearchSpace, seed: int) -> SearchSpace:
    """With two or three options of each variable, those of the device's optimum among them."""
    generator, best, variables = random.Random(seed), solve(space.problem).assignment, []
    for variable, own in zip(space.problem.variables, best, strict=True):
        kept = {own, *generator.sample(range(variable.num_options), min(2, variable.num_options))}
        is_kept = [option in kept for option in range(variable.num_options)]
        variables.append(replace(variable, costs=np.where(is_kept, variable.costs, np.inf)))
    return replace(space, problem=Problem(tuple(variables), space.problem.edges))


def allowed(problem: Problem, begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Every choice that no infinite cost forbids."""
    index = len(begun)
    if index == len(problem.variables):
        yield begun
        return
    edges = [edge for edge in problem.edges if max(edge.a, edge.b) == index]
    for option, seconds in enumerate(problem.variables[index].costs):
        now = (*begun, option)
        if np.isfinite([seconds, *(edge.costs[now[edge.a], now[edge.b]] for edge in edges)]).all():
            yield from allowed(problem, now)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mesh, seed", [("tp2", 2), ("dp2 x tp2", 1), ("dp2 x tp2", 3)])
@pytest.mark.parametrize("call_seconds", [1e-6, 20e-6, 200e-6])
def test_options_are_the_best_of_all_that_there_are(mesh: str, seed: int, call_seconds: float) -> None:
    """Every choice as a program of its own: devices that are ahead of their hosts, about as fast, and far behind."""
    example = mlp(layers=2, batch_size=4096, in_width=512, width=512, out_width=512)
    graph = trace(example.model, example.inputs, example.loss_fn, batch_size=4096)
    operators, request = operators_of(graph), request_for("llama")
    pricer = pricer_for(request, Mesh.parse(mesh), 1)
    pricer = replace(pricer, rates=replace(pricer.rates, host_call_seconds=call_seconds))
    space = narrowed(build_search_space(graph, operators, pricer, request.constraints), seed)

    def stretches(solution: Solution) -> tuple[Stretch, ...]:
        return CallCosts(graph, operators, pricer, decode(space, solution.assignment)).stretches

    choices = [Solution(each, 0.0, 0.0) for each in allowed(space.problem)]
    fastest = solve(space.problem)
    found = [fastest, *with_host(space, pricer, fastest, stretches)]
    least = min(total(stretches(each)) for each in choices)
    assert len(choices) > 30 and min(total(stretches(each)) for each in found) == pytest.approx(least, rel=1e-9)
    # The first beside the fastest is the best.
    assert total(stretches(found[1 if len(found) > 1 else 0])) == pytest.approx(least, rel=1e-9)
    assert len(found) == (1 if call_seconds == 1e-6 else 2)
