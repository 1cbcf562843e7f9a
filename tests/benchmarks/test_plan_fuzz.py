"""Random requests to the planner: a plan or an error of ours, and what must hold of it (benchmarks/plan_fuzz.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.planning.planner import search_plans
from benchmarks.fuzz_requests import Shape, draw, request_of
from benchmarks.plan_fuzz import examine, read_back
from tests.turns import one_in

QUICK = 28
# Seed 11 takes minutes; benchmarks/plan_fuzz.py has all.
SLOW = one_in(2, [*(seed for seed in range(20) if seed != 11), 38])

LLAMA_8B = Shape("llama", 32, 4096, 32, 8, 128256, 4096)
LLAMA_70B = Shape("llama", 80, 8192, 64, 8, 128256, 2048)


@pytest.mark.parametrize("seed", [QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW)])
def test_a_random_request(seed: int) -> None:
    outcome = examine(draw(seed))
    assert not outcome.violations, "\n".join((str(draw(seed)), outcome.text, *outcome.violations))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "cluster", "batch", "precision", "pins"),
    [
        pytest.param(LLAMA_70B, "3x8 v100-32g", 128, "bf16", {"zero": 3, "pp": 3, "tp": 8}, id="70B on 24 V100"),
        pytest.param(LLAMA_70B, "8 h100-sxm", 64, "bf16", {"tp": 8}, id="70B on 8 H100"),
        pytest.param(LLAMA_8B, "8 h100-sxm", 64, "fp32", {"pp": 8}, id="8B in fp32"),
    ],
)  # fmt: skip
def test_micro_batches_of_one_row_have_plans(
    shape: Shape, cluster: str, batch: int, precision: str, pins: dict[str, object]
) -> None:
    """Decisions are made for two rows, and these plans run one."""
    drawn = replace(
        draw(0), shape=shape, cluster=cluster, batch=batch, precision=precision, constraints=pins, kernels="auto",
        fp8=False, compression=None,
    )  # fmt: skip
    request = request_of(drawn)
    plan = search_plans(request).best.plan
    assert plan.prediction.peak_bytes <= request.capacity_bytes()
    assert not list(read_back(request, plan))
