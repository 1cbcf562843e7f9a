"""The pipeline planner against brute force on small problems: objective, feasibility, errors, bounds, validity."""

from __future__ import annotations

import contextlib
import gc
import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search import inter_op, stage_costs
from search.inter_op import (
    NothingBelowCutoffError,
    PipelineInfeasibleError,
    PipelineProblem,
    PipelineSolution,
    Point,
    Submesh,
    Tied,
)
from search.pipeline_problem import objective
from tests.search import exhaustive_pipeline, pipeline_bound, pipeline_problems


def solve_or_error(solver, problem: PipelineProblem) -> PipelineSolution | PipelineInfeasibleError:
    try:
        return solver(problem)
    except PipelineInfeasibleError as error:
        return error


def assert_agree(problem: PipelineProblem) -> None:
    """Equal objectives or equal shortfalls; a valid pipeline; a bound below the optimum."""
    expected = solve_or_error(exhaustive_pipeline.solve, problem)
    result = solve_or_error(inter_op.solve_pipeline, problem)
    bound = pipeline_bound.lower_bound(problem)
    if isinstance(expected, PipelineInfeasibleError):
        assert isinstance(result, PipelineInfeasibleError)
        assert result.smallest_excess == pytest.approx(expected.smallest_excess, nan_ok=True)
        assert bool(result.needs) == bool(expected.needs)
        if result.needs:
            assert max(need.needed_bytes - need.memory_bytes for need in result.needs) == result.smallest_excess > 0
            assert [need.first for need in result.needs] == [0, *(need.last + 1 for need in result.needs[:-1])]
        return
    assert isinstance(result, PipelineSolution), result
    scale = max(1.0, abs(expected.objective))
    assert abs(result.objective - expected.objective) <= 1e-9 * scale
    assert bound <= expected.objective + 1e-9 * scale
    assert abs(objective_of(problem, result) - result.objective) <= 1e-9 * scale
    assert abs(objective(problem, result.stages) - result.objective) <= 1e-9 * scale


def objective_of(problem: PipelineProblem, solution: PipelineSolution) -> float:
    """The objective from the counts; asserts every constraint."""
    stages = solution.stages
    assert [stage.first for stage in stages] == [0, *(stage.last + 1 for stage in stages[:-1])]
    assert stages[-1].last == len(problem.units) - 1 and len(stages) in problem.allowed_num_stages()
    meshes = {mesh.name: mesh for mesh in problem.submeshes}
    used = dict.fromkeys(problem.groups, 0)
    fill, steady, step = 0.0, [], []
    for i, stage in enumerate(stages):
        mesh = meshes[stage.submesh]
        used[mesh.group] += mesh.num_devices
        taken: list[tuple[Point, int]] = []
        for kind, counts in stage.counts:
            menu = {point.label: point for point in problem.points[kind, stage.submesh]}
            assert sum(n for _, n in counts) == problem.units[stage.first : stage.last + 1].count(kind)
            assert all(n > 0 for _, n in counts)
            taken += [(menu[label], n) for label, n in counts]
        assert sum(n for _, n in taken) == stage.last - stage.first + 1
        flying = problem.in_flight(len(stages), i)
        memory = sum(n * (p.fixed_bytes + flying * p.micro_bytes) for p, n in taken)
        memory += max(p.transient_bytes for p, _ in taken)
        stage_seconds = [
            sum(n * value for value, n in values)
            for values in zip(
                *([(p.fill_seconds, n), (p.steady_seconds, n), (p.step_seconds, n)] for p, n in taken), strict=True
            )
        ]
        for pair in problem.tied:
            here = [stage.first <= unit <= stage.last for unit in (pair.first, pair.second)]
            stage_seconds[2] += pair.step_seconds * (here[0] != here[1])
            memory += pair.fixed_bytes * (here[1] and not here[0])
        assert memory <= mesh.memory_bytes * (1 + 1e-12)
        fill += stage_seconds[0]
        steady.append(stage_seconds[1])
        step.append(stage_seconds[2])
        if i:
            seconds = problem.boundary_seconds(stage.first, stages[i - 1].submesh, stage.submesh)
            fill += seconds
            if problem.transfer_is_exposed:
                steady[i - 1] += seconds
                steady[i] += seconds
    assert used == problem.groups
    return fill + (problem.num_micro_batches - 1) * max(steady) + max(step)


