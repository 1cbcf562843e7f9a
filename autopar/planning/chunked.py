"""Schedules with several stages per pipeline rank: interleaved 1F1B and the V-shaped zero bubble.

Their memory and time have no closed form that stages could be cut by, so they refine configs that the search found: the
chain is cut into evenly long stages, all layers take one recompute mode, the one that keeps most of those that fit, and
the result is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costs.layer_costs import MODES
from autopar.errors import ConstraintError
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.pipelines import EqualSearch
from autopar.planning.stage_points import modes_of, point
from autopar.planning.stage_problem import Found, StageProblem
from search.inter_op import solve_pipeline
from search.pipeline_problem import PipelineInfeasibleError, PipelineProblem, PipelineSolution, Submesh

CHUNKED = ("interleaved", "zero-bubble-v")
GROUP = "devices"
FREE_MEMORY = 1e18
"""Bytes that are more than any stage needs."""

MOST_REFINED = 3
"""How many configs are refined; with a pinned schedule, how many feasible ones are compared."""


def refined(search: EqualSearch, found: tuple[Found, ...]) -> Iterator[Found]:
    """Configs of `found`, or the most promising ones, under the schedules with several stages per pipeline rank."""
    pinned = search.request.constraints.schedule
    if pinned is not None and pinned not in CHUNKED:
        return
    if pinned is not None:
        _check_depth(search)
    promising = search.promising() if pinned is not None else [each.config for each in found if each.config.pp > 1]
    for schedule, chunks in chunks_of(search):
        accepted = 0
        for config in promising:
            better = _best_mode(search, config.under(schedule, chunks)) if accepted < MOST_REFINED else None
            if better is not None:
                accepted += 1
                yield better


def _check_depth(search: EqualSearch) -> None:
    """Raises ConstraintError where the model is too short for the pinned schedule with every number of ranks."""
    numbers, num_units = sorted({each.pp for each in search.unscheduled if each.pp > 1}), len(search.costs.units)
    needed = [number * chunks for number in numbers for _, chunks in chunks_of(search)]
    if needed and min(needed) > num_units:
        limits = search.request.constraints
        raise ConstraintError(
            f"the schedule {limits.schedule!r} needs more stages than the model has blocks",
            values=f"{min(needed)} stages ({numbers[0]} pipeline ranks), {num_units} blocks",
            alternatives=["1f1b, gpipe or zero-bubble", "fewer pipeline ranks (pp)"],
        )


def chunks_of(search: EqualSearch) -> Iterator[tuple[str, int]]:
    """(schedule, stages per pipeline rank), as the constraints leave them."""
    limits = search.request.constraints
    for schedule in CHUNKED:
        if limits.schedule in (None, schedule):
            yield schedule, limits.chunks if schedule == "interleaved" and limits.chunks else 2


def _best_mode(search: EqualSearch, config: ParallelConfig) -> Found | None:
    """The config under the first recompute mode that fits."""
    for cut in cuts_by_mode(search, config):
        if cut.peak_bytes <= search.costs.usable_bytes[0]:
            return replace(cut.found, objective=cut.step_seconds)
    return None


@dataclass
class EvenCut:
    """A config cut evenly under one recompute mode. peak_bytes: of the fullest rank."""

    problem: StageProblem
    found: Found
    peak_bytes: float

    @cached_property
    def step_seconds(self) -> float:
        """As simulated."""
        return self.problem.assembled(self.found.pipeline).simulated().prediction.step_seconds


def cuts_by_mode(search: EqualSearch, config: ParallelConfig) -> Iterator[EvenCut]:
    """The even cut under every recompute mode, the one that keeps most first."""
    costs, (stage_mesh,) = search.costs, config.stage_meshes
    is_long_enough = config.pp * config.chunks <= len(costs.units) and config.num_micro_batches > 1
    if not is_long_enough or search.solved_layers.of(config, stage_mesh) is None:
        return
    known, pinned = costs.known.cuts, search.request.constraints.recompute
    for mode in MODES:
        if pinned == mode or (pinned is None and (mode != "offload" or not costs.is_on_cpu)):
            if (config, mode) not in known:
                known[config, mode] = _even_cut(StageProblem.of(costs, config), mode)
            if known[config, mode] is not None:
                yield known[config, mode]


def _even_cut(problem: StageProblem, mode: str) -> EvenCut | None:
    solution = _evenly(problem, mode)
    if solution is None:
        return None
    found = problem.found(solution)
    return EvenCut(problem, found, problem.assembled(found.pipeline).peak_bytes)


def _evenly(problem: StageProblem, mode: str) -> PipelineSolution | None:
    """Stages of which the longest is as short as can be."""
    config, ((stage_mesh, here),) = problem.config, problem.chains.items()
    name, num_stages, points = str(stage_mesh), config.pp * config.chunks, {}
    for unit, cost in here.costs.items():
        modes = modes_of(cost)
        label = mode if mode in modes else "none"
        points[unit, name] = (point(cost, label, modes[label], "1f1b"),)
    even = PipelineProblem(
        units=problem.costs.units,
        submeshes=(Submesh(name, GROUP, 1, FREE_MEMORY),),
        groups={GROUP: num_stages},
        points=points,
        in_flight=lambda p, i: 1,
        num_micro_batches=config.num_micro_batches,
        num_stages=(num_stages,),
    )
    try:
        return solve_pipeline(even)
    except PipelineInfeasibleError:
        return None
