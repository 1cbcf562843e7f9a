"""The search over parallel configs: what its solved layers assume, where axes lie, ZeRO groups, and budgets."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.costs.evaluate import layer_costs
from autopar.costs.rates import Training
from autopar.errors import InfeasibleError
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.planning.candidates import candidate_of
from autopar.planning.equal_configs import equal_configs
from autopar.planning.pipelines import EqualSearch
from autopar.planning.planner import search_plans
from autopar.planning.request import Request, operators_at, pricer_for, usable_bytes
from autopar.planning.solved_layers import SolvedLayers, named_mesh
from autopar.planning.stage_problem import StageProblem
from autopar.settings.constraints import Constraints
from cost_models import collective
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from search.pipeline_problem import PipelineInfeasibleError, PipelineSolution
from tests.autopar.requests import request_for
from tests.search import exhaustive_pipeline
from tests.turns import by_turns


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def searched(name: str, cluster: str, **constraints: Any) -> EqualSearch:
    return EqualSearch(request_for(name, cluster, **constraints))


@pytest.mark.parametrize(
    ("name", "mesh"), by_turns(["gpt2", "llama", "bert"], ["dp4", "dp4 x tp2", "ddp2 x dp2 x tp2"])
)
def test_a_solved_layer_costs_what_its_mesh_costs(name: str, mesh: str) -> None:
    """Decisions made for two data-parallel ranks, priced on them, against the same decisions on the whole mesh.

    Outside the layers a little grows with the ranks: masks made of the whole batch on every rank, and the cutting of
    tensors axis by axis.
    """
    request, wanted = request_for(name, "8 a100-80g"), Mesh.parse(mesh)
    rows = request.global_batch_size // wanted.num_data_ranks
    solved_layer = SolvedLayers(request).solved_layer(wanted, rows, 0.0)
    assert solved_layer is not None
    rows_of_all = request.global_batch_size
    graph, operators = operators_at(request, rows_of_all)
    whole = layer_costs(graph, operators, pricer_for(request, wanted, 1), solved_layer.assignment(0, rows_of_all))
    for unit, cost in solved_layer.costs.items():
        for mine, its in ((cost.forward, whole[unit].forward), (cost.backward, whole[unit].backward)):
            # The scalar loss is summed over all data ranks.
            kinds = [kind for kind in {**mine, **its} if not kind.endswith("dp")]
            near = 0.25 if unit.startswith("top") else 1e-9
            assert sum(its.get(k, 0.0) for k in kinds) == pytest.approx(sum(mine[k] for k in kinds), rel=near)
        assert whole[unit].live.kept == pytest.approx(cost.live.kept, rel=0.02)


def with_links(cluster: Cluster, intra: float, inter: float) -> Cluster:
    """The cluster with links of the same latency and the given bytes per second."""
    link = replace(cluster.intra_node, in_network_reduction=False, efficiency=1.0)
    return replace(
        cluster,
        intra_node=replace(link, bytes_per_second=intra),
        inter_node=replace(link, bytes_per_second=inter, name="other"),
    )


@pytest.mark.slow
def test_a_slow_link_keeps_tensor_parallelism_off_it() -> None:
    """tp joins neighbors of a node, and distant ranks where the links between nodes are the fast ones."""
    with torch.device("meta"):  # long sequences and thin layers: activations outweigh gradients
        example = EXAMPLES["llama"](layers=2, batch_size=16, seq_len=2048, width=128)
    trace_at = BatchedTrace(lambda rows: trace(example.model, example.inputs, batch_size=rows))
    cluster = Cluster.parse("4x4 a100-80g")
    limits = Constraints.parse({"pp": 1, "tp": 4, "zero": 0})
    chosen = {}
    for name, speeds in {"usual": (600e9, 12e9), "swapped": (12e9, 600e9)}.items():
        request = Request(trace_at, with_links(cluster, *speeds), 16, "fp32", Training(), limits)
        chosen[name] = EqualSearch(request).run().solutions[0].config.stage_meshes[0].mesh
    assert chosen["usual"] == Mesh.parse("dp4 x tp4") and chosen["swapped"] == Mesh.parse("tp4 x dp4")
    assert chosen["usual"].stride("tp") == 1 and chosen["swapped"].stride("tp") == 4


def test_gradients_of_small_zero_groups_are_reduced_in_two_steps() -> None:
    """Scattered within the group, summed between groups, gathered within: by hand for one parameter."""
    request = request_for("llama", "4x4 a100-80g", pp=1, ddp=4, dp=4, zero=2)
    request = replace(request, global_batch_size=16)
    best = EqualSearch(request).run().solutions[0]
    plan = candidate_of(best, request).plan
    assert plan.mesh_text == "ddp4 x dp4"
    pricer = pricer_for(request, plan.mesh, 1)
    meta = next(p.meta for p in EqualSearch(request).costs.graph.parameters if len(p.meta.shape) == 2)
    stored = next(s for (_, n), s in best.solved_layer.parameters(2).items() if s.zero == 2)
    found = sum(pricer.parameters.sync_parts(meta, stored, meta.num_bytes)) / (1 - pricer.rates.hidden_fraction)
    inside, across = collective.Group(4, 1), collective.Group(4, 4)
    size = meta.numel * 4
    by_hand = (
        collective.seconds("reduce_scatter", size, inside, request.cluster)
        + collective.seconds("all_reduce", size / 4, across, request.cluster)
        + collective.seconds("all_gather", size, inside, request.cluster)
    )
    assert found == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.slow
def test_degrees_need_not_be_powers_of_two() -> None:
    meshes = {(each.pp, str(each.stage_meshes[0])) for each in searched("llama", "6 a100-80g").configs()}
    assert {(3, "dp2"), (3, "tp2"), (1, "dp2 x tp3"), (2, "tp3")} <= meshes


def test_the_prediction_is_the_simulation_of_the_chosen_stages() -> None:
    search = searched("llama", "4 a100-80g", pp=4, schedule="1f1b")
    found = search.run().solutions[0]
    candidate = candidate_of(found, search.request)
    assert candidate.plan.prediction.step_seconds == pytest.approx(found.objective, rel=0.05)
    assert len(candidate.plan.prediction.pipeline_ranks) == 4


@pytest.mark.slow
def test_no_budget_makes_a_plan_faster() -> None:
    """From ample to impossible: time never falls, and the plans that fit say so."""
    free = search_plans(request_for("gpt2", "4 a100-80g")).best.plan.prediction
    reserved = free.num_bytes["workspace"]
    seconds, budget = [free.step_seconds], free.peak_bytes
    while True:
        budget = reserved + 0.88 * (budget - reserved)
        try:
            best = search_plans(request_for("gpt2", "4 a100-80g", memory=int(budget))).best
        except InfeasibleError:
            break
        assert best.plan.prediction.peak_bytes <= budget
        seconds.append(best.plan.prediction.step_seconds)
    assert len(seconds) > 3 and all(b >= a * (1 - 1e-9) for a, b in zip(seconds, seconds[1:], strict=False))


def test_every_config_fills_the_cluster() -> None:
    request: Request = request_for("llama", "2x4 a100-80g")
    for each in equal_configs(request, 5):
        (stage_mesh,) = each.stage_meshes
        assert each.pp * stage_mesh.mesh.num_ranks == 8
        rows = each.rows_on(stage_mesh) * stage_mesh.mesh.num_data_ranks
        assert rows * each.num_micro_batches == request.global_batch_size
    assert named_mesh(2, 2, 2).axes == ("ddp", "dp", "tp")


@pytest.mark.parametrize(("name", "tight"), [slow("gpt2", 1.0), slow("gpt2", 0.75), slow("llama", 0.5)])
def test_best_of_all_configs_equals_brute_force(name: str, tight: float) -> None:
    """Every config solved by enumeration, none skipped by its bound, ample memory and less."""
    free = searched(name, "4 a100-80g").run().solutions[0]
    request = searched(name, "4 a100-80g").request
    usable = usable_bytes(request)
    ample = StageProblem.of(searched(name, "4 a100-80g").costs, free.config)
    needed = ample.assembled(free.pipeline).peak_bytes
    capacity = request.cluster.device.memory_bytes
    search = searched(name, "4 a100-80g", memory=int(capacity if tight == 1.0 else capacity - usable + needed * tight))
    best, capacity = math.inf, usable_bytes(search.request)
    configs = list(search.configs())
    for config in configs:
        problem = StageProblem.of(search.costs, config)

        def fits(solution: PipelineSolution, problem: StageProblem = problem) -> bool:
            return problem.assembled(problem.pipeline(solution)).peak_bytes <= capacity

        limits = {str(mesh): capacity for mesh in config.stage_meshes}
        with contextlib.suppress(PipelineInfeasibleError):
            best = min(best, exhaustive_pipeline.solve(problem.problem(limits), fits).objective)
    assert math.isfinite(best) and search.run().solutions[0].objective == pytest.approx(best, rel=1e-9)
    assert len(configs) > 100 and best < math.inf
