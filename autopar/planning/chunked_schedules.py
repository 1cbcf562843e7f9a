"""Schedules with several stages per pipeline rank: interleaved 1F1B and the V-shaped zero bubble.

Their memory and time have no closed form for cutting stages, so they refine configs of the search. The chain is cut
into stages of even length. All layers take one recompute mode: the one that keeps most among those that fit. The
result is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from autopar.costs.layer_costs import LayerCost, Mode, chosen_seconds
from autopar.costs.stage_costs import ROUND_OFF, holding_states
from autopar.errors import ConstraintError
from autopar.ir.plan_data import RECOMPUTE_MODES
from autopar.planning.bounds import stored_bound
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.pipelines import EqualSearch
from autopar.planning.stage_points import CLOSED_FORMS, modes_of, point
from autopar.planning.stage_problem import PipelineCut, StageProblem
from autopar.units import either_text
from cost_models.schedule import PLAIN, SCHEDULES, num_chunks, placement
from search.inter_op import solve_pipeline
from search.pipeline_problem import PipelineInfeasibleError, PipelineProblem, PipelineSolution, Submesh

CHUNKED = tuple(name for name in SCHEDULES if name not in CLOSED_FORMS)
GROUP = "devices"
FREE_MEMORY = 1e18
"""More bytes than any stage needs."""

MOST_REFINED = 3
"""How many feasible configs are refined: of the search's results, or at least with a pinned schedule."""
MOST_PINNED = 16
"""The same limit at most with a pinned schedule, if more may be faster by their bounds."""


def refined(search: EqualSearch, solutions: tuple[PipelineCut, ...]) -> Iterator[PipelineCut]:
    """Yield configs of `found`, or the most promising ones, under the schedules with several stages per pipeline
    rank."""
    pinned = search.request.constraints.schedule
    if pinned is not None and pinned not in CHUNKED:
        return
    if pinned is not None:
        _check_depth(search)
    for schedule, chunks in chunks_of(search):
        several = ((0.0, solution.config) for solution in solutions if solution.config.pp > 1)
        accepted, best = 0, math.inf
        for seconds, config in several if pinned is None else search.promising():
            is_enough = accepted >= MOST_PINNED or pinned is None or seconds > best
            if accepted >= MOST_REFINED and is_enough:
                break
            better = _best_mode(search, config.under(schedule, chunks))
            if better is not None:
                accepted, best = accepted + 1, min(best, better.objective)
                yield better


def _check_depth(search: EqualSearch) -> None:
    """Raise ConstraintError if the model is too short for the pinned schedule with every number of ranks."""
    numbers, num_units = sorted({config.pp for config in search.unscheduled if config.pp > 1}), search.costs.most_stages
    needed = [number * chunks for number in numbers for _, chunks in chunks_of(search)]
    if needed and min(needed) > num_units:
        limits = search.request.constraints
        raise ConstraintError(
            f"the schedule {limits.schedule!r} needs more stages than the model has blocks",
            values=f"{min(needed)} stages ({numbers[0]} pipeline ranks), {num_units} blocks",
            alternatives=[either_text(CLOSED_FORMS), "fewer pipeline ranks (pp)"],
        )


def chunks_of(search: EqualSearch) -> Iterator[tuple[str, int]]:
    """Yield (schedule, stages per pipeline rank) as the constraints allow."""
    limits = search.request.constraints
    for schedule in CHUNKED:
        if limits.schedule in (None, schedule):
            chunks = limits.chunks if SCHEDULES[schedule].chooses_chunks else None
            yield schedule, num_chunks(schedule, chunks)


def _best_mode(search: EqualSearch, config: ParallelConfig) -> PipelineCut | None:
    """Return the config under the first recompute mode that fits."""
    costs, usable = search.costs, search.costs.usable_bytes[0]
    solved_layer = search.solved_layers.of(config, config.stage_meshes[0])
    if solved_layer is None or stored_bound(costs, config) > usable * config.pp:
        return None  # on average over all ranks the stored bytes are too many, however the chain is cut

    def kept_bytes(mode: str) -> float:
        return sum(count * _mode(solved_layer.costs[unit], mode).kept_bytes for unit, count in costs.counts.items())

    leanest = _even_cut(search, config, min(_modes(search), key=kept_bytes))
    if leanest is None or leanest.held_bytes > usable:
        return None  # modes that keep more are cut into stages of about the same length
    for cut in cuts_by_mode(search, config):
        if cut.held_bytes <= usable and cut.peak_bytes <= usable:
            return replace(cut.cut, objective=cut.seconds)
    return None


