"""The benchmark's quick form: every contest runs, both sides have equal losses, rows are complete."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from benchmarks import overhead


@pytest.mark.slow
@pytest.mark.distributed
def test_every_contest_gives_a_row(tmp_path: Path) -> None:
    results = tmp_path / "overhead.csv"
    rows = overhead.main(["--quick", "--ranks", "2", "--output", str(results)])
    assert [row["contest"] for row in rows] == ["dp", "zero3", "tp", "tp-free"]
    # 9 parameters of the layer and 3 of the root, of which tp is pinned to shard the 7 projections.
    divided = {row["contest"]: row["division"] for row in rows}
    assert divided["dp"] == "0 S 12 Rp of 12" and divided["zero3"] == "12 S 0 Rp of 12"
    assert divided["tp"].startswith("7 S ")
    for row in rows:
        assert row["generated_tokens_per_second"] > 0 and row["hand_tokens_per_second"] > 0
        assert float(row["loss_error"]) <= overhead.LOSS_TOLERANCE
    with results.open(encoding="utf-8") as file:
        assert [row["contest"] for row in csv.DictReader(file)] == [row["contest"] for row in rows]


def test_a_side_with_another_loss_gives_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: tensor.mul_(2))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    losses = [torch.tensor(2.0), torch.tensor(1.0)]
    assert overhead._loss_error(losses, losses) == 0.0
    assert overhead._loss_error([torch.tensor(2.0), torch.tensor(1.1)], losses) == pytest.approx(0.1)


def test_rows_are_appended_below_one_header(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.csv"
    overhead.append([{"a": 1, "b": 2}], path)
    overhead.append([{"a": 3, "b": 4}], path)
    assert path.read_text(encoding="utf-8").split() == ["a,b", "1,2", "3,4"]


def test_interquartile_is_the_middle_half() -> None:
    assert overhead.interquartile([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert overhead.interquartile([7.0]) == 0.0
