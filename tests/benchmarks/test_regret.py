"""What a choice by prediction costs: groups, flukes and figures by hand, and the printed table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import regret as command
from benchmarks.published_runs.left_out import LeftOut, Replaced, sizes_left_out
from benchmarks.published_runs.predictions import Predictions, predict_rows
from benchmarks.published_runs.regret import choice_of, groups_of, polled, scatter_of
from cost_models.framework_profiles import HOST_SECONDS
from tests.benchmarks.test_published import ROW


def run(id_: str, seconds: float, **changed: Any) -> dict[str, Any]:
    return {**ROW, "id": id_, "iter_time_s": seconds, **changed}


def test_a_run_twice_as_slow_as_its_twin_is_a_fluke() -> None:
    rows = [run(f"m{n}", 1.0 + n, micro_batch=2**n) for n in range(4)]
    rows += [run("slow", 8.1, micro_batch=4, zero_stage=1), run("slower", 7.9, micro_batch=8, zero_stage=1)]
    ((_, kept),), flukes = groups_of(rows)[0].items(), groups_of(rows)[1]
    assert [row["id"] for row in flukes] == ["slow"]
    assert len(kept) == 5
    assert scatter_of({(): kept}) == [pytest.approx(7.9 / 4.0 - 1)]


def test_a_pipeline_that_waits_for_each_micro_batch_has_polled() -> None:
    """Eight layers of 0.1 s: a pipeline of p stages takes 0.8 / p for each of its micro-batches and bubbles. What
    waits 0.5 s with two stages is found, and with four what waits 1.0; not what waits shorter, nor a slow single stage,
    nor one whose waiting is less than its work."""

    def piped(id_: str, pp: int, late: float, layer: float = 0.1) -> dict[str, Any]:
        work = 8 * layer / pp * (32 + pp - 1)
        return run(id_, work + 32 * late, pp=pp, dp=1, tp=2, micro_batch=1, global_batch=32, gpus_total=2 * pp)

    rows = [
        piped("a", 2, 0.0),
        piped("b", 4, 0.0),
        piped("slept", 2, 0.5),
        piped("deep", 4, 1.0),
        piped("short", 4, 0.5),
    ]
    rows += [{**piped("whole", 2, 0.9), "pp": 1}, {**piped("unlike", 2, 0.9), "micro_batch": 2, "dp": None}]
    assert [row["id"] for row in polled(rows)] == ["slept", "deep"]
    busy = [piped("a", 2, 0.0, 1.0), piped("b", 2, 0.5, 1.0)]
    assert polled(busy) == []


def test_small_groups_other_gpus_and_failed_runs_are_not_judged() -> None:
    rows = [run(f"a{n}", 1.0, micro_batch=n) for n in range(4)]
    rows += [run("b", 1.0, gpu="H100-80GB"), run("c", 1.0, status="OOM"), run("d", 0.0)]
    assert groups_of(rows) == ({}, [])


def test_regret_is_of_the_run_predicted_fastest() -> None:
    rows = [run(str(n), seconds, micro_batch=n) for n, seconds in enumerate((3.0, 2.0, 2.4, 6.0, 2.2, 1.0))]
    predicted = {"0": 3.0, "1": 2.0, "2": 1.0, "3": 6.0, "4": 1.1}  # the fastest run, "5", has no prediction
    choice = choice_of((), rows, predicted)
    assert choice is not None
    assert (choice.chosen["id"], choice.best["id"], choice.num_runs, choice.rank) == ("2", "1", 5, 3)
    assert choice.regret == pytest.approx(2.4 / 2.0 - 1)
    assert choice.of_three == 0.0
    assert choice.random == pytest.approx((3.0 + 2.0 + 2.4 + 6.0 + 2.2) / 5 / 2.0 - 1)
    assert choice_of((), rows[:5], {"0": 1.0}) is None


def test_the_table_of_predicted_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline on one node has a bubble, so that one stage is predicted fastest; as measured it is the slowest."""
    shapes = [(8, 1, 1), (4, 1, 2), (2, 1, 4), (4, 2, 1), (1, 2, 4)]
    rows = [
        run(str(n), 5.0 - n, dp=dp, tp=tp, pp=pp, micro_batch=1, grad_accum=16 // dp)
        for n, (dp, tp, pp) in enumerate(shapes)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    assert command.main(["--rows", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "all groups" in printed
    assert f"chosen   {command._strategy(rows[0])}: measured 5.000 s" in printed
    assert "median 400.0%" in printed


def test_left_out_is_without_the_sources_own_constants() -> None:
    row = {**ROW, "framework": "nanotron", "inter_node": "HF cluster", "gpus_total": 64, "gpu": "H100-80GB"}
    left = LeftOut()
    assert all(getattr(left.profile(row), name) == 0 for name in HOST_SECONDS)
    assert left.cluster(row).inter_node.contention_per_doubling == 0.2
    assert left.profile({**row, "framework": "Megatron-LM v2"}) == Predictions().profile(
        {**row, "framework": "Megatron-LM v2"}
    )


@pytest.mark.slow
def test_figures_are_fitted_to_small_runs_and_predict_large_ones() -> None:
    """Runs "measured" with figures of the grid's are predicted exactly by what is fitted to the small ones alone."""
    link = {"inter_node": "HF cluster", "gpu": "H100-80GB", "gpus_per_node": 2, "framework": "nanotron"}
    cuts = [(8, 2, 4, 1), (8, 4, 1, 2), (8, 2, 2, 2), (128, 32, 4, 1), (128, 32, 2, 2)]  # far, step, apart; large
    rows = [
        run(str(n), 1.0, dp=dp, tp=tp, pp=pp, gpus_total=gpus, micro_batch=1, global_batch=128, **link)
        for n, (gpus, dp, tp, pp) in enumerate(cuts)
    ]
    figures = {"host_apart_seconds": 2e-3, "host_far_seconds": 0.3e-3, "host_step_seconds": 50e-3}
    for outcome in predict_rows(rows, Replaced(name="nanotron", figures=figures))[0]:
        outcome.row["iter_time_s"] = outcome.seconds  # type: ignore[index]
    (most, fewest, found, outcomes), _ = sizes_left_out(rows)
    assert (most, fewest, found) == (16, 64, figures)
    assert [outcome.error for outcome in outcomes] == pytest.approx([0.0, 0.0])
