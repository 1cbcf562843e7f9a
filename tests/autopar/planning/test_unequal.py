"""Pipelines whose positions are not alike: the search against brute force, and predictions.

Their plan files are in test_unequal_plan_file.py, programs of such plans are run in test_unequal_verify.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.chain import chain
from autopar.ir.graph import LayerRun
from autopar.ir.stage_mesh import StageMesh
from autopar.plan import Plan
from autopar.planning import memory_fit
from autopar.planning.bounds import bound
from autopar.planning.candidates import candidate_of
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.pipelines import UnequalSearch
from autopar.planning.planner import search_plans
from autopar.planning.predict import chosen
from autopar.planning.request import Request
from autopar.planning.shared_assignments import SharedAssignments
from autopar.planning.smallest_memory import smallest_pipeline
from autopar.planning.stage_problem import PipelineCut, StageProblem
from autopar.planning.unequal_configs import mesh_sets
from autopar.planning.user_plans import reprice
from cost_models import mixed_cluster
from cost_models.hardware import Link
from cost_models.mixed_cluster import AnyCluster, MixedCluster
from search.pipeline_problem import PipelineInfeasibleError, PipelineProblem, PipelineSolution
from tests.autopar.unequal import EQUAL, ROWS, TWO_AND_ONE, UNLIKE, request_for
from tests.search import exhaustive_pipeline


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def deep(cluster: AnyCluster | str, **constraints: Any) -> Request:
    """Eight layers, large enough for compute to outweigh messages."""
    return request_for(cluster, "llama", 8, 1024, **constraints)


def by_enumeration(problem: PipelineProblem, **_: Any) -> PipelineSolution:
    """In place of solve_pipeline: every cut, every submesh, every point; no cutoff."""
    return exhaustive_pipeline.solve(problem)


# --- the search -------------------------------------------------------------------------------------------------------


def texts(sets: Iterable[tuple[StageMesh, ...]]) -> set[tuple[str, ...]]:
    return {tuple(map(str, stage_meshes)) for stage_meshes in sets}


@pytest.mark.slow
def test_the_shapes_of_a_small_cluster_are_those_found_by_hand() -> None:
    """Two shapes of one group, or one of each; they fill it, divide the micro-batch, and have one tp or its parts."""

    def found(cluster: str, rows: int) -> set[tuple[str, ...]]:
        request = request_for(cluster)
        return texts(mesh_sets(request, SharedAssignments(request), num_units=5, rows=rows))

    other = "single of group 1"
    assert found(TWO_AND_ONE, 8) == {("single", other), ("dp2", other), ("tp2", other)}
    assert found(TWO_AND_ONE, 1) == {("single", other), ("tp2", other)}  # one row has no half
    # tp3 and dp3 fill the cluster alone; 3 does not divide 8 rows; one shape twice is a pipeline of the usual kind.
    assert found("3 a100-80g", 8) == {("single", "dp2"), ("single", "tp2")}


@pytest.mark.slow
def test_pins_bear_on_what_is_tried() -> None:
    pinned = request_for(UNLIKE, dp=2, tp=1, zero=2, micro_batches=4, schedule="1f1b")
    found = list(UnequalSearch(pinned).configs())
    assert {(t.num_micro_batches, t.zero, t.schedule) for t in found} == {(4, 2, "1f1b")}
    assert texts(t.stage_meshes for t in found) == {("dp2", "dp2 of group 1")}
    free = list(UnequalSearch(request_for(UNLIKE)).configs())
    assert {t.num_micro_batches for t in free} == {1, 2, 4, 8} and {t.zero for t in free} == {0, 1, 2, 3}


TIGHT, NOTHING_FITS, AMPLE = 0.7, 0.2, 1.0


@pytest.mark.parametrize(
    ("name", "cluster", "share"),
    [
        slow("llama", TWO_AND_ONE, TIGHT),
        slow("llama", TWO_AND_ONE, NOTHING_FITS),
        slow("llama", "3 a100-80g", AMPLE),
        slow("gpt2", TWO_AND_ONE, AMPLE),
        slow("gpt2", "4 a100-80g", TIGHT),
        slow("llama", UNLIKE, TIGHT),
        slow("llama", UNLIKE, NOTHING_FITS),
        slow("bert", "2 h100-sxm + 2x1 a100-80g + 1 v100-32g", AMPLE),
        slow("bert", "2 h100-sxm + 2x1 a100-80g + 1 v100-32g", TIGHT),
        slow("gpt2", "3 cpu + 1 cpu", TIGHT),
    ],
)
def test_the_best_of_all_configs_equals_brute_force(
    name: str, cluster: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All configs solved by enumeration, none skipped by its bound; no bound is above what its config takes.

    share: of the bytes that the best plan takes with memory to spare.
    """
    request = request_for(cluster, name)
    free = UnequalSearch(request).run().best
    assert free is not None
    if share < 1:
        prediction = candidate_of(free, request).plan.prediction
        reserved = prediction.num_bytes.get("workspace", 0.0)
        request = request_for(cluster, name, memory=int(reserved + share * (prediction.peak_bytes - reserved)))
    search = UnequalSearch(request)
    found = search.run().best
    with monkeypatch.context() as patched:
        patched.setattr(memory_fit, "solve_pipeline", by_enumeration)
        solutions = all_solutions(search)
    solved = {config: solution.objective for config, solution in solutions.items()}
    assert (found is None) == (not solved)
    if found is None:
        smallest = smallest_pipeline(search)
        assert share < 1 and smallest is not None
        with monkeypatch.context() as patched:
            patched.setattr(memory_fit, "solve_pipeline", by_enumeration)
            for part, fits in ((1.0, True), (0.95, False)):
                budget = math.ceil(part * smallest.num_bytes)
                assert bool(all_solutions(UnequalSearch(request_for(cluster, name, memory=budget)))) == fits
        return
    assert share > 0.2
    assert found.objective == pytest.approx(min(solved.values()), rel=1e-9)
    assert found.objective >= free.objective * (1 - 1e-9)
    for config, solution in solutions.items():
        predicted = (
            chosen(candidate_of(solution, request).plan) if config.num_micro_batches == 1 else solution.objective
        )
        assert bound(search.costs, config) <= predicted * (1 + 1e-9), config
    plan = candidate_of(found, request).plan
    for stage_mesh, kinds in zip(plan.stage_meshes, plan.prediction.pipeline_ranks, strict=True):
        assert sum(kinds.values()) <= request.capacity_bytes(stage_mesh.group)


