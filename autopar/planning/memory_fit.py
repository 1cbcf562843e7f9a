"""Fit pipelines to their memory: a bound on recomputation, and cuts that fit by the prediction's count.

The closed form that cuts a pipeline (`search.inter_op`) counts less than the prediction if several things are alive at
once that it takes one by one. A solution that exceeds the memory of a rank by such an amount is solved again with as
much less memory, until it fits. If no solution is left, the leanest pipeline is tried last.

The closed form may also count more: it adds the largest running peak of any unit to what all units keep, most of
which is freed by then. So the cut stays, and its units take faster modes (`lightened`).
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costs.layer_costs import Mode
from autopar.costs.memory_bound import least_seconds
from autopar.planning.stage_points import Holding
from search.inter_op import NothingBelowCutoffError, solve_pipeline
from search.pipeline_problem import (
    PipelineInfeasibleError,
    PipelineProblem,
    PipelineSolution,
    StageChoice,
    objective,
)

WithLimits = Callable[[Mapping[str, float]], PipelineProblem]
"""A problem with limits of memory by submesh."""

StageBytes = Callable[[PipelineSolution], Mapping[str, float]]
"""Bytes on the fullest rank of every used submesh, by the prediction's count."""

MAX_ROUNDS = 8

NOTHING = 1.0
"""Fewer bytes than any stage needs."""

TRIED = 8
"""Numbers of units in the faster one of two modes that are tried, before all numbers between two of them."""

SAME = 1e-6
"""Two solutions count as one if their times differ by at most this share, even with less memory."""

