"""What a choice by prediction costs: groups, flukes and figures by hand, and the printed table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import regret as command
from benchmarks.published_runs.left_out import LeftOut
from benchmarks.published_runs.predictions import Predictions
from benchmarks.published_runs.regret import choice_of, groups_of, scatter_of
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
    assert left.profile(row).host_layer_seconds == 0
    assert left.cluster(row).inter_node.contention_per_doubling == 0.2
    assert left.profile({**row, "framework": "Megatron-LM v2"}) == Predictions().profile(
        {**row, "framework": "Megatron-LM v2"}
    )