def all_solutions(search: UnequalSearch) -> dict[ParallelConfig, PipelineCut]:
    """The solutions of all configs that fit."""
    solved = {}
    for config in search.configs():
        with contextlib.suppress(PipelineInfeasibleError):
            solved[config] = StageProblem.of(search.costs, config).solve()
    return solved


def test_a_cutoff_below_the_best_finds_nothing() -> None:
    search = UnequalSearch(request_for(TWO_AND_ONE))
    best = search.run().best
    assert best is not None
    seconds = chosen(candidate_of(best, search.request).plan)
    assert search.run(seconds).best is None
    assert search.run(seconds * 1.001).best is not None


def test_a_batch_that_no_pipeline_can_share_is_refused_in_words() -> None:
    """Five units on seven groups."""
    with pytest.raises(InfeasibleError, match="as many blocks in the model as there are groups"):
        search_plans(request_for(" + ".join(["1 a100-80g", "1 v100-32g"] * 3 + ["1 h100-sxm"]), micro_batches=1))


@pytest.mark.parametrize("pins", [{"cp": 2}, {"ep": 2}, {"ttp": 2}, {"dp": 1, "ddp": 2}])
def test_axes_that_unlike_nodes_do_not_have_are_refused(pins: dict[str, int]) -> None:
    with pytest.raises(ConstraintError, match="unlike nodes support only dp and tp"):
        search_plans(request_for(TWO_AND_ONE, **pins))