ROUNDING = 1e-6
"""The share of the memory that a bound adds, to stay below all plans."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """A pipeline to be cut. memory_bytes: limit of a rank of every submesh, by its name."""

    problem: WithLimits
    stage_bytes: StageBytes
    memory_bytes: Mapping[str, float]

    def within(self, num_bytes: float) -> Fitting:
        """Return the same with `num_bytes` on a rank of the roomiest submesh, and the others changed by the same
        difference."""
        raised = num_bytes - max(self.memory_bytes.values())
        return replace(self, memory_bytes={name: limit + raised for name, limit in self.memory_bytes.items()})


def least_recompute(
    units: Iterable[tuple[int, Iterable[Mode]]],
    holding: Holding,
    ranks: Sequence[tuple[int, int]],
    memory_bytes: float,
    fixed_bytes: float,
) -> float:
    """Return the least seconds of recomputation per micro-batch. Assume that all pipeline ranks share one memory, and
    that every unit is on the rank where it keeps least. Return inf if nothing fits even then.

    units: the number of units of a kind, and all their possible modes. ranks: (p, i), as in `Holding`. memory_bytes: of
    one device of every rank, added up. fixed_bytes: the share that does not depend on recomputation.
    """
    room_bytes = memory_bytes * (1 + ROUNDING) - fixed_bytes
    if room_bytes < 0:
        return math.inf
    classes = [(count, [(mode.seconds, holding.least(ranks, mode)) for mode in modes]) for count, modes in units]
    return least_seconds(classes, room_bytes)


def least_kept(
    units: Iterable[tuple[int, Iterable[Mode]]], holding: Holding, ranks: Sequence[tuple[int, int]]
) -> float:
    """Return the least bytes that all units keep, each in its best mode and on its best rank."""
    return sum(count * min(holding.least(ranks, mode) for mode in modes) for count, modes in units)


def solve_in_rounds(fitting: Fitting, cutoff: float = math.inf) -> PipelineSolution:
    """Return the best pipeline with all ranks within their memory. Raises PipelineInfeasibleError. With a cutoff,
    raises NothingBelowCutoffError if none is faster."""
    solution = found_in_rounds(fitting, cutoff)
    if solution is None:
        lean = leanest(fitting, least_bytes(fitting)) if cutoff == math.inf else None
        if lean is None or lean.num_bytes > max(fitting.memory_bytes.values()):
            raise PipelineInfeasibleError(())
        solution = lean.solution
    return lightened(fitting, solution)


def none_is_below(fitting: Fitting, cutoff: float) -> bool:
    """Return whether no pipeline takes less than `cutoff` seconds, even if only the units' kept bytes took memory.
    These are never more than the count."""
    problem = fitting.problem(fitting.memory_bytes)
    points = {
        key: tuple(replace(point, transient_bytes=0.0) for point in points_of_kind)
        for key, points_of_kind in problem.points.items()
    }
    try:
        solve_pipeline(replace(problem, points=points), cutoff=cutoff)
    except (PipelineInfeasibleError, NothingBelowCutoffError):
        return True
    return False


def lightened(fitting: Fitting, solution: PipelineSolution) -> PipelineSolution:
    """Return the solution with its stages unchanged and its units in the fastest modes that fit by the prediction's
    count, at most two of a class on a stage."""
    problem, stages = fitting.problem(fitting.memory_bytes), list(solution.stages)

    def fits(number: int, kind: str, modes: Counts) -> bool:
        trial = [*stages[:number], _with_modes(stages[number], kind, modes), *stages[number + 1 :]]
        bytes_of_stages = fitting.stage_bytes(PipelineSolution(solution.objective, tuple(trial)))
        return all(num_bytes <= fitting.memory_bytes[name] for name, num_bytes in bytes_of_stages.items())

    for number, stage in enumerate(solution.stages):
        flying, deferred = problem.live_micro_batches(len(stages), number)
        modes = {
            kind: {
                point.label: (
                    point.steady_seconds,
                    point.fixed_bytes + flying * point.micro_bytes + deferred * point.deferred_bytes,
                )
                for point in problem.points[kind, stage.submesh]
            }
            for kind, _ in stage.counts
        }
        for kind, counts in stage.counts:
            beside = sum(
                _kept_bytes(modes[name], modes_of_kind) for name, modes_of_kind in stages[number].counts if name != kind
            )
            room = fitting.memory_bytes[stage.submesh] - beside
            faster = _faster(modes[kind], dict(counts), room, functools.partial(fits, number, kind))
            if faster is not None:
                stages[number] = _with_modes(stages[number], kind, faster)
    if stages == list(solution.stages):
        return solution
    return PipelineSolution(objective(problem, stages), tuple(stages))


Counts = tuple[tuple[str, int], ...]
"""How many units of a class take a mode, by its label."""

Modes = Mapping[str, tuple[float, float]]
"""Seconds per micro-batch of a unit, and the bytes that it keeps, by the label of its mode."""


def _kept_bytes(modes: Modes, counts: Counts) -> float:
    """Return the bytes that units keep with modes as often as `counts` says."""
    return sum(count * modes[label][1] for label, count in counts)


def _faster(
    modes: Modes, counts: Mapping[str, int], room_bytes: float, fits: Callable[[Counts], bool]
) -> Counts | None:
    """Return the fastest counts of two modes that fit, if any of them are faster than `counts`.

    room_bytes: limit of the kept bytes of all units of the class. With more units in the faster mode, a stage may
    first need less, if a slower one takes more while it runs, and then more. So TRIED of the numbers that may fit
    are tried, the most units first.
    """
    total, best, best_counts = sum(counts.values()), sum(modes[label][0] * n for label, n in counts.items()), None
    for first, second in itertools.combinations(sorted(modes, key=lambda label: modes[label][0]), 2):
        (quick, more), (slow, less) = modes[first], modes[second]

        def mixed(count: int, names: tuple[str, str] = (first, second)) -> Counts:
            return tuple((label, n) for label, n in zip(names, (count, total - count), strict=True) if n)

        def may_fit(count: int, bytes_of_modes: tuple[float, float] = (more, less)) -> bool:
            return count * bytes_of_modes[0] + (total - count) * bytes_of_modes[1] <= room_bytes * (1 + ROUNDING)

        seconds = [count * quick + (total - count) * slow for count in range(total + 1)]
        wanted = [count for count in range(total + 1) if seconds[count] < best * (1 - SAME) and may_fit(count)]
        tried = wanted[:: -max(len(wanted) // TRIED, 1)]
        fitting = next((count for count in tried if fits(mixed(count))), None)
        if fitting is not None:
            between = [count for count in wanted if count >= fitting]
            most = bisect.bisect_left(between, True, lo=1, key=lambda count: not fits(mixed(count))) - 1
            best, best_counts = seconds[between[most]], mixed(between[most])
    return best_counts


def _with_modes(stage: StageChoice, kind: str, modes: Counts) -> StageChoice:
    """Return the stage with other modes of its units of one class."""
    return replace(stage, counts=tuple((name, modes if name == kind else others) for name, others in stage.counts))


def found_in_rounds(fitting: Fitting, cutoff: float = math.inf) -> PipelineSolution | None:
    """Return the pipeline of `solve_in_rounds`; None if one fits by the closed form but none by the prediction's
    count."""
    memory_bytes = fitting.memory_bytes
    limits = dict(memory_bytes)
    before, stride = math.inf, 1.0
    for number in range(MAX_ROUNDS):
        try:
            solution = solve_pipeline(fitting.problem(limits), cutoff=cutoff)
        except (PipelineInfeasibleError, NothingBelowCutoffError):
            if not number:
                raise
            break
        excess = {name: num_bytes - memory_bytes[name] for name, num_bytes in fitting.stage_bytes(solution).items()}
        if max(excess.values()) <= 0:
            return solution
        # Another solution of the same time usually exceeds the memory by as much.
        stride = 2 * stride if math.isclose(solution.objective, before, rel_tol=SAME) else 1.0
        before = solution.objective
        limits |= {name: limits[name] - stride * max(lacking, 0.0) for name, lacking in excess.items()}
    return None


def least_bytes(fitting: Fitting) -> float:
    """Return the bytes on a rank of the roomiest submesh below which nothing fits, by the closed form; inf if no cut
    uses the devices, whatever the memory."""
    try:
        solve_pipeline(fitting.problem(fitting.within(NOTHING).memory_bytes))
    except PipelineInfeasibleError as error:
        return math.inf if math.isnan(error.smallest_excess) else NOTHING + error.smallest_excess
    return NOTHING


@dataclass(frozen=True, slots=True)
class Lean:
    """The pipeline that keeps least by the closed form, with its bytes on a rank of the roomiest submesh. These
    suffice to solve it and to fit the prediction's count."""

    num_bytes: float
    solution: PipelineSolution


def leanest(fitting: Fitting, least: float) -> Lean | None:
    """Return the leanest cut of a pipeline with these `least_bytes`; None if they are infinite."""
    if least == math.inf:
        return None
    enough = fitting.within(least * (1 + 1e-9)).memory_bytes
    solution = solve_pipeline(fitting.problem(enough))
    lacking = max(num_bytes - enough[name] for name, num_bytes in fitting.stage_bytes(solution).items())
    return Lean(max(enough.values()) + max(lacking, 0.0), solution)
