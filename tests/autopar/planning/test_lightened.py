"""Layers take the fastest recompute modes that fit as counted, whatever the closed form of memory made of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest

from autopar.planning.memory_fit import Fitting, lightened, none_is_below, solve_in_rounds
from search.pipeline_problem import (
    PipelineInfeasibleError,
    PipelineProblem,
    PipelineSolution,
    Point,
    StageChoice,
    Submesh,
    objective,
)

LAYERS, MODES = 6, 3


def fitting(seed: int, memory: float) -> Fitting:
    """One stage of layers in modes of which the slower ones keep less and take more while they run: all that is kept
    and what the fullest layer takes by the closed form, but only layers ahead of it as counted."""
    random_ = random.Random(seed)
    seconds = sorted(random_.uniform(1, 2) for _ in range(MODES))
    kept = sorted((random_.uniform(1, 10) for _ in range(MODES)), reverse=True)
    running = sorted(random_.uniform(1, 20) for _ in range(MODES))
    points = tuple(Point(str(i), seconds[i], seconds[i], 0.0, 0.0, kept[i], running[i]) for i in range(MODES))

    def problem(limits: Mapping[str, float]) -> PipelineProblem:
        submesh = Submesh("all", "devices", 1, limits["all"])
        return PipelineProblem(
            ("layer",) * LAYERS, (submesh,), {"devices": 1}, {("layer", "all"): points}, lambda p, i: 1, 1
        )

    def held(solution: PipelineSolution) -> dict[str, float]:
        before = most = 0.0
        for label, count in sorted(solution.stages[0].counts[0][1], key=lambda pair: -int(pair[0])):
            for _ in range(count):
                before += kept[int(label)]
                most = max(most, before + running[int(label)])
        return {"all": most}

    return Fitting(problem, held, {"all": memory})


def of_two_modes(own: Fitting) -> list[PipelineSolution]:
    """Every way to run the layers in one mode or two."""
    ways = {
        tuple((label, n) for label, n in ((a, count), (b, LAYERS - count)) if n)
        for a, b in itertools.combinations(map(str, range(MODES)), 2)
        for count in range(LAYERS + 1)
    }
    found = []
    for counts in ways:
        stages = (StageChoice(0, LAYERS - 1, "all", (("layer", counts),)),)
        found.append(PipelineSolution(objective(own.problem(own.memory_bytes), stages), stages))
    return found


def closed_form(own: Fitting, solution: PipelineSolution) -> float:
    """Bytes by the closed form."""
    points = {each.label: each for each in own.problem(own.memory_bytes).points["layer", "all"]}
    counts = solution.stages[0].counts[0][1]
    kept = sum(points[label].micro_bytes * count for label, count in counts)
    return kept + max(points[label].transient_bytes for label, _ in counts)


@pytest.mark.parametrize("seed", range(8))
def test_nothing_of_two_modes_that_fits_is_faster_and_less_memory_is_never_faster(seed: int) -> None:
    every = of_two_modes(fitting(seed, 0.0))
    budgets = sorted({fitting(seed, 0.0).stage_bytes(each)["all"] for each in every})
    last = float("inf")
    for memory in budgets:
        own = fitting(seed, memory)
        slowest = max(
            (each for each in every if own.stage_bytes(each)["all"] <= memory), key=lambda each: each.objective
        )
        fits = [each for each in every if own.stage_bytes(each)["all"] <= memory]
        found = lightened(own, slowest)
        assert own.stage_bytes(found)["all"] <= memory
        assert found.objective == pytest.approx(objective(own.problem(own.memory_bytes), found.stages))
        assert found.objective <= min(each.objective for each in fits) * (1 + 1e-6)
        assert found.objective <= last * (1 + 1e-6)
        last = found.objective


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_is_never_below_what_is_ruled_out(seed: int) -> None:
    own = fitting(seed, 30.0)
    try:
        found = solve_in_rounds(own)
    except PipelineInfeasibleError:
        assert all(closed_form(own, each) > 30.0 for each in of_two_modes(own))
        return
    assert not none_is_below(own, found.objective * (1 + 1e-6))
    free = min(each.objective for each in of_two_modes(own))
    assert none_is_below(own, free * (1 - 1e-6))