@pytest.mark.slow
def test_what_does_not_fit_is_said_group_by_group() -> None:
    """With the smallest budget that does: every rank's."""
    request = request_for(TWO_AND_ONE, memory=1540 * 2**20, micro_batches=1)
    with pytest.raises(InfeasibleError, match="(?s)memory per rank of 1 v100-32g.*smallest budget that fits") as caught:
        search_plans(request)
    needed = caught.value.needed_bytes
    assert needed is not None
    plan = search_plans(request_for(TWO_AND_ONE, memory=needed, micro_batches=1)).best.plan
    assert plan.prediction.peak_bytes <= needed
    with pytest.raises(InfeasibleError):
        search_plans(request_for(TWO_AND_ONE, memory=int(0.95 * needed), micro_batches=1))


def test_the_fastest_group_may_be_the_smallest() -> None:
    plan = search_plans(request_for("1 h100-sxm + 2 v100-32g")).best.plan
    assert plan.num_ranks == 3 and {stage_mesh.group for stage_mesh in plan.stage_meshes} == {0, 1}


def test_micro_batches_may_have_one_row() -> None:
    plan = search_plans(request_for("2 a100-80g + 2 v100-32g", tp=2, micro_batches=ROWS)).best.plan
    assert [str(stage_mesh.mesh) for stage_mesh in plan.stage_meshes] == ["tp2", "tp2"]


# --- predictions ------------------------------------------------------------------------------------------------------


def with_stage_meshes(plan: Plan) -> Plan:
    """The same plan with its equal pipeline ranks written out."""
    stage_meshes = (StageMesh(plan.mesh),) * plan.pipeline.num_pipeline_ranks
    return replace(plan, pipeline=replace(plan.pipeline, stage_meshes=stage_meshes))


@pytest.mark.parametrize(
    ("name", "constraints"),
    [
        ("llama", {"dp": 2, "zero": 2, "micro_batches": 4, "schedule": "1f1b"}),
        ("llama", {"dp": 2, "zero": 3, "micro_batches": 2, "schedule": "interleaved", "chunks": 2}),
        ("llama", {"tp": 2, "micro_batches": 4, "schedule": "zero-bubble", "recompute": "full"}),
        ("llama", {"dp": 2, "micro_batches": 2, "schedule": "zero-bubble-v"}),
        ("llama", {"pp": 4, "micro_batches": 4, "offload": "optimizer"}),
        slow("gpt2", {"pp": 4, "micro_batches": 4}),
        slow("gpt2", {"dp": 2, "zero": 1, "micro_batches": 2, "recompute": "selective"}),
    ],
)
def test_equal_pipeline_ranks_written_out_predict_the_same(name: str, constraints: dict[str, Any]) -> None:
    request = request_for("4 a100-80g", name, **{"pp": 2} | constraints)
    plan = search_plans(request).best.plan
    written = Plan.from_yaml(with_stage_meshes(plan).to_yaml())
    assert written == with_stage_meshes(plan) and len(written.stage_meshes) == plan.pipeline.num_pipeline_ranks
    ours, theirs = reprice(request, written).best.plan.prediction, reprice(request, plan).best.plan.prediction
    assert ours.seconds == pytest.approx(theirs.seconds, rel=1e-12)
    assert ours.num_bytes == theirs.num_bytes and ours.pipeline_ranks == theirs.pipeline_ranks


def joined_like_one() -> MixedCluster:
    """Two groups that are the halves of one node, also by the link between them."""
    cluster = mixed_cluster.parse(EQUAL)
    assert isinstance(cluster, MixedCluster)
    return replace(cluster, between=cluster.groups[0].intra_node)


