"""Cut a chain of units into pipeline stages on submeshes, and choose how each stage runs its units. Exact.

The problem. Units 0 ... N - 1 are cut into p consecutive non-empty stages. Stage s has an interval of units, runs
on submesh h_s and takes x_s,c,j units of class c with point j. With m micro-batches:
    minimize    sum_s fill_s + sum_boundaries transfer + (m - 1) max_s steady_s + max_s step_s

    fill_s   = sum x fill_j                                       fill and drain of the pipeline
    steady_s = sum x steady_j + transfers of its boundaries, if they keep it busy
    step_s   = sum x step_j + tied parameters that leave the stage

    subject to, for every stage,
            sum_j x_s,c,j = number of its units of class c,    x integral
        sum x (fixed_j + F(p, s) micro_j + D(p, s) deferred_j) + max_(x > 0) transient_j + tied copies <= memory of h_s
        and sum_s devices(h_s) = devices of every group.

F(p, s) is the number of micro-batches in flight, min(m, p - s) for 1F1B. D(p, s) is the number of micro-batches whose
weight gradients are deferred; a schedule that splits backwards keeps other tensors for them. One crossing of a
boundary takes transfer_seconds x boundary_bytes. A micro-batch crosses it forward and backward, so a boundary adds
twice that to the fill and, where transfers are exposed, to the steady time of both its stages.

How it is solved. For thresholds T, U let G(T, U) be the least fill of pipelines with every steady_s <= T and every
step_s <= U. The optimum is the least G(T, U) + (m - 1) T + U. G falls as T and U grow. So a rectangle [T0, T1] x [U0,
U1] of thresholds contains nothing below G(T1, U1) + (m - 1) T0 + U0 (``_explore``). Rectangles are cut at the times of
the solution of their upper corner, clipped to what can still beat the best known pipeline, and halved. T0 starts from
the least bottleneck of any pipeline (``_least_bottleneck``); with one micro-batch T is free.

- G(T, U) is a dynamic program over the units, backwards, so that s, F(p, s) and D(p, s) are known (``stage_chain``).
- It runs on lower bounds of the stages' fills, Lagrangian bounds for all stages at once (``stage_costs``). Stages on
the
  resulting path are then computed exactly, until the whole path is exact, hence optimal, or too expensive
  (``_least_fill``).
- A single stage is a knapsack with counts per class and point, solved exactly (``stage_knapsack``). Equal layers are
  counted; a stage is identified by its contents, not by its position.
- Each number of stages is tried by itself; all of them share the best known pipeline.

Sources and differences:

- Alpa (Zheng et al., OSDI 2022, arXiv:2201.12023), section 5.1: sum_s t_s + (m - 1) max t_s, a dynamic program inside
    an enumeration of t_max with early stop at a gap. Here there are two maxima, because the slowest stage pays for
    gradient synchronization and the optimizer once per step. Thresholds are explored by bounds, without a gap. Points
    of a stage are chosen inside, where Alpa fixes one intra-op plan per stage and mesh and recomputes everything.
  - Galvatron (Miao et al., VLDB 2023, arXiv:2211.13878): per-layer strategies in a stage by dynamic programming over
    quantized memory, stage boundaries by adjusting a guess. Here memory is not quantized and boundaries are exact.
    Only Galvatron's program has costs between strategies of neighboring layers (here a unit's points have to agree on
    the layout at its boundaries).
- Mist (Zhu et al., EuroSys 2025, arXiv:2503.19050): sampled Pareto frontiers of (steady, first/last extra) per stage
  with recompute and offload counted per stage, and a mixed integer program over stages. Here one stage mixes points
  freely, nothing is sampled, and no general solver is needed, which costs tens of milliseconds instead of seconds.
- nnScaler (Lin et al., OSDI 2024), section 4: pipelines of arbitrary schedules within a constrained space, costs by
  micro-batch count. Here the schedule enters by F, D and fill_j alone; the caller tries schedules one by one.

Exactness. The objective is optimal to a relative 1e-9 (``GAP``), and memory to ``problem.USAGE_TOLERANCE``. The search
is deterministic: equal problems give equal pipelines.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from search.pipeline_lean import infeasible
from search.pipeline_problem import (
    InFlight,
    PipelineInfeasibleError,
    PipelineProblem,
    PipelineSolution,
    Point,
    StageChoice,
    StageNeed,
    Submesh,
    Tied,
)
from search.problem import Array
from search.stage_chain import Chain, Cut, Kind
from search.stage_costs import Entry

__all__ = [
    "InFlight",
    "NothingBelowCutoffError",
    "PipelineInfeasibleError",
    "PipelineProblem",
    "PipelineSolution",
    "Point",
    "StageChoice",
    "StageNeed",
    "Submesh",
    "Tied",
    "solve_pipeline",
]

GAP = 1e-9
"""Relative difference of objectives below which the search stops."""

BELOW = 1.0 - 1e-11
"""Factor that makes a threshold exclude a time that it equals."""


@dataclass(slots=True)
class _Best:
    """The best known pipeline: its objective, or the caller's cutoff."""

    objective: float
    solution: PipelineSolution | None = None

    def excludes(self, bound: float) -> bool:
        """Whether a candidate with this lower bound cannot improve the objective."""
        return bound >= self.objective - GAP * abs(self.objective)


