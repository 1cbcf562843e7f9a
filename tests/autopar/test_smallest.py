"""The smallest budget that a refusal names: with it there is a plan, with 5 % less there is none."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.planning.planner import search_plans
from cost_models.memory import workspace_bytes
from tests.autopar.planning import request_for

LESS = 0.95


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "cluster", "pins"),
    [
        slow("gpt2", "4 a100-80g", {"pp": 2, "schedule": "interleaved"}),
        slow("gpt2", "4 a100-80g", {"pp": 2, "schedule": "zero-bubble-v", "recompute": "full"}),
        ("gpt2", "4 a100-80g", {"pp": 2, "tp": 2, "schedule": "zero-bubble"}),
        slow("llama", "4 a100-80g", {"pp": 2, "micro_batches": 4}),
        slow("llama", "4 a100-80g", {"dp": 4, "zero": 3}),
        slow("llama", "3 a100-80g", {}),
        slow("gpt2", "4 a100-80g", {}),
    ],
)
def test_it_is_the_smallest(name: str, cluster: str, pins: dict[str, Any]) -> None:
    workspace = int(workspace_bytes(request_for(name, cluster).cluster.device))
    with pytest.raises(InfeasibleError, match="smallest that was found to do") as caught:
        search_plans(request_for(name, cluster, memory=workspace + 1, **pins))
    needed = caught.value.needed_bytes
    assert needed is not None and needed > workspace
    plan = search_plans(request_for(name, cluster, memory=needed, **pins)).best.plan
    assert plan.prediction.peak_bytes <= needed
    less = workspace + int(LESS * (needed - workspace))
    with pytest.raises(InfeasibleError):
        search_plans(request_for(name, cluster, memory=less, **pins))