@dataclass
class EvenCut:
    """A config cut evenly under one recompute mode."""

    problem: StageProblem
    cut: PipelineCut
    mode: str

    @cached_property
    def held_bytes(self) -> float:
        """Return the bytes of the fullest rank that it stores and that micro-batches in flight keep: most of its
        peak, quick to compute."""
        config, (here,), units = self.problem.config, self.problem.chains.values(), self.problem.costs.units
        stages = [units[stage.first : stage.last] for stage in self.cut.pipeline.stages]
        modes = {name: _mode(cost, self.mode) for name, cost in here.costs.items()}
        kept = {name: mode.kept_bytes for name, mode in modes.items()}
        stored = [sum(sum(here.costs[name].fixed.values()) for name in units_of_stage) for units_of_stage in stages]
        bytes_in_flight = [sum(kept[name] for name in units_of_stage) for units_of_stage in stages]
        deferred = [sum(modes[name].live.deferred for name in units_of_stage) for units_of_stage in stages]
        # The running micro-batch: a forward ends with all of it, a backward begins with all but the last unit's.
        begun = [size - kept[units_of_stage[-1]] for size, units_of_stage in zip(bytes_in_flight, stages, strict=True)]
        running = {"F": bytes_in_flight, "B": begun, "I": begun, "W": [0.0] * len(stages)}
        home = placement(config.schedule, config.pp, config.chunks)
        states = holding_states(config.schedule, config.pp, config.num_micro_batches, config.chunks)
        ranks = [
            sum(size for size, at in zip(stored, home, strict=True) if at == rank)
            + max(
                running[kind][at] + sum(bytes_in_flight[s] * n + deferred[s] * late for s, n, late in counts)
                for kind, at, counts in state
            )
            for rank, state in enumerate(states)
        ]
        return max(ranks) * (1 - ROUND_OFF)

    @cached_property
    def peak_bytes(self) -> float:
        """Return the peak of the fullest rank."""
        return self.problem.assembled(self.cut.pipeline).peak_bytes

    @cached_property
    def seconds(self) -> float:
        """Return the simulated seconds, as plan choice counts them."""
        return chosen_seconds(self.problem.assembled(self.cut.pipeline).simulated().prediction.seconds)


def cuts_by_mode(search: EqualSearch, config: ParallelConfig) -> Iterator[EvenCut]:
    """Return the even cut under every recompute mode, from the mode that keeps the most."""
    cuts = (_even_cut(search, config, mode) for mode in _modes(search))
    return (cut for cut in cuts if cut is not None)


def _modes(search: EqualSearch) -> tuple[str, ...]:
    """Return the recompute modes that the constraints and the device allow, from the mode that keeps the most."""
    pinned = search.request.constraints.recompute
    return (
        (pinned,)
        if pinned
        else tuple(mode for mode in RECOMPUTE_MODES if mode != "offload" or not search.costs.is_on_cpu)
    )


def _even_cut(search: EqualSearch, config: ParallelConfig, mode: str) -> EvenCut | None:
    """Return the even cut under one recompute mode; None if there are too few units or micro-batches for it."""
    costs, cuts = search.costs, search.costs.cached.cuts
    is_long_enough = config.pp * config.chunks <= costs.most_stages and config.num_micro_batches > 1
    if not is_long_enough or search.solved_layers.of(config, config.stage_meshes[0]) is None:
        return None
    if (config, mode) not in cuts:
        problem = StageProblem.of(costs, config)
        solution = _evenly(problem, mode)
        cuts[config, mode] = None if solution is None else EvenCut(problem, problem.cut_of(solution), mode)
    return cuts[config, mode]  # type: ignore[no-any-return]


def _mode(cost: LayerCost, label: str) -> Mode:
    """Return the mode of a unit; one without others keeps everything."""
    modes = modes_of(cost)
    return modes.get(label, modes["none"])


def _evenly(problem: StageProblem, mode: str) -> PipelineSolution | None:
    """Cut stages with the shortest possible longest stage."""
    config, ((stage_mesh, here),) = problem.config, problem.chains.items()
    name, num_stages, points = str(stage_mesh), config.pp * config.chunks, {}
    for unit, cost in here.costs.items():
        label = mode if mode in modes_of(cost) else "none"
        points[unit, name] = (point(cost, label, _mode(cost, mode), PLAIN),)
    even = PipelineProblem(
        units=problem.costs.units,
        submeshes=(Submesh(name, GROUP, 1, FREE_MEMORY),),
        groups={GROUP: num_stages},
        points=points,
        in_flight=lambda p, i: 1,
        num_micro_batches=config.num_micro_batches,
        num_stages=(num_stages,),
        uncut=problem.costs.uncut,
    )
    try:
        return solve_pipeline(even)
    except PipelineInfeasibleError:
        return None