# A small stage is looked up among all its ways, a large one is a knapsack: with no ways allowed, all are knapsacks.
@pytest.mark.parametrize("max_ways", [pytest.param(0, marks=pytest.mark.slow), 4096])
@pytest.mark.parametrize(
    "make", [pytest.param(pipeline_problems.small_problem, marks=pytest.mark.slow), pipeline_problems.layers_problem]
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_equals_brute_force(monkeypatch: pytest.MonkeyPatch, max_ways: int, make, seed: int) -> None:
    monkeypatch.setattr(stage_costs, "MAX_WAYS", max_ways)
    assert_agree(make(seed))


@pytest.mark.slow
def test_random_problems_are_of_all_sorts() -> None:
    """The comparison above means little if most instances are trivial."""
    count = {"feasible": 0, "short of memory": 0, "no cut": 0, "several stages": 0, "mixed points": 0, "apart": 0}
    for make, seed in itertools.product(
        (pipeline_problems.small_problem, pipeline_problems.layers_problem), range(100)
    ):
        result = solve_or_error(inter_op.solve_pipeline, make(seed))
        if isinstance(result, PipelineInfeasibleError):
            count["short of memory" if result.needs else "no cut"] += 1
            continue
        count["feasible"] += 1
        count["several stages"] += len(result.stages) > 1
        homes = [s.submesh for s in result.stages for _ in range(s.first, s.last + 1)]
        count["apart"] += any(homes[pair.first] != homes[pair.second] for pair in make(seed).tied)
        count["mixed points"] += any(len(c) > 1 for stage in result.stages for _, c in stage.counts)
    assert count["feasible"] >= 80 and count["several stages"] >= 40, count
    assert count["apart"] >= 2, count
    assert count["mixed points"] >= 30 and count["short of memory"] >= 15, count


def chain(layers: int, stages: int, points: tuple[Point, ...], memory: float, m: int = 8, **more) -> PipelineProblem:
    """Equal layers on single-device submeshes under 1F1B."""
    return PipelineProblem(
        ("layer",) * layers,
        (Submesh("gpu", "all", 1, memory),),
        {"all": stages},
        {("layer", "gpu"): points},
        pipeline_problems.one_forward_one_backward(m),
        m,
        **more,
    )


def test_recompute_goes_where_the_most_micro_batches_are_in_flight() -> None:
    """Four stages of four layers; memory 4 * 4 bytes holds every activation on stages with at most 4 / 4 in flight."""
    keep = Point("keep", 3, 3, 0, 0, 1, 0)
    again = Point("again", 4, 4, 0, 0, 0, 0)
    # Stage i may keep floor(8 / (4 - i)) layers: 2, 2, 4, 4; so the slowest takes 2 * 3 + 2 * 4 = 14.
    solution = inter_op.solve_pipeline(chain(16, 4, (keep, again), memory=8.0, m=100, num_stages=(4,)))
    steady = [sum({"keep": 3, "again": 4}[label] * n for label, n in stage.counts[0][1]) for stage in solution.stages]
    assert max(steady) == 14
    kept = [dict(stage.counts[0][1]).get("keep", 0) for stage in solution.stages]
    assert all(n * (4 - i) <= 8 for i, n in enumerate(kept))
    # Bottleneck 13 would need stages of at most 3.5, 3.5, 4.33, 4.33 layers: 3 + 3 + 4 + 4 < 16.
    assert solution.objective == sum(steady) + 99 * 14


def test_a_tied_parameter_pulls_units_together_or_costs_memory_and_time() -> None:
    point = (Point("only", 2, 2, 1, 4, 0, 0),)
    apart = inter_op.solve_pipeline(chain(4, 2, point, 13.0, tied=(Tied(0, 3, 5.0, 0.5),)))
    assert apart.objective == 8 + 7 * 4 + 2.5
    # In 12 bytes, 2 + 2 layers (8 and 8 + 5 bytes) do not fit, 3 + 1 (12 and 4 + 5) do; in 11 bytes nothing does.
    uneven = inter_op.solve_pipeline(chain(4, 2, point, 12.0, tied=(Tied(0, 3, 5.0, 0.5),)))
    assert uneven.objective == 8 + 7 * 6 + 3.5
    with pytest.raises(PipelineInfeasibleError) as caught:
        inter_op.solve_pipeline(chain(4, 2, point, 11.0, tied=(Tied(0, 3, 5.0, 0.5),)))
    assert caught.value.smallest_excess == 1.0
    # A wide enough stage holds both ends and pays nothing.
    together = inter_op.solve_pipeline(chain(4, 1, point, 16.0, tied=(Tied(0, 3, 5.0, 0.5),)))
    assert together.objective == 8 + 7 * 8 + 4


def test_infeasible_names_the_stage_and_the_bytes() -> None:
    point = (Point("fat", 2, 2, 0, 10, 1, 3), Point("lean", 4, 4, 0, 6, 1, 0))
    with pytest.raises(PipelineInfeasibleError) as caught:
        inter_op.solve_pipeline(chain(6, 2, point, 20.0))
    # Stage 0 has two micro-batches in flight, stage 1 has one: 2 * 8 and 4 * 7, or 3 * 8 and 3 * 7.
    assert caught.value.smallest_excess == 4.0 and "4 too few" in str(caught.value)
    assert [(need.first, need.last, need.needed_bytes) for need in caught.value.needs] == [(0, 2, 24.0), (3, 5, 21.0)]
    with pytest.raises(PipelineInfeasibleError, match="uses all devices"):
        inter_op.solve_pipeline(chain(3, 4, point, 1e9))


def test_what_found_no_pipeline_leaves_no_tables_behind() -> None:
    """Without a garbage collection: planners see thousands of such problems, whose tables filled 17 GiB."""
    point = (Point("only", 2, 2, 1, 4, 0, 0),)
    gc.collect()
    gc.disable()
    try:
        for cutoff in (float("inf"), 1e-3):
            with contextlib.suppress(PipelineInfeasibleError, NothingBelowCutoffError):
                inter_op.solve_pipeline(chain(4, 2, point, 7.0 if cutoff > 1 else 1e3), cutoff=cutoff)
        assert not any(type(item) is stage_costs.StageCosts for item in gc.get_objects())
    finally:
        gc.enable()


def test_a_cutoff_returns_only_what_is_better() -> None:
    problem = chain(9, 2, (Point("a", 3, 3, 1, 1, 1, 0), Point("b", 4, 4, 0.5, 1, 0, 0)), 12.0)
    best = inter_op.solve_pipeline(problem)
    assert inter_op.solve_pipeline(problem, cutoff=best.objective * 1.001).objective == best.objective
    with pytest.raises(NothingBelowCutoffError):
        inter_op.solve_pipeline(problem, cutoff=best.objective)


@pytest.mark.parametrize(
    "change", [{"num_micro_batches": 0}, {"boundary_bytes": (1.0,)}, {"tied": (Tied(0, 9, 1, 1),)}]
)
def test_problems_that_do_not_fit_together_are_refused(change: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "units": ("a", "a"),
        "submeshes": (Submesh("gpu", "all", 1, 1.0),),
        "groups": {"all": 2},
        "points": {},
        "in_flight": pipeline_problems.all_forward_all_backward(4),
        "num_micro_batches": 4,
    }
    with pytest.raises(ValueError):
        PipelineProblem(**{**arguments, **change})
