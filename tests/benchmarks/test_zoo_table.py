"""The page of models says what the results file has, the latest row of each model and plan."""

from __future__ import annotations

from pathlib import Path

from benchmarks.table import append
from benchmarks.zoo import RESULTS, Row, as_record
from benchmarks.zoo_table import TARGET, latest, table


def test_the_page_is_that_of_the_results() -> None:
    assert TARGET.read_text(encoding="utf-8") == table(latest(RESULTS))


def test_a_cell_is_the_latest_row(tmp_path: Path) -> None:
    path = tmp_path / "zoo.csv"
    rows = [
        Row("gpt2", "free", failure="TraceError: this | that"),
        Row("mlp", "free", mesh="tp4", error=2e-7, replicated={"aten.index.Tensor": 0.031}),
        Row("vit", "free", failure="TraceError: this | that"),
        Row("gpt2", "free", mesh="dp4", error=3e-7, dtype="fp64"),
    ]
    append([as_record(row) for row in rows], path)
    page = table(latest(path)).splitlines()
    assert "| free | 3 | 2 | 3.00e-07 |" in page
    assert "| decoder | gpt2 | dp4: 3.00e-07 (64) | ? | ? | - | - | ? |  |" in page
    assert "| by hand | mlp | tp4: 2.00e-07 | ? | ? | - | - | - | aten.index.Tensor 3.1% |" in page
    assert "| vision | vit | TraceError: this \\| that | ? | ? | - | - | - |  |" in page
