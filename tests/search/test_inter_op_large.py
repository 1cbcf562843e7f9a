"""Pipelines of real depth: uneven cuts in closed form, two stages enumerated whole, time, and the gap to the bound."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from search import inter_op
from search.inter_op import PipelineInfeasibleError, PipelineProblem, Point, Submesh
from tests.search import pipeline_bound, pipeline_problems


@pytest.mark.parametrize(("layers", "stages"), [(96, 7), (96, 6), (126, 64), (5, 5), (1, 1)])
def test_uneven_cuts_have_the_closed_form(layers: int, stages: int) -> None:
    """One point: the slowest stage has ceil(layers / stages) layers, whatever the degree."""
    problem = PipelineProblem(
        ("layer",) * layers,
        (Submesh("gpu", "all", 1, 1e9),),
        {"all": stages},
        {("layer", "gpu"): (Point("only", 3.0, 3.0, 0.25, 1.0, 1.0, 0.0),)},
        pipeline_problems.one_forward_one_backward(32),
        32,
    )
    solution = inter_op.solve_pipeline(problem)
    most = -(-layers // stages)
    assert solution.objective == pytest.approx(3.0 * layers + 31 * 3.0 * most + 0.25 * most, rel=1e-12)
    assert len(solution.stages) == stages
    bound = pipeline_bound.lower_bound(problem)
    assert bound <= solution.objective * (1 + 1e-12) and bound >= 0.8 * solution.objective


def test_six_gpus_of_two_groups_share_ninety_six_layers() -> None:
    """Four fast and two half as fast GPUs, one per stage, 96 layers: at most 20 layers on a fast, 10 on a slow one."""
    fast, slow = Point("p", 3.0, 3.0, 0, 1, 0, 0), Point("p", 6.0, 6.0, 0, 1, 0, 0)
    problem = PipelineProblem(
        ("layer",) * 96,
        (Submesh("a100", "a", 1, 1e9), Submesh("v100", "v", 1, 1e9)),
        {"a": 4, "v": 2},
        {("layer", "a100"): (fast,), ("layer", "v100"): (slow,)},
        pipeline_problems.one_forward_one_backward(1000),
        1000,
    )
    solution = inter_op.solve_pipeline(problem)
    # 4 * 19 + 2 * 9 < 96, so 60 seconds; of those cuts the least fill has as many layers as possible on fast GPUs.
    layers = {"a100": 0, "v100": 0}
    for stage in solution.stages:
        layers[stage.submesh] += stage.last - stage.first + 1
    assert layers == {"a100": 80, "v100": 16}
    assert solution.objective == pytest.approx(80 * 3 + 16 * 6 + 999 * 60)


@pytest.mark.parametrize("seed", range(12))
def test_two_deep_stages_equal_an_enumeration_of_counts(seed: int) -> None:
    """18 equal layers on two stages: every cut, with every way to count four points on both sides."""
    rng = np.random.default_rng(seed)
    layers, m = 18, int(rng.choice([2, 8, 64]))
    points = []
    for j in range(4):
        seconds = rng.random() + 0.5
        memory = (1 + 0.2 * rng.random()) / seconds
        figures = (seconds, seconds * (0.9 + 0.2 * rng.random()), rng.random())
        points.append(Point(f"p{j}", *figures, np.ceil(20 * memory), np.ceil(4 * memory), float(rng.integers(9))))
    limit = float(rng.choice([220, 260, 300]))
    problem = PipelineProblem(
        ("layer",) * layers,
        (Submesh("gpu", "all", 4, limit),),
        {"all": 8},
        {("layer", "gpu"): tuple(points)},
        pipeline_problems.one_forward_one_backward(m),
        m,
    )
    best = np.inf
    for cut in range(1, layers):
        sides = []
        for size, flying in ((cut, min(m, 2)), (layers - cut, 1)):
            ways = [np.diff((-1, *bars, size + 3)) - 1 for bars in itertools.combinations(range(size + 3), 3)]
            counts = np.array(ways)
            memory = counts @ np.array([p.fixed_bytes + flying * p.micro_bytes for p in points])
            memory = memory + (np.where(counts > 0, [p.transient_bytes for p in points], 0)).max(axis=1)
            kept = counts[memory <= limit]
            sides.append(kept @ np.array([(p.fill_seconds, p.steady_seconds, p.step_seconds) for p in points]))
        if all(len(side) for side in sides):
            a, b = sides[0][:, None], sides[1][None]
            slowest = np.maximum(a[..., 1], b[..., 1])
            best = min(best, (a[..., 0] + b[..., 0] + (m - 1) * slowest + np.maximum(a[..., 2], b[..., 2])).min())
    try:
        objective = inter_op.solve_pipeline(problem).objective
    except PipelineInfeasibleError:
        objective = np.inf
    assert objective == pytest.approx(best, rel=1e-9)
    assert pipeline_bound.lower_bound(problem) <= best * (1 + 1e-9)


@pytest.mark.parametrize("num_stages", [2, 8, pytest.param(64, marks=pytest.mark.slow)])
def test_full_size_is_near_the_bound(num_stages: int) -> None:
    """126 layers, head and tail, ten points, m = 512; some 30 to 120 ms each."""
    for correlated, share in itertools.product((True, False), (0.1, 0.4, 0.8)):
        problem = pipeline_problems.transformer(1, num_stages=num_stages, memory_share=share, correlated=correlated)
        solution = inter_op.solve_pipeline(problem)
        bound = pipeline_bound.lower_bound(problem)
        assert bound <= solution.objective * (1 + 1e-9)
        # With two layers per stage a fraction of a layer is far from whole ones.
        assert solution.objective <= bound * (1.12 if num_stages == 64 else 1.05)


def test_less_memory_never_helps() -> None:
    """Objectives rise as the memory shrinks."""
    objectives = []
    for share in (1.5, 0.7, 0.4, 0.2, 0.1):
        problem = pipeline_problems.transformer(3, num_layers=48, num_stages=6, memory_share=share)
        objectives.append(inter_op.solve_pipeline(problem).objective)
    assert all(less <= more * (1 + 1e-9) for less, more in itertools.pairwise(objectives))
    assert objectives[-1] > objectives[0]
