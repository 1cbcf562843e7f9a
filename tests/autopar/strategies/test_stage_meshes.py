"""Given strategies on groups of unlike nodes: against equal nodes, against searched plans, and by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.costs.rates import Training
from autopar.errors import ConstraintError
from autopar.frontend.rebatch import BatchedTrace
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph
from autopar.planning.planner import search_plans
from autopar.planning.request import Request
from autopar.settings.constraints import Constraints
from autopar.strategies import Predictor
from cost_models import mixed_cluster
from cost_models.hardware import Link
from cost_models.mixed_cluster import AnyCluster, MixedCluster
from examples.models import EXAMPLES
from tests.autopar.requests import hostless

ROWS, TOKENS, WIDTH = 8, 128, 512
UNLIKE = "2 h100-sxm + 2 v100-32g"


@cache
def traced() -> BatchedTrace:
    with torch.device("meta"):
        example = EXAMPLES["llama"](layers=4, batch_size=ROWS, seq_len=TOKENS, width=WIDTH, vocab_size=256)

    @cache
    def at(rows: int) -> Graph:
        return trace(example.model, example.inputs, example.loss_fn, batch_size=rows)

    return BatchedTrace(at)


@cache
def predictor() -> Predictor:
    return Predictor.of_trace(traced(), ROWS, "fp32")


def predicted(cluster: AnyCluster | str, profile: str = "autopar", **strategy: Any) -> Any:
    given = {"pp": 2, "dp": 1, "zero": 0, "micro_batches": 4} | strategy
    return predictor().predict(cluster, given, global_batch_size=ROWS, framework=profile)


def joined(text: str, between: Link | None = None) -> MixedCluster:
    cluster = mixed_cluster.parse(text)
    assert isinstance(cluster, MixedCluster)
    return replace(cluster, between=between or cluster.groups[0].intra_node)


def hostless_joined(text: str) -> MixedCluster:
    """On hosts that take no time, as models this small would wait for nothing else."""
    cluster = joined(text)
    return replace(cluster, groups=tuple(map(hostless, cluster.groups)))


@pytest.mark.parametrize("profile", ["autopar", "megatron-2021", "fsdp"])
@pytest.mark.parametrize(
    "strategy",
    [
        {"dp": 2, "zero": 1},
        pytest.param({"tp": 2, "recompute": "full"}, marks=pytest.mark.slow),
        {"dp": 2, "schedule": "interleaved", "chunks": 2},
    ],
)
def test_two_equal_groups_are_as_one(profile: str, strategy: dict[str, Any]) -> None:
    halves = joined("2 a100-80g + 2 a100-80g")
    found, wanted = predicted(halves, profile, **strategy), predicted("4 a100-80g", profile, **strategy)
    assert found.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    assert found.pipeline_ranks == wanted.pipeline_ranks and found.num_bytes == wanted.num_bytes
    nodes = predicted("2x2 a100-80g", profile, **strategy), predicted("2 a100-80g + 2 a100-80g", profile, **strategy)
    assert nodes[0].step_seconds == pytest.approx(nodes[1].step_seconds, rel=1e-9)


@pytest.mark.parametrize("cluster", [UNLIKE, "2 v100-32g + 2 h100-sxm"])
@pytest.mark.parametrize("strategy", [{"dp": 2, "zero": 1}, {"dp": 1, "tp": 2, "zero": 0}])
def test_a_searched_plan_scores_alike(cluster: str, strategy: dict[str, Any]) -> None:
    whole = hostless_joined(cluster)
    pinned = {"pp": 2, "micro_batches": 4, "schedule": "1f1b", "recompute": "none", "offload": "none"} | strategy
    limits = Constraints.parse(pinned)
    request = Request(traced(), whole.groups[0], ROWS, "fp32", Training(), limits, whole)
    plan = search_plans(request).best.plan
    groups = [stage_mesh.group for stage_mesh in plan.stage_meshes]
    found = predicted(whole, groups=groups, kernels="off", **pinned)
    assert found.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=0.03)
    assert found.peak_bytes == pytest.approx(plan.prediction.peak_bytes, rel=0.02)
    for ours, theirs in zip(found.pipeline_ranks, plan.prediction.pipeline_ranks, strict=True):
        assert sum(ours.values()) == pytest.approx(sum(theirs.values()), rel=0.02)


def test_the_faster_group_computes_more_where_it_is() -> None:
    for groups in ([0, 1], [1, 0]):
        found = predicted(hostless_joined(UNLIKE), dp=2, groups=groups)
        held = [kinds["parameters"] for kinds in found.pipeline_ranks]
        assert held[groups.index(0)] > 1.5 * held[groups.index(1)]


def test_messages_between_groups_take_the_link_that_joins_them() -> None:
    """By hand: the hidden states of a batch of one micro-batch, and their gradients."""
    seconds = [
        predicted(joined("1 h100-sxm + 1 v100-32g", Link("wire", rate, 0.0, "this test")), micro_batches=1).step_seconds
        for rate in (1e15, 1e9)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * ROWS * TOKENS * WIDTH * 4 / 1e9, rel=1e-3)


def test_whether_it_fits_is_asked_of_every_group() -> None:
    cluster = joined("2 a100-80g + 2 a100-80g")
    roomy = predicted(cluster, dp=2)
    second = sum(roomy.pipeline_ranks[1].values())
    tight = replace(cluster, groups=(cluster.groups[0], cluster.groups[1].with_memory(int(second) - 1)))
    found = predicted(tight, dp=2)
    assert roomy.fits and not found.fits
    assert (found.peak_bytes, found.capacity_bytes) == (second, int(second) - 1)


@pytest.mark.parametrize(
    ("cluster", "strategy", "words"),
    [
        ("2 a100-80g + 1 v100-32g", {"pp": 1, "dp": 3}, "3 devices of each pipeline rank.*1 .pp=3."),
        ("4 a100-80g + 2 v100-32g", {"dp": 3}, "1 .pp=6., 2 .pp=3."),
        (UNLIKE, {"dp": 2, "groups": [0, 0]}, "as many pipeline ranks.*any order"),
        (UNLIKE, {"dp": 2, "groups": "01"}, "numbers of groups"),
        (UNLIKE, {"dp": 4}, "number of devices"),
    ],
)
def test_pipeline_ranks_that_do_not_fill_the_groups_are_named(
    cluster: str, strategy: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConstraintError, match=f"(?s){words}"):
        predictor().predict(cluster, {"pp": 2, "zero": 0, "micro_batches": 1} | strategy, global_batch_size=24)


def test_parts_of_unlike_groups_are_not_changed_one_by_one() -> None:
    found = predicted(UNLIKE, dp=2)
    with pytest.raises(ConstraintError, match="equal nodes only"):
        found.what_if(device={"memory_bytes_per_second": "x2"})
    after = found.what_if(cluster="4 h100-sxm").after
    assert after.seconds["forward compute"] < found.seconds["forward compute"]