@pytest.mark.parametrize("constraints", [{"dp": 2, "zero": 1}, {"tp": 2}], ids=["dp2", "tp2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_two_groups_of_equal_nodes_are_as_fast_as_one(constraints: dict[str, int], schedule: str) -> None:
    """The plan of four equal GPUs on two groups of two; and what is found for them is as good."""
    pinned = constraints | {"pp": 2, "micro_batches": 4, "schedule": schedule}
    homogeneous = search_plans(request_for("4 a100-80g", **pinned)).best.plan
    request = request_for(joined_like_one(), **pinned)
    stage_meshes = (StageMesh(homogeneous.mesh, 0), StageMesh(homogeneous.mesh, 1))
    apart = replace(homogeneous, pipeline=replace(homogeneous.pipeline, stage_meshes=stage_meshes))
    given = reprice(request, apart).best.plan.prediction
    assert given.step_seconds == pytest.approx(homogeneous.prediction.step_seconds, rel=1e-9)
    assert given.pipeline_ranks == homogeneous.prediction.pipeline_ranks
    found = search_plans(request).best.plan
    assert [stage_mesh.mesh for stage_mesh in found.stage_meshes] == [homogeneous.mesh] * 2
    assert found.prediction.step_seconds == pytest.approx(homogeneous.prediction.step_seconds, rel=0.02)


def test_a_slower_link_between_the_groups_costs_its_share() -> None:
    """By hand: the hidden states of one batch cross it, and their gradients come back."""
    cluster = mixed_cluster.parse("1 a100-80g + 1 a100-80g")
    assert isinstance(cluster, MixedCluster)
    seconds = []
    for rate in (1e15, 1e9):
        between = Link("wire", rate, 0.0, "this test")
        request = request_for(replace(cluster, between=between), pp=2, micro_batches=1, schedule="1f1b")
        seconds.append(search_plans(request).best.plan.prediction.step_seconds)
    hidden_state = ROWS * 128 * 512 * 4
    assert seconds[1] - seconds[0] == pytest.approx(2 * hidden_state / 1e9, rel=1e-3)


def layers_by_group(plan: Plan) -> dict[int, int]:
    units: dict[int, int] = {}
    for stage_mesh, stage in zip(plan.stage_meshes, plan.pipeline.stages, strict=True):
        units[stage_mesh.group] = units.get(stage_mesh.group, 0) + stage.last - stage.first
    return units


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [UNLIKE, "2 v100-32g + 2 h100-sxm"])
def test_a_faster_group_has_more_layers(cluster: str) -> None:
    """And no layer would be better off one pipeline rank further on: each such plan, simulated, takes longer."""
    request = deep(cluster, pp=2, dp=2, micro_batches=4, schedule="1f1b", recompute="none")
    plan = search_plans(request).best.plan
    fast = 0 if cluster == UNLIKE else 1
    units = layers_by_group(plan)
    assert units[fast] > units[1 - fast] >= 1
    first, last = plan.pipeline.stages
    for boundary in (first.last - 1, first.last + 1):
        if 0 < boundary < last.last:
            moved = (replace(first, last=boundary), replace(last, first=boundary))
            other = replace(plan, pipeline=replace(plan.pipeline, stages=moved))
            slower = reprice(request, other).best.plan.prediction.step_seconds
            assert slower > plan.prediction.step_seconds * (1 - 1e-9)


@pytest.mark.slow
def test_a_group_with_little_memory_has_fewer_layers_or_recomputes() -> None:
    cluster = mixed_cluster.parse(EQUAL)
    assert isinstance(cluster, MixedCluster)
    pinned = {"pp": 2, "dp": 2, "zero": 0, "micro_batches": 4, "schedule": "1f1b", "offload": "none"}
    free = search_plans(deep(cluster, **pinned)).best.plan
    second = [stage_mesh.group for stage_mesh in free.stage_meshes].index(1)
    needed = sum(free.prediction.pipeline_ranks[second].values())
    reserved = free.prediction.num_bytes["workspace"]
    before, seconds = layers_by_group(free), [free.prediction.step_seconds]
    for share in (0.9, 0.75, 0.6):
        small = cluster.groups[1].with_memory(int(reserved + share * (needed - reserved)))
        request = deep(replace(cluster, groups=(cluster.groups[0], small)), **pinned)
        plan = search_plans(request).best.plan
        stage = plan.pipeline.stages[[stage_mesh.group for stage_mesh in plan.stage_meshes].index(1)]
        recomputed = sum(n for runs in stage.recompute.values() for mode, n in runs if mode != "none")
        assert layers_by_group(plan)[1] < before[1] or recomputed > 0
        for stage_mesh, kinds in zip(plan.stage_meshes, plan.prediction.pipeline_ranks, strict=True):
            assert sum(kinds.values()) <= request.whole.groups[stage_mesh.group].device.memory_bytes
        seconds.append(plan.prediction.step_seconds)
    assert seconds == sorted(seconds) and seconds[-1] > seconds[0]


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["2 h100-sxm + 1 v100-32g", "2 a100-80g + 2 v100-32g", "3 a100-80g"])
def test_the_simulation_is_near_the_closed_form(cluster: str) -> None:
    """Exact for 1F1B with one micro-batch; with several the closed form adds the bottleneck to the whole fill, also
    where the bottleneck's neighbors could have waited meanwhile (too much), and does not see zero bubble's ramps. With
    one micro-batch zero bubble's is a lower bound: weight gradients of the first stage come after all others."""
    request = deep(cluster)
    exact, search = 1 + 1e-9, UnequalSearch(request)
    one, several = (
        {"1f1b": (1 / exact, exact), "zero-bubble": (1 / exact, 4 / 3)},
        {"1f1b": (0.88, 1.02), "zero-bubble": (0.88, 1.1)},
    )
    seen = 0
    for config in search.configs():
        if config.num_micro_batches == ROWS:
            continue
        found = StageProblem.of(search.costs, config).solve()
        ratio = candidate_of(found, request).plan.prediction.step_seconds / found.objective
        low, high = (several if config.num_micro_batches > 1 else one)[config.schedule]
        assert low <= ratio <= high, f"{ratio} for {config}"
        seen += 1
    assert seen > 30