def solve_pipeline(problem: PipelineProblem, *, cutoff: float = float("inf")) -> PipelineSolution:
    """Return the pipeline with the least objective.

    Args:
        problem: the pipeline problem.
        cutoff: seconds; only a pipeline below it is returned. A known objective of another problem saves most of the
            time.

    Raises:
        PipelineInfeasibleError: no pipeline fits.
        NothingBelowCutoffError: there is a cutoff and no pipeline below it. Whether any pipeline fits is not checked,
            because that would take as long as a solution.
    """
    best, chains = _Best(cutoff), [Chain(problem, p) for p in _numbers_of_stages(problem)]
    for chain in chains:
        _explore(chain, best)
    if best.solution is not None:
        return best.solution
    if cutoff < float("inf"):
        raise NothingBelowCutoffError(f"no pipeline takes less than {cutoff} seconds per step")
    # The error is not assigned to a name: it references this frame, and the cycle would keep all tables alive until a
    # garbage collection, and a few large objects rarely trigger one.
    raise infeasible(chains)


class NothingBelowCutoffError(ValueError):
    """Every pipeline costs at least the cutoff."""


def _numbers_of_stages(problem: PipelineProblem) -> tuple[int, ...]:
    """Return the allowed numbers of stages that can use all devices, judged by the total of all groups."""
    sizes = [submesh.num_devices for submesh in problem.submeshes]
    total = sum(problem.groups.values())
    return tuple(p for p in problem.allowed_num_stages() if sizes and p * min(sizes) <= total <= p * max(sizes))


def _ceilings(chain: Chain) -> tuple[float, float]:
    """Return steady and step times that no stage exceeds."""
    problem = chain.problem
    steady = step = 0.0
    for kind in set(problem.units):
        points = [point for submesh in problem.submeshes for point in problem.points.get((kind, submesh.name), ())]
        count = problem.units.count(kind)
        steady += count * max((point.steady_seconds for point in points), default=0.0)
        step += count * max((point.step_seconds for point in points), default=0.0)
    busy = max((float(cost.busy.max(initial=0.0)) for cost in chain.costs.values()), default=0.0)
    return 2 * (steady + busy) + 1.0, 2 * (step + sum(pair.step_seconds for pair in problem.tied)) + 1.0


def _least_bottleneck(chain: Chain) -> float:
    """Return the least possible largest steady time of a pipeline that fits into memory; inf if none does."""
    exact = {kind: np.full((len(cost.micro_batches), len(cost.counts)), np.nan) for kind, cost in chain.costs.items()}
    most = float("inf")
    while True:
        tables: dict[Kind, Array] = {}
        for kind, cost in chain.costs.items():
            known_times = exact[kind]
            tables[kind] = np.where(np.isnan(known_times), cost.least_time(1), known_times)
            tables[kind][tables[kind] > most] = np.inf
        value, cuts = chain.solve(tables, bottleneck=True)
        unknown = [cut for cut in cuts if np.isnan(exact[cut.kind][cut.f, cut.shape])]
        if not unknown:
            return value
        for cut in unknown:
            exact[cut.kind][cut.f, cut.shape] = chain.costs[cut.kind].exact_steady(cut.f, cut.shape)
        most = min(most, max(exact[cut.kind][cut.f, cut.shape] for cut in cuts))


def _relaxed_bottleneck(chain: Chain, row: int) -> float:
    """Return a lower bound of the least largest steady (row 1) or step (row 2) time."""
    return chain.solve({kind: cost.least_time(row) for kind, cost in chain.costs.items()}, bottleneck=True)[0]


def _relaxed_fill(chain: Chain, limits: tuple[float, float]) -> float:
    """Return a lower bound of the least fill."""
    tables = {kind: cost.least_fill(*limits)[0] for kind, cost in chain.costs.items()}
    return chain.solve(tables, bottleneck=False)[0]


