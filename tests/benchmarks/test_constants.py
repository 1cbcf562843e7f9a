"""The list of constants against the benchmarks that refit them, and the committed page against the list."""

from __future__ import annotations

import pytest

from benchmarks import collectives, constants, operators
from benchmarks.published_runs.rows import read
from cost_models.framework_profiles import frameworks


@pytest.fixture(autouse=True)
def tables() -> None:
    if not constants.ROWS.is_file():
        pytest.skip(f"measured data not found: {constants.ROWS}")


def test_every_constant_that_a_benchmark_refits_is_listed() -> None:
    kernels, links = list(constants.of_operators()), list(constants.of_collectives())
    assert len(kernels) == operators.num_constants()
    assert len(links) == len(collectives.FITTED) + 1 + len(collectives.HOST_SECONDS)
    for found in (kernels, links):
        assert len({constant.place for constant in found}) == len(found)
        assert all(constant.rows > 0 and constant.sources > 0 for constant in found)


def test_what_is_fitted_to_runs_is_of_few_rows_and_said_in_its_source() -> None:
    rows = read(str(constants.ROWS), None)
    for constant in constants.of_runs(rows):
        file, owner, _ = constant.place.split()
        assert 0 < constant.rows < len(rows) and constant.sources == 1
        assert file != "frameworks.toml" or "fitted" in frameworks()[owner].source


def test_the_page_is_up_to_date() -> None:
    """python -m benchmarks.constants --write"""
    text = "\n".join(constants.lines(read(str(constants.ROWS), None))) + "\n"
    assert constants.DOCUMENT.read_text(encoding="utf-8") == text
