"""Brute force over cuts, submeshes and points: the oracle that tests compare ``inter_op`` with.

Shares nothing with it but the types of ``pipeline_problem``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from search.pipeline_problem import (
    PipelineInfeasibleError,
    PipelineProblem,
    PipelineSolution,
    Point,
    StageChoice,
    StageNeed,
    Submesh,
)

MAX_UNITS = 8

Span = tuple[int, int, Submesh]
Run = tuple[float, float, float, tuple[Point, ...]]


def solve(problem: PipelineProblem, accept: Callable[[PipelineSolution], bool] | None = None) -> PipelineSolution:
    """Try every pipeline.

    Points are tried per unit; per stage only equal (fill, steady, step) triples are merged, nothing is bounded.
    accept: whether a pipeline that the problem allows counts, where that depends on more than the problem says; then
    only ways of equal bytes are merged.

    Raises:
        ValueError: more than ``MAX_UNITS`` units.
        PipelineInfeasibleError: as ``inter_op.solve_pipeline``.
    """
    if len(problem.units) > MAX_UNITS:
        raise ValueError(f"exhaustive search refuses {len(problem.units)} units, more than {MAX_UNITS}")
    best: PipelineSolution | None = None
    least: tuple[float, tuple[StageNeed, ...]] | None = None
    cache: dict[tuple[Span, tuple[float, float]], tuple[list[Run], float]] = {}
    for spans in _pipelines(problem):
        runs, needs = [], []
        for i, (first, last, submesh) in enumerate(spans):
            extra = sum(t.fixed_bytes for t in problem.tied if _in(spans[i], t.second) and not _in(spans[i], t.first))
            micro_batches = problem.live_micro_batches(len(spans), i)
            key = (spans[i], micro_batches)
            if key not in cache:
                cache[key] = _stage(problem, first, last, submesh, micro_batches, extra, accept is not None)
            runs.append(cache[key][0])
            needs.append(StageNeed(first, last, submesh.name, cache[key][1], submesh.memory_bytes))
        excess = max(need.needed_bytes - need.memory_bytes for need in needs)
        if excess == float("inf"):
            continue
        if least is None or excess < least[0]:
            least = excess, tuple(needs)
        for chosen in itertools.product(*runs):
            objective = _objective(problem, spans, chosen)
            if best is None or objective < best.objective:
                stages = tuple(_choice(problem, span, run[3]) for span, run in zip(spans, chosen, strict=True))
                solution = PipelineSolution(objective, stages)
                best = solution if accept is None or accept(solution) else best
    if best is None:
        raise PipelineInfeasibleError(least[1] if least is not None else ())
    return best


def _in(span: Span, unit: int) -> bool:
    return span[0] <= unit <= span[1]


def _pipelines(problem: PipelineProblem) -> Iterator[tuple[Span, ...]]:
    """Every cut with every assignment of submeshes that uses the devices of every group."""
    num_units = len(problem.units)
    for p in range(1, num_units + 1):
        if problem.num_stages is not None and p not in problem.num_stages:
            continue
        for submeshes in itertools.product(problem.submeshes, repeat=p):
            used: Counter[str] = Counter()
            for submesh in submeshes:
                used[submesh.group] += submesh.num_devices
            if any(used[group] != devices for group, devices in problem.groups.items()):
                continue
            for cut in itertools.combinations(range(1, num_units), p - 1):
                bounds = (0, *cut, num_units)
                yield tuple((bounds[i], bounds[i + 1] - 1, submeshes[i]) for i in range(p))


def _stage(
    problem: PipelineProblem,
    first: int,
    last: int,
    submesh: Submesh,
    micro_batches: tuple[float, float],
    extra_bytes: float,
    by_bytes: bool,
) -> tuple[list[Run], float]:
    """The ways to run a stage that fit, equal triples (by_bytes: of equal bytes) once; and the bytes of the leanest."""
    menus = [problem.points.get((kind, submesh.name), ()) for kind in problem.units[first : last + 1]]
    runs: dict[tuple[float, float, float, float], Run] = {}
    least = float("inf")
    flying, waiting = micro_batches
    for points in itertools.product(*menus):
        needed = sum(p.fixed_bytes + flying * p.micro_bytes + waiting * p.deferred_bytes for p in points) + extra_bytes
        needed += max(point.transient_bytes for point in points)
        least = min(least, needed)
        if needed > submesh.memory_bytes * (1 + 1e-12):
            continue
        fill, steady, step = (
            sum(getattr(point, name) for point in points) for name in ("fill_seconds", "steady_seconds", "step_seconds")
        )
        runs.setdefault((fill, steady, step, needed if by_bytes else 0.0), (fill, steady, step, points))
    return list(runs.values()), least


def _objective(problem: PipelineProblem, spans: Sequence[Span], chosen: Sequence[Run]) -> float:
    """Seconds per step."""
    fill = sum(run[0] for run in chosen)
    steady = [run[1] for run in chosen]
    step = [run[2] for run in chosen]
    for i in range(1, len(spans)):
        per_byte = (problem.transfer_seconds or {}).get((spans[i - 1][2].name, spans[i][2].name), 0.0)
        seconds = 2 * per_byte * (problem.boundary_bytes[spans[i][0]] if problem.boundary_bytes else 0.0)
        fill += seconds
        if problem.transfer_is_exposed:
            steady[i - 1] += seconds
            steady[i] += seconds
    for pair in problem.tied:
        ends = {i for i, span in enumerate(spans) if _in(span, pair.first) or _in(span, pair.second)}
        if len(ends) == 2:
            for i in ends:
                step[i] += pair.step_seconds
    return fill + (problem.num_micro_batches - 1) * max(steady) + max(step)


def _choice(problem: PipelineProblem, span: Span, points: tuple[Point, ...]) -> StageChoice:
    kinds = problem.units[span[0] : span[1] + 1]
    counts = []
    for kind in dict.fromkeys(kinds):
        taken = Counter(point.label for name, point in zip(kinds, points, strict=True) if name == kind)
        counts.append((kind, tuple(taken.items())))
    return StageChoice(span[0], span[1], span[2].name, tuple(counts))
