"""Plans whose positions are not alike, as files and in commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from autopar.cli import app
from autopar.errors import InfeasibleError, PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.plan import Plan
from autopar.planning.candidates import candidate_of
from autopar.planning.pipelines import UnequalSearch
from autopar.planning.stage_problem import StageProblem
from autopar.planning.user_plans import reprice
from cost_models import mixed_cluster
from cost_models.mixed_cluster import MixedCluster
from tests.autopar.unequal import TWO_AND_ONE, request_for


@cache
def mixed_plan() -> Plan:
    """dp2 and a single GPU of the other group, two micro-batches."""
    pinned = {"micro_batches": 2, "schedule": "1f1b", "zero": 1, "pp": 2}
    request = request_for(TWO_AND_ONE, **pinned)
    search = UnequalSearch(request)
    configs = [config for config in search.configs() if str(config.stage_meshes[0]) == "dp2"]
    solved = [StageProblem.of(search.costs, config).solve() for config in configs]
    return candidate_of(min(solved, key=lambda solution: solution.objective), request).plan


def test_a_plan_file_is_read_back_and_priced_alike() -> None:
    plan = mixed_plan()
    text = plan.to_yaml()
    assert "mesh: pp2\n" in text and sorted(map(str, plan.stage_meshes)) == ["dp2", "single of group 1"]
    assert Plan.from_yaml(text) == plan
    again = reprice(request_for(TWO_AND_ONE), Plan.from_yaml(text)).best.plan
    assert again.prediction.seconds == pytest.approx(plan.prediction.seconds, rel=1e-9)
    assert again.prediction.pipeline_ranks == plan.prediction.pipeline_ranks
    assert again.mesh_text == plan.mesh_text and again.num_ranks == 3


def pipeline_ranks(*names: str) -> Callable[[str], str]:
    """Edits the pipeline ranks in a plan's text."""

    def edit(text: str) -> str:
        old = "".join(f"  - {stage_mesh}\n" for stage_mesh in mixed_plan().stage_meshes)
        assert old in text
        return text.replace(old, "".join(f"  - {name}\n" for name in names))

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (pipeline_ranks("dp2"), r"pipeline\.positions: 1 pipeline ranks for the mesh pp2.*mesh: pp1"),
        (
            pipeline_ranks("dp2", "single", "single of group 1"),
            r"pipeline\.positions: 3 pipeline ranks for the mesh pp2",
        ),
        (lambda text: text.replace("mesh: pp2\n", "mesh: pp2 x dp2\n"), "2 pipeline ranks for the mesh pp2 x dp2"),
        (pipeline_ranks("dp2", "single of group 2"), "a group that the cluster does not have.*group 2.*group 1: 1"),
        (pipeline_ranks("single", "dp2 of group 1"), "does not fill the cluster 2 a100-80g.*1 ranks for 2 devices"),
        (pipeline_ranks("dp2", "dp2 of group 1"), "does not fill the cluster 1 v100-32g.*2 ranks for 1 devices"),
        (pipeline_ranks("dp2", "two of group 1"), r"pipeline\.positions\.1: not a mesh.*dp2 x tp4"),
        (lambda text: text.replace("micro_batches: 2", "micro_batches: 8"), "micro-batches do not divide its batch"),
    ],
    ids=["too few", "too many", "no mesh beside them", "no group", "idle rank", "too large", "no mesh", "odd rows"],
)
def test_pipeline_ranks_that_cannot_be_are_refused(edit: Callable[[str], str], message: str) -> None:
    text = mixed_plan().to_yaml()
    assert edit(text) != text
    with pytest.raises(PlanError, match=f"(?s){message}"):
        reprice(request_for(TWO_AND_ONE), Plan.from_yaml(edit(text)))


def test_pipeline_ranks_share_the_rows_of_a_micro_batch_by_their_least_common_multiple() -> None:
    """dp2 and dp3: four rows divide by neither both; six would, and eight is no multiple of six."""
    plan = mixed_plan()
    stage_meshes = (StageMesh(Mesh(("dp",), (2,)), 0), StageMesh(Mesh(("dp",), (3,)), 1))
    wide = replace(plan, pipeline=replace(plan.pipeline, stage_meshes=stage_meshes), mesh=Mesh(("dp",), (6,)))
    text = wide.to_yaml()
    assert Plan.from_yaml(text).mesh == Mesh(("dp",), (6,))
    with pytest.raises(PlanError, match="micro-batches do not divide its batch"):
        reprice(request_for("2 a100-80g + 3 v100-32g"), Plan.from_yaml(text))


def test_a_plan_that_outgrows_one_groups_memory_names_what_it_needs() -> None:
    cluster = mixed_cluster.parse(TWO_AND_ONE)
    assert isinstance(cluster, MixedCluster)
    plan = mixed_plan()
    at = [stage_mesh.group for stage_mesh in plan.stage_meshes].index(1)
    needed = sum(plan.prediction.pipeline_ranks[at].values())
    for share, fits in ((1.01, True), (0.99, False)):
        small = replace(cluster, groups=(cluster.groups[0], cluster.groups[1].with_memory(int(share * needed))))
        if fits:
            reprice(request_for(small), plan)
            continue
        with pytest.raises(InfeasibleError, match="does not fit the memory of one rank"):
            reprice(request_for(small), plan)


def run(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_a_plan_for_unlike_groups_is_written_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    words = (
        "plan",
        "examples.models:llama",
        "-o",
        "layers=3",
        "--cluster",
        "2 cpu + 1 cpu",
        "--set",
        "micro_batches=2",
    )
    result = run(*words, "--out", str(out))
    assert result.exit_code == 0, result.output
    plan = Plan.from_file(out)
    assert plan.num_ranks == 3 and {stage_mesh.group for stage_mesh in plan.stage_meshes} == {0, 1}
    assert plan.cluster == "2 cpu + 1 cpu" and "2 cpu + 1 cpu" in result.output and plan.mesh_text in result.output
    short = run("report", str(out))
    assert short.exit_code == 0 and plan.mesh_text in short.output
    full = run("report", str(out), "--model", "examples.models:llama", "-o", "layers=3")
    assert full.exit_code == 0, full.output
    assert plan.mesh_text in full.output
