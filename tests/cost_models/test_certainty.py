"""How sure a prediction of memory is: by hand, and its spreads against the rows that they are of."""

from __future__ import annotations

import csv
import tomllib
from collections.abc import Mapping

import pytest

from benchmarks import memory_spread
from cost_models.certainty import OWN, OWN_ON_CPU, Spread, spread, spreads


@pytest.mark.parametrize(
    ("capacity", "fit"), [(59, "no"), (60, "within the error"), (209, "within the error"), (210, "yes")]
)
def test_what_nobody_measured_is_added_as_it_is(capacity: int, fit: str) -> None:
    spread = Spread(low=0.5, high=2.0, rows=3, source="made up")
    certainty = spread.certainty({"parameters": 60.0, "activations": 40.0, "workspace": 10.0}, capacity)
    assert (certainty.low_bytes, certainty.high_bytes, certainty.fit) == (10 + 0.5 * 100, 10 + 2 * 100, fit)


def test_our_own_spreads_are_those_of_the_measured_rows() -> None:
    for kind, text in memory_spread.tables().items():
        assert Spread(**tomllib.loads(text)[kind]) == spreads()[kind]
    assert spread(OWN, is_on_cpu=True) == spreads()[OWN_ON_CPU] != spread(OWN)


def gpu(row: Mapping[str, str]) -> tuple[float, float]:
    """(measured, predicted) from the kinds' figures alone."""
    sizes = [float(part.split()[-1]) for part in row["parts"].split("; ") if not part.startswith("workspace")]
    return float(row["reserved_gib"]), sum(sizes)


def cpu(row: Mapping[str, str]) -> tuple[float, float]:
    kinds = ("parameters", "gradients", "optimizer state", "activations", "transient")
    return float(row["measured"]), sum(float(row[kind]) for kind in kinds)


def test_nine_of_ten_measured_rows_are_within_the_interval() -> None:
    for kind, path, figures in ((OWN, memory_spread.GPU_ROWS, gpu), (OWN_ON_CPU, memory_spread.CPU_ROWS, cpu)):
        with path.open(newline="", encoding="utf-8") as file:
            pairs = [figures(row) for row in csv.DictReader(file)]
        spread = spreads()[kind]
        intervals = [(measured, *spread.interval(predicted)) for measured, predicted in pairs]
        within = [low <= measured <= high for measured, low, high in intervals]
        assert len(pairs) == spread.rows and sum(within) >= 0.9 * spread.rows