@pytest.mark.slow
def test_a_tied_weight_is_counted_whole_on_a_pipeline_rank_of_one_rank() -> None:
    """By hand: fp32 weights, gradients and two moments of all that the last stage holds, none of them sharded."""
    request = request_for("1 a100-80g + 2 a100-80g", "gpt2", tp=1, pp=2, zero=3, micro_batches=4, schedule="1f1b")
    plan = search_plans(request).best.plan
    assert [str(stage_mesh) for stage_mesh in plan.stage_meshes] == ["dp2 of group 1", "single"]
    graph, stage = request.trace(2), plan.pipeline.stages[-1]
    units = chain(graph)[stage.first :]
    runs = [piece.layer for piece in graph.body if isinstance(piece, LayerRun)]
    layers = {layer.name: sum(p.meta.numel for p in layer.parameters if not p.is_buffer) for layer in runs}
    top = {p.name: p.meta.numel for p in graph.parameters}
    tied = next(name for name in top if name.endswith("wte.weight"))
    numel = sum(layers.get(unit, 0) for unit in units) + top[tied]
    numel += sum(count for name, count in top.items() if "ln_f" in name)
    kinds = plan.prediction.pipeline_ranks[-1]
    assert kinds["parameters"] + kinds["gradients"] + kinds["optimizer state"] == pytest.approx(16 * numel, rel=0.01)


# --- equal GPUs -------------------------------------------------------------------------------------------------------


def test_unequal_pipeline_ranks_win_where_equal_ones_leave_devices_idle() -> None:
    """Eight rows on three GPUs, which divide neither the rows nor the heads: one stage cannot use all of them."""
    best, *others = (candidate.plan for candidate in search_plans(request_for("3 a100-80g")).candidates)
    assert sorted(stage_mesh.mesh.num_ranks for stage_mesh in best.pipeline.stage_meshes) == [1, 2]
    assert [plan.mesh_text for plan in others] == ["pp3"]
    assert best.prediction.step_seconds < others[0].prediction.step_seconds


def test_equal_stage_meshes_of_one_group_are_a_plan_of_the_usual_kind() -> None:
    """Two shapes may be used; where a solution uses one, its pipeline ranks are not written out."""
    search, seen = UnequalSearch(request_for("4 a100-80g", micro_batches=4, zero=1)), set()
    for config in search.configs():
        found = StageProblem.of(search.costs, config).solve()
        plan = candidate_of(found, search.request).plan
        is_unlike = len(set(found.pipeline.stage_meshes)) > 1
        assert bool(plan.pipeline.stage_meshes) == is_unlike and plan.num_ranks == 4
        assert plan.prediction.step_seconds == pytest.approx(found.objective, rel=0.15)
        seen.add(is_unlike)
    assert seen == {True, False}
