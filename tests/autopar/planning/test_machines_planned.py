"""Every machine of the catalogue's later entries takes a plan of a small model, within seconds of a core."""

from __future__ import annotations

import time

import pytest

from autopar.planning.planner import search_plans
from tests.autopar.requests import request_for

CORE_SECONDS = 60.0
"""Some ten times what the slowest took, tracing included (3 to 7 s of a core)."""
OTHERS = (
    *("2x8 h20", "72 gb200", "2x72 gb300", "2x8 mi300x", "2x8 ascend-910b"),
    *("2x8 h800-sxm nvlink4-h800 efa-v3-400g", "4x4 a800-80g nvlink3-a800 slingshot-200g"),
)


@pytest.mark.parametrize(
    "cluster",
    [
        "2x8 b300",
        *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS),
    ],
)
def test_a_small_model_is_planned_in_a_sensible_time(cluster: str) -> None:
    start = time.process_time()
    found = search_plans(request_for("llama", cluster))
    assert time.process_time() - start < CORE_SECONDS
    plan = found.best.plan
    assert plan.num_ranks == request_for("llama", cluster).cluster.num_devices
    assert 0 < plan.prediction.step_seconds < 1
