"""The smallest budget that a refusal names: with it there is a plan, with 5 % less there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autopar.errors import InfeasibleError
from autopar.planning.memory_fit import Fitting, found_in_rounds
from autopar.planning.planner import search_plans
from search.pipeline_problem import PipelineProblem, PipelineSolution, Point, Submesh
from tests.autopar.requests import request_for

LESS = 0.95


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "cluster", "pins"),
    [
        slow("gpt2", "4 a100-80g", {"pp": 2, "schedule": "interleaved"}),
        slow("gpt2", "4 a100-80g", {"pp": 2, "schedule": "zero-bubble-v", "recompute": "full"}),
        slow("gpt2", "4 a100-80g", {"pp": 2, "tp": 2, "schedule": "zero-bubble"}),
        slow("llama", "4 a100-80g", {"pp": 2, "micro_batches": 4}),
        slow("llama", "4 a100-80g", {"dp": 4, "zero": 3}),
        slow("llama", "3 a100-80g", {}),
        slow("gpt2", "4 a100-80g", {}),
    ],
)
def test_it_is_the_smallest(name: str, cluster: str, pins: dict[str, Any]) -> None:
    workspace = request_for(name, cluster).cluster.device.reserved_bytes
    with pytest.raises(InfeasibleError, match="smallest budget that fits") as caught:
        search_plans(request_for(name, cluster, memory=workspace + 1, **pins))
    needed = caught.value.needed_bytes
    assert needed is not None and needed > workspace
    sure = caught.value.certainty  # of a plan that takes what is needed, or up to 2 % less (memory_spread.toml)
    assert sure is not None and sure.fit == "no"
    for figure, factor in ((sure.low_bytes, 0.97), (sure.high_bytes, 1.13)):
        assert 0.98 * factor <= (figure - workspace) / (needed - workspace) <= factor * (1 + 1e-9)
    plan = search_plans(request_for(name, cluster, memory=needed, **pins)).best.plan
    assert plan.prediction.peak_bytes <= needed
    less = workspace + int(LESS * (needed - workspace))
    with pytest.raises(InfeasibleError):
        search_plans(request_for(name, cluster, memory=less, **pins))


def test_cuts_of_one_time_are_asked_to_save_ever_more() -> None:
    """A cut of 50 + y bytes is counted as 100 + y / 10. To save just what the last one lacked takes a tenth off y, so
    that eight rounds would end at 74 bytes."""
    points = tuple(Point(str(k), 1 + 1e-9 * k, 1.0, 1.0, 100.0 - k, 0.0, 0.0) for k in range(60))

    def problem(limits: Mapping[str, float]) -> PipelineProblem:
        submesh = Submesh("all", "devices", 1, limits["all"])
        return PipelineProblem(
            ("layer",), (submesh,), {"devices": 1}, {("layer", "all"): points}, lambda p, i: 1, 1, num_stages=(1,)
        )

    def held(solution: PipelineSolution) -> dict[str, float]:
        ((_, ((label, _),)),) = solution.stages[0].counts
        return {"all": 95 + (100 - int(label)) / 10}

    solution = found_in_rounds(Fitting(problem, held, {"all": 100.0}))
    assert solution is not None and held(solution)["all"] <= 100
