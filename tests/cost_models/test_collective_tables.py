"""The collective model against all measured tables, as benchmarks/collectives.py reports it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.collectives import Row, ratios, read_rows


def test_mean_over_tables_of_the_median_error(measured: Callable[[str], Any]) -> None:
    measured("measured_links.json")
    tables: dict[str, list[Row]] = {}
    for row in read_rows():
        tables.setdefault(row.table, []).append(row)
    medians = {name: statistics.median(abs(ratio - 1) for ratio in ratios(rows)) for name, rows in tables.items()}
    assert sum(map(len, tables.values())) == 271 and len(tables) == 13
    assert statistics.fmean(medians.values()) < 0.08
    assert max(value for name, value in medians.items() if name != "galvatron two nodes") < 0.16
    assert medians["galvatron two nodes"] < 0.26  # whose adapters are not recorded (docs/published_runs.md, "Rails")
