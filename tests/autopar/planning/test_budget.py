"""What a memory budget does to a plan: it is kept, and less memory never makes a step faster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.errors import InfeasibleError
from autopar.planning.pipelines import EqualSearch
from autopar.planning.planner import search_plans
from autopar.planning.predict import chosen, one_stage_costs
from autopar.planning.request import operators_at, pricer_for
from autopar.planning.stage_problem import StageProblem
from benchmarks.budget import SLACK, Row, complaints
from tests.autopar.requests import request_for

NUM_SHARES = 8
"""Of the way from the least budget to an ample one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_budgets_are_kept_and_less_memory_is_never_faster(name: str) -> None:
    """All shares of the way from the smallest budget that is named to what the fastest plan takes, and one below it.

    A whole model down to nothing is benchmarks/budget.py.
    """
    ample = search_plans(request_for(name)).best.plan.prediction
    workspace = float(ample.num_bytes["workspace"])
    with pytest.raises(InfeasibleError) as error:
        search_plans(request_for(name, memory=int(workspace) + 1))
    least = error.value.needed_bytes
    assert least is not None
    rows, last = [], 0.0
    for share in (*(number / NUM_SHARES for number in reversed(range(NUM_SHARES + 1))), None):
        below = workspace + 0.95 * (least - workspace)
        budget = math.ceil(below if share is None else least + share * (ample.peak_bytes - least))
        try:
            plan = search_plans(request_for(name, memory=budget)).best.plan
        except InfeasibleError:
            rows.append(Row(budget, None, 0.0))
            continue
        rows.append(Row(budget, plan, 0.0))
        assert plan.prediction.peak_bytes <= budget
        assert chosen(plan) >= last * (1 - SLACK)
        last = chosen(plan)
    assert [row.plan is not None for row in rows] == [True] * (NUM_SHARES + 1) + [False]
    assert len({row.plan.prediction.step_seconds for row in rows if row.plan is not None}) >= 3
    assert not [text for text in complaints(rows) if "come in at rows" not in text]


@pytest.mark.parametrize(
    "pinned",
    [
        *(pytest.param({"dp": 4, "tp": 1, "zero": zero}, marks=pytest.mark.slow) for zero in (0, 1, 2, 3)),
        {"dp": 2, "tp": 2, "zero": 3},
        pytest.param({"dp": 1, "tp": 4}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_search_counts_the_bytes_that_the_prediction_counts(pinned: dict[str, int]) -> None:
    """Of every layout in one search: what is kept of one must not serve another whose parameters lie elsewhere."""
    # With these links tensor parallelism pays for some numbers of rows only, so placements differ by them.
    request = request_for("llama", "4 cpu", pp=1, **pinned)
    search = EqualSearch(request)
    configs = sorted((each for each in search.configs() if not each.offload), key=lambda each: each.num_micro_batches)
    assert len({each.num_micro_batches for each in configs}) > 1
    for config in configs:
        problem = StageProblem.of(search.costs, config)
        found = problem.solve()
        (counted,) = problem.assembled(found.pipeline).num_bytes()
        rows, (stage_mesh,) = config.rows, config.stage_meshes
        graph, operators = operators_at(request, rows)
        pricer = pricer_for(request, stage_mesh.mesh, config.num_micro_batches, config.offload)
        costs = one_stage_costs(graph, operators, pricer, found.solved_layer.assignment(config.zero, rows))
        predicted = costs.simulated().prediction.num_bytes
        for kind in ("parameters", "gradients", "optimizer state"):
            assert counted[kind] == pytest.approx(predicted[kind], rel=1e-9), (config, kind)
        total = sum(predicted.values()) - predicted.get("workspace", 0.0)
        assert sum(counted.values()) == pytest.approx(total, rel=1e-4), config


@pytest.mark.slow
def test_what_must_not_happen_is_noticed() -> None:
    plan = search_plans(request_for("gpt2", dp=4)).best.plan
    faster = replace(plan, prediction=replace(plan.prediction, seconds={"compute": 1e-9}))
    peak = int(plan.prediction.peak_bytes)
    wrong = complaints([Row(2 * peak, plan, 0.0), Row(peak // 2, faster, 0.0)])
    assert any("the peak is" in text for text in wrong)
    assert any("is faster than" in text for text in wrong)
    assert any("not impossible" in text for text in wrong)
    assert any("come in at rows" in text for text in wrong)
    assert any("feasible below" in text for text in complaints([Row(1, None, 0.0), Row(peak, plan, 0.0)]))
