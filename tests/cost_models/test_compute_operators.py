"""All timed sub-layers of four devices, as benchmarks/operators.py reads them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.operators import Row, left_out, num_constants, read_rows, summaries
from cost_models import catalog

# Median error of forward of all sub-layers. Batched products on the V100 are slower than the model has them.
LIMITS = {"a100-40g": 0.05, "a10g": 0.05, "l4": 0.05, "v100-32g": 0.08}
LINEAR = ("enc-attention-qkv", "enc-attention-dense", "enc-MLP-GEMM-1", "enc-MLP-GEMM-2")


@pytest.fixture(scope="module")
def rows(measured: Callable[[str], Any]) -> list[Row]:
    measured("measured_ops.json")
    return read_rows()[0]


def test_most_rows_are_used(rows: list[Row]) -> None:
    assert len(rows) > 7000
    assert num_constants() < 15


@pytest.mark.parametrize("name", LIMITS)
def test_forward_of_all_sub_layers(rows: list[Row], name: str) -> None:
    lines = {
        line[1]: line
        for line in summaries([r for r in rows if r.device == name], catalog.device, "")
        if line[2] == "forward"
    }
    assert lines["all"][5] < LIMITS[name]
    for layer in LINEAR:
        _, _, _, _, count, median, _, bias = lines[layer]
        assert count >= 10
        assert median < 0.10
        assert abs(bias) < 0.06


def test_backward_of_linear_layers_is_timed_on_zeros(rows: list[Row]) -> None:
    """Power-limited cards multiply zeros faster; the A10G, which is not, runs both products at its forward rate."""
    bias = {
        (line[0], line[1]): line[7]
        for line in summaries(rows, catalog.device, "")
        if line[2] == "backward" and line[1] in LINEAR
    }
    assert bias["l4", "enc-MLP-GEMM-2"] > 0.3
    assert abs(bias["a10g", "enc-MLP-GEMM-2"]) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_a_device_with_the_constants_of_the_others(rows: list[Row], name: str) -> None:
    family = left_out(rows, name)
    lines = [
        line for line in summaries([r for r in rows if r.device == name], lambda _: family, "") if line[1] == "all"
    ]
    assert all(line[5] < 0.15 for line in lines)
    assert math.isfinite(lines[0][7])
