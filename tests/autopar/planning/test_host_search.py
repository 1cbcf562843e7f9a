"""The search where hosts are slower than their devices: its bounds hold, and what it finds is the best of all."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest

from autopar.costs.layer_costs import HOST
from autopar.ir.mesh import Mesh
from autopar.planning.bounds import bound, bound_without_parameters, tightened
from autopar.planning.candidates import candidate_of
from autopar.planning.one_stage import lower_bound, meshes
from autopar.planning.pipelines import EqualSearch
from autopar.planning.planner import search_plans
from autopar.planning.request import Request
from autopar.planning.stage_problem import StageProblem
from cost_models.machine import Cluster
from search.inter_op import PipelineInfeasibleError
from tests.autopar.requests import request_for


def slow_host(name: str, cluster: str = "4 a100-80g", **constraints: object) -> Request:
    request = request_for(name, cluster, **constraints)
    return replace(request, cluster=Cluster.parse(cluster))


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
    best = EqualSearch(request).run().found[0]
    assert best.objective == pytest.approx(min(alone.values()), rel=1e-9) and len(alone) > 100
    found = candidate_of(best, request).plan.prediction
    assert found.step_seconds == pytest.approx(best.objective, rel=0.1)
    assert found.seconds[HOST] > 0.5 * found.step_seconds


def test_one_stage_is_the_best_of_all_meshes() -> None:
    limits = {"pp": 1, "ddp": 1, "recompute": "none", "offload": "none"}
    request = slow_host("llama", **limits)
    alone = {}
    for mesh in meshes(request):
        pinned = slow_host("llama", **limits, dp=mesh.size("dp"), tp=mesh.size("tp"))
        alone[mesh] = search_plans(pinned).best.plan.prediction.step_seconds
        assert lower_bound(mesh, request) <= alone[mesh] * (1 + 1e-9)
    best = search_plans(request).best.plan
    assert best.prediction.step_seconds == pytest.approx(min(alone.values()), rel=1e-12)
    assert math.isfinite(min(alone.values())) and Mesh.parse("dp4") in alone
