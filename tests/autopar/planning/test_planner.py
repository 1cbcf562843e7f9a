"""The outer search without pipelines: micro-batches, pruned meshes, and what is said when nothing fits."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.mesh import Mesh
from autopar.planning.equal_configs import shapes
from autopar.planning.one_stage import lower_bound, meshes, micro_batch_counts
from autopar.planning.planner import SearchResult, search_plans
from tests.autopar.requests import request_for

CLUSTERS = [
    pytest.param("llama", "4 a100-80g", marks=pytest.mark.slow),
    pytest.param("gpt2", "4 a100-80g", marks=pytest.mark.slow),
    ("gpt2", "2x2 v100-16g"),
]


@cache
def searched(name: str, cluster: str = "4 a100-80g", **constraints: object) -> SearchResult:
    return search_plans(
        request_for(name, cluster, **{"pp": 1, "ddp": 1, "recompute": "none", "offload": "none"} | constraints)
    )


@pytest.mark.parametrize(("name", "cluster"), CLUSTERS)
def test_pruning_equals_solving_every_mesh(name: str, cluster: str) -> None:
    result = searched(name, cluster)
    alone = {}
    for mesh in meshes(request_for(name, cluster)):
        pinned = searched(name, cluster, dp=mesh.size("dp"), tp=mesh.size("tp"))
        alone[mesh] = pinned.best.plan.prediction.step_seconds
        assert lower_bound(mesh, request_for(name, cluster)) <= alone[mesh] * (1 + 1e-9)
    assert {*alone} == {Mesh.parse("dp4"), Mesh.parse("dp2 x tp2"), Mesh.parse("tp4")}
    best = result.best.plan
    assert best.prediction.step_seconds == pytest.approx(min(alone.values()), rel=1e-12)
    assert alone[best.mesh] == min(alone.values())
    skipped = [(bound, Mesh.parse(layout)) for bound, layout in result.skipped]
    assert {*(mesh for _, mesh in skipped)} | {c.plan.mesh for c in result.candidates} == {*alone}
    for bound, mesh in skipped:
        assert best.prediction.step_seconds <= bound <= alone[mesh] * (1 + 1e-9)
    seconds = [c.plan.prediction.step_seconds for c in result.candidates]
    assert seconds == sorted(seconds)


def test_objective_of_the_candidate_is_its_prediction() -> None:
    best = searched("llama").best
    assert best.solution is not None
    assert best.plan.prediction.step_seconds == pytest.approx(best.solution.objective, rel=1e-9)


def test_fewest_micro_batches_that_fit() -> None:
    """Memory between what one and what many micro-batches need: fewer do not fit, as pinning them shows."""
    free = searched("gpt2", dp=4, zero=0, micro_batches=1).best.plan.prediction
    many = searched("gpt2", dp=4, zero=0, micro_batches=2).best.plan.prediction
    assert many.peak_bytes < free.peak_bytes and many.step_seconds > free.step_seconds
    memory = int((many.peak_bytes + free.peak_bytes) / 2)
    result = searched("gpt2", dp=4, zero=0, memory=memory)
    assert result.best.plan.num_micro_batches == 2
    assert result.best.plan.prediction.peak_bytes <= memory
    with pytest.raises(InfeasibleError):
        searched("gpt2", dp=4, zero=0, memory=memory, micro_batches=1)


def test_micro_batch_counts() -> None:
    request = request_for("gpt2")
    assert micro_batch_counts(request, Mesh.parse("dp2 x tp2")) == [1, 2, 4]
    assert micro_batch_counts(request, Mesh.parse("tp4")) == [1, 2, 4, 8]
    with pytest.raises(ConstraintError, match="micro_batches does not divide") as caught:
        micro_batch_counts(request_for("gpt2", micro_batches=3), Mesh.parse("dp2 x tp2"))
    assert "1, 2, 4" in str(caught.value)


@pytest.mark.slow
def test_nothing_fits_says_what_would() -> None:
    """The number named as enough is enough, and a tenth less is not."""
    with pytest.raises(InfeasibleError) as caught:
        searched("gpt2", dp=2, tp=2, memory="600MB")
    message = str(caught.value)
    match = re.search(r"memory=(\d+)", message)
    assert match is not None, message
    for part in ("memory per rank", "smallest budget that fits", "parameters", "optimizer state", "more devices"):
        assert part in message
    needed = int(match[1])
    assert needed > 600e6
    assert searched("gpt2", dp=2, tp=2, memory=needed).best.plan.prediction.peak_bytes <= needed
    with pytest.raises(InfeasibleError):
        searched("gpt2", dp=2, tp=2, memory=int(0.9 * needed))


@pytest.mark.slow
def test_memory_is_kept_to() -> None:
    """Less memory never gives a faster plan, and every plan fits."""
    roomy = searched("gpt2", tp=1).best.plan.prediction
    seconds = []
    workspace = roomy.num_bytes["workspace"]
    for share in (1.0, 0.96, 0.92, 0.88, 0.84, 0.8):
        limit = int(workspace + share * (roomy.peak_bytes - workspace)) + 1
        try:
            plan = searched("gpt2", tp=1, memory=limit).best.plan
        except InfeasibleError:
            break
        assert plan.prediction.peak_bytes <= limit
        seconds.append(plan.prediction.step_seconds)
    assert seconds == sorted(seconds) and seconds[-1] > seconds[0] == pytest.approx(roomy.step_seconds)
    assert len(seconds) > 2


@pytest.mark.parametrize(("degrees", "found"), [({}, 3), ({"dp": 2}, 1), ({"tp": 4}, 1), ({"dp": 2, "tp": 2}, 1)])
def test_pinned_degrees(degrees: dict[str, int], found: int) -> None:
    legal = meshes(request_for("gpt2", **degrees))
    assert len(legal) == found
    assert all(mesh.num_ranks == 4 and all(mesh.size(a) == n for a, n in degrees.items()) for mesh in legal)


@pytest.mark.parametrize(
    ("degrees", "nearest"),
    [({"dp": 3}, "dp=2 x tp=2"), ({"dp": 2, "tp": 1}, "dp=2 x tp=2"), ({"dp": 4, "tp": 4}, "dp=4 x tp=1")],
)
def test_degrees_that_do_not_make_the_cluster(degrees: dict[str, int], nearest: str) -> None:
    with pytest.raises(ConstraintError, match="pinned degrees") as caught:
        meshes(request_for("gpt2", **degrees))
    assert nearest in str(caught.value)


def test_more_pipeline_ranks_than_blocks() -> None:
    with pytest.raises(ConstraintError, match="more ranks than the model has blocks") as caught:
        shapes(request_for("gpt2", "8 cpu", pp=8), num_units=5)
    assert "pp=8, 5 blocks" in str(caught.value)
    assert "1, 2, 4" in str(caught.value)


def test_batch_that_no_mesh_divides() -> None:
    with pytest.raises(ConstraintError, match="no mesh divides the global batch") as caught:
        meshes(request_for("gpt2", "16 a100-80g", dp=16))
    assert "a batch that is a multiple of 16" in str(caught.value) and "dp=8 x tp=2" in str(caught.value)


def test_a_pinned_tp_that_divides_nothing_is_refused_with_the_nearest_that_does() -> None:
    """Widths 30 and 6 on four ranks; the batch of 8 is dp's."""
    model = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 6))
    options = {"example_inputs": (torch.randn(8, 30), torch.randn(8, 6)), "loss_fn": nn.functional.mse_loss}
    with pytest.raises(ConstraintError, match="tp divides no dim") as caught:
        autopar.compile(model, "4 a100-80g", constraints={"tp": 4}, **options)
    assert "tp=4, sizes 30, 6" in str(caught.value) and "tp=2" in str(caught.value)
