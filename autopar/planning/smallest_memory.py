"""The smallest memory budget that gives a plan, for the error message of a request that has none.

Every search has a bound below which it has no plan, and a budget with which it has one. Pipelines have their closed
form and their leanest cut; one stage has the bytes of its leanest decisions. Candidates that can still undercut the
smallest known budget are bisected between the two, by the same searches that will later use the budget.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.ir.mesh import PIPELINE_AXIS, Mesh
from autopar.planning.bounds import bytes_bound, stored_bound
from autopar.planning.candidates import candidate_of
from autopar.planning.chunked_schedules import CHUNKED, chunks_of, cuts_by_mode
from autopar.planning.config_costs import ConfigCosts
from autopar.planning.memory_fit import Fitting, found_in_rounds, leanest, least_bytes
from autopar.planning.one_stage import Failure, at_budget
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.pipelines import EqualSearch, PipelineSearch
from autopar.planning.request import Request, divisors
from autopar.planning.stage_problem import PipelineCut, StageProblem
from autopar.units import bytes_text, fit_text
from search.pipeline_problem import PipelineInfeasibleError, PipelineSolution

NEAR = 0.02
"""The share by which the reported budget may exceed the smallest."""


def bisected(low: float, high: float, fits: Callable[[float], bool]) -> float:
    """Return a budget that fits, no more than NEAR above one that does not. high fits; below `low` nothing does."""
    while high > low * (1 + NEAR):
        middle = math.ceil((low + high) / 2)
        if middle >= high:
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def smallest_pipeline(search: PipelineSearch, limit: float = math.inf) -> Failure | None:
    """Return the config that needs the fewest bytes per rank, with the bytes of its leanest cut by kind. Return None if
    no config needs less than `limit` on every rank."""
    request = search.request
    if isinstance(search, EqualSearch) and request.constraints.schedule in CHUNKED:
        least = _smallest_chunked(search)
    else:
        # The reported budget is one number, whatever the memory of the groups.
        limited = replace(request.constraints, memory_bytes=request.capacity_bytes())
        costs = ConfigCosts(replace(request, constraints=limited), search.solved)
        least = _smallest_cut(costs, search.configs(), limit - _reserved(costs))
    if least is None:
        return None
    num_bytes, cut = least
    plan = candidate_of(cut, request).plan
    axes, sizes, pp = plan.mesh.axes, plan.mesh.sizes, plan.pipeline.num_pipeline_ranks
    mesh = Mesh((PIPELINE_AXIS, *axes), (pp, *sizes)) if pp > 1 and not plan.pipeline.stage_meshes else plan.mesh
    needed = num_bytes + _reserved(search.costs)
    if not plan.pipeline.stage_meshes:
        # A search within the budget limits the plan to it on the graph of the plan's micro-batch.
        needed = max(needed, plan.prediction.peak_bytes)
    return Failure(needed, mesh, plan.num_micro_batches, plan.prediction.num_bytes)


def _smallest_cut(
    costs: ConfigCosts, configs: Iterable[ParallelConfig], limit: float
) -> tuple[float, PipelineCut] | None:
    """Return the feasible cut with the least memory, if that is less than `limit`, and its bytes on a rank of the
    roomiest stage mesh.

    When a bound on the bytes comes first, the least bytes of the closed form, which take longer, replace it. If the
    config still comes first, its leanest cut is solved.
    """
    best: tuple[float, PipelineCut] | None = None
    queue = [(bytes_bound(costs, config), number, config, False) for number, config in enumerate(configs)]
    heapq.heapify(queue)
    while queue and queue[0][0] * (1 + NEAR) < limit:
        bound, number, config, is_least = heapq.heappop(queue)
        problem = StageProblem.of(costs, config)
        if not is_least:
            heapq.heappush(queue, (least_bytes(problem.fitting()), number, config, True))
            continue
        smaller = _found_below(problem.fitting(), bound, limit)
        if smaller is not None:
            limit, solution = smaller
            best = limit, problem.cut_of(solution)
    return best


def _found_below(fitting: Fitting, least: float, limit: float) -> tuple[float, PipelineSolution] | None:
    """Return the least memory for which a cut is feasible, and the cut, if that is less than `limit`."""
    lean = leanest(fitting, least)
    if lean is None:
        return None
    solutions = {lean.num_bytes: lean.solution}

    def fits(num_bytes: float) -> bool:
        try:
            solution = found_in_rounds(fitting.within(num_bytes))
        except PipelineInfeasibleError:
            return False
        if solution is not None:
            solutions[num_bytes] = solution
        return solution is not None

    high = lean.num_bytes
    if high > limit:
        high = math.floor(limit / (1 + NEAR))
        if not fits(high):
            return None
    num_bytes = bisected(least, high, fits)
    return num_bytes, solutions[num_bytes]


def _smallest_chunked(search: EqualSearch) -> tuple[float, PipelineCut] | None:
    """Return usable bytes and the config under the pinned schedule with several stages per rank that needs the
    least."""
    least: tuple[float, PipelineCut] | None = None
    for stored, _, config in sorted(
        (stored_bound(search.costs, config) / config.pp, number, config)
        for number, (_, config) in enumerate(search.promising())
    ):
        if least is not None and stored >= least[0]:
            break
        for schedule, chunks in chunks_of(search):
            for cut in cuts_by_mode(search, config.under(schedule, chunks)):
                if least is None or cut.peak_bytes < least[0]:
                    least = cut.peak_bytes, cut.cut
    return least


def _reserved(costs: ConfigCosts) -> float:
    """Return the bytes of a rank that no decision may take, in the group of nodes where they are fewest."""
    return min(group.capacity_bytes() - usable for group, usable in zip(costs.groups, costs.usable_bytes, strict=True))


def smallest_of_one_stage(request: Request, failures: list[Failure], limit: float) -> Failure | None:
    """Return the leanest plan over the meshes of one stage, if it is below `limit`."""
    best: Failure | None = None
    for failure in sorted(failures, key=lambda f: f.least_bytes):
        if failure.num_bytes == math.inf or failure.least_bytes * (1 + NEAR) >= limit:
            continue
        kinds: dict[float, Mapping[str, float]] = {failure.num_bytes: failure.kinds}

        def fits(num_bytes: float, failure: Failure = failure, kinds: dict[float, Mapping[str, float]] = kinds) -> bool:
            plan = at_budget(request, failure, num_bytes)
            if plan is not None:
                kinds[num_bytes] = plan.prediction.num_bytes
            return plan is not None

        high = failure.num_bytes
        if high > limit:
            high = math.floor(limit / (1 + NEAR))
            if not fits(high):
                continue
        limit = bisected(failure.least_bytes, high, fits)
        best = replace(failure, num_bytes=limit, kinds=kinds[limit])
    return best


def nothing_fits(request: Request, failures: list[Failure], searches: Iterable[PipelineSearch]) -> InfeasibleError:
    """Return the error with the smallest budget that gives a plan, and that plan's bytes by kind. failures: of one
    stage."""
    best: Failure | None = None
    for search in searches:
        best = smallest_pipeline(search, best.num_bytes if best else math.inf) or best
    best = smallest_of_one_stage(request, failures, best.num_bytes if best else math.inf) or best
    if best is None or best.num_bytes == math.inf:
        where = "; ".join(failure.where for failure in failures)
        return InfeasibleError("no plan exists under these constraints", values=where or None)
    needed = math.ceil(best.num_bytes)
    kinds = sorted(best.kinds.items(), key=lambda pair: -pair[1])
    certainty = request.certainty(best.kinds) if request.mixed is None else None
    error = InfeasibleError(
        "no plan fits the memory of one rank",
        values={
            **capacities(request),
            "smallest budget that fits": f"{bytes_text(best.num_bytes)} ({best.where})",
            **({"whether it may fit": fit_text(certainty)} if certainty and certainty.fit != "no" else {}),
            "memory of its plan": ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds if size),
        }
        | _kept_whole(request),
        alternatives=[
            f"a budget of {needed} bytes per rank (memory={needed})",
            "more devices, a smaller batch or sequence, or bf16 precision",
        ],
    )
    error.needed_bytes, error.certainty = needed, certainty
    return error


def capacities(request: Request) -> dict[str, str]:
    """Return the memory of a rank, of every group of nodes, in words."""
    if request.mixed is None:
        return {"memory per rank": bytes_text(request.capacity_bytes())}
    groups = enumerate(request.whole.groups)
    return {f"memory per rank of {group}": bytes_text(request.capacity_bytes(number)) for number, group in groups}


def _kept_whole(request: Request) -> dict[str, str]:
    """Return why the batch must not be cut into micro-batches, which would need less memory."""
    fewest = next(iter(divisors(request.global_batch_size)[1:]), 1)
    reason = request.trace.whole_batch_reason(fewest)
    return {} if reason is None else {"micro-batches": f"1, because {reason}"}