def _least_fill(
    chain: Chain, steady_limit: float, step_limit: float, most: float
) -> tuple[float, tuple[tuple[Cut, Entry], ...]]:
    """Return G(T, U) and a pipeline that attains it, or (a lower bound, ()) once that reaches ``most``."""
    while True:
        tables: dict[Kind, Array] = {}
        exact = {}
        for kind, cost in chain.costs.items():
            tables[kind], exact[kind] = cost.least_fill(steady_limit, step_limit)
        value, cuts = chain.solve(tables, bottleneck=False)
        if not cuts or value >= most:
            return value, ()
        unknown = dict.fromkeys((cut.kind, cut.f, cut.shape) for cut in cuts if exact[cut.kind][cut.f, cut.shape] < 0)
        if not unknown:
            entries = [chain.costs[cut.kind].entries[exact[cut.kind][cut.f, cut.shape]] for cut in cuts]
            return value, tuple(zip(cuts, entries, strict=True))
        for kind, f, shape in unknown:
            # A stage this far above its bound raises every path through it to `most`.
            stage_bound = float(tables[kind][f, shape])
            room = most - value + 1e-9 * abs(value)
            chain.costs[kind].refine(f, shape, steady_limit, step_limit, stage_bound + room)


def _explore(chain: Chain, best: _Best) -> None:
    """Search rectangles of thresholds by branch and bound; leave the best pipeline in ``best``."""
    per_steady = chain.problem.num_micro_batches - 1
    steady_low = _relaxed_bottleneck(chain, 1)
    step_low = _relaxed_bottleneck(chain, 2)
    if not np.isfinite(steady_low) or not np.isfinite(step_low):
        return
    steady_high, step_high = _ceilings(chain)
    least = _relaxed_fill(chain, (steady_high, step_high))
    if best.excludes(least + per_steady * steady_low + step_low):
        return
    if per_steady:
        steady_low = _least_bottleneck(chain)
        if not np.isfinite(steady_low) or best.excludes(least + per_steady * steady_low + step_low):
            return
        _, path = _least_fill(chain, steady_low, step_high, best.objective - per_steady * steady_low - step_low)
        _offer(chain, path, best)
    order = itertools.count()
    whole = (steady_low, steady_high, step_low, step_high)
    queue = [(least + per_steady * steady_low + step_low, next(order), least, whole)]
    while queue:
        bound, _, below, rectangle = heapq.heappop(queue)
        if best.excludes(bound):
            continue
        t0, t1, u0, u1 = _clip(rectangle, below, per_steady, best.objective)
        fixed = per_steady * t0 + u0
        value, path = _least_fill(chain, t1, u1, best.objective - fixed)
        if not path:
            continue
        _offer(chain, path, best)
        steady, step = max(entry.steady for _, entry in path), max(entry.step for _, entry in path)
        parts: list[tuple[float, float, float, float]] = []
        if per_steady and steady * BELOW > t0:
            middle = (t0 + steady) / 2
            parts += [(t0, middle, u0, u1), (middle, steady * BELOW, u0, u1)]
        if step * BELOW > u0:
            middle = (u0 + step) / 2
            low = max(steady, t0)
            parts += [(low, t1, u0, middle), (low, t1, middle, step * BELOW)]
        for part in parts:
            bound = value + per_steady * part[0] + part[2]
            if part[0] <= part[1] and part[2] <= part[3] and not best.excludes(bound):
                heapq.heappush(queue, (bound, next(order), value, part))


def _clip(
    rectangle: tuple[float, float, float, float], fill: float, per_steady: int, objective: float
) -> tuple[float, float, float, float]:
    """Shrink the rectangle to thresholds that can beat ``objective``, given a lower bound of the fill."""
    t0, t1, u0, u1 = rectangle
    room = objective - fill - per_steady * t0 - u0
    if not np.isfinite(room):
        return rectangle
    if per_steady:
        t1 = min(t1, t0 + room / per_steady)
    return t0, t1, u0, min(u1, u0 + room)


def _offer(chain: Chain, path: Sequence[tuple[Cut, Entry]], best: _Best) -> None:
    """Keep a nonempty path if its pipeline is the best so far."""
    if not path:
        return
    problem = chain.problem
    fill = sum(entry.fill for _, entry in path)
    for (before, _), (after, _) in itertools.pairwise(path):
        names = problem.submeshes[before.submesh].name, problem.submeshes[after.submesh].name
        fill += problem.boundary_seconds(after.start, *names)
    steady, step = max(entry.steady for _, entry in path), max(entry.step for _, entry in path)
    objective = fill + (problem.num_micro_batches - 1) * steady + step
    if objective >= best.objective:
        return
    stages = []
    for cut, entry in path:
        assert entry.labels is not None
        cost = chain.costs[cut.kind]
        counts = []
        for kind in dict.fromkeys(chain.problem.units[cut.start : cut.end]):
            c = cost.classes.index(kind)
            counts.append((kind, tuple((label, n) for (owner, label), n in entry.labels.items() if owner == c)))
        stages.append(StageChoice(cut.start, cut.end - 1, cost.submesh.name, tuple(counts)))
    best.objective, best.solution = objective, PipelineSolution(objective, tuple(stages))
