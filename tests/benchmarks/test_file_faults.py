"""A few cases of the campaigns about files and processes (benchmarks/faults) have no defects."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("corruptions", 24),
        pytest.param("manifests", 60, marks=pytest.mark.slow),
        pytest.param("number_options", 60, marks=pytest.mark.slow),
        pytest.param("control_characters", 20, marks=pytest.mark.slow),
        pytest.param("changes", 6, marks=pytest.mark.slow),
        pytest.param("folders", 30, marks=pytest.mark.slow),
        pytest.param("kills", 2, marks=[pytest.mark.slow, pytest.mark.distributed]),
        pytest.param("signals", 6, marks=[pytest.mark.slow, pytest.mark.distributed]),
    ],
)
def test_no_defects(kind: str, count: int) -> None:
    cases = list(importlib.import_module(f"benchmarks.faults.{kind}").cases(count, 1))
    assert len(cases) == count
    for case in cases:
        result = case.run()
        assert result.outcome in ("right", "refused"), f"{case.name}: {result}"
