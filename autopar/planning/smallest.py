"""The smallest budget of memory that gives a plan, for the message of a request that has none.

Every search has a bound below which it has no plan, and a budget with which it has one: pipelines by their closed form
and their leanest cut, one stage by what its leanest decisions keep. What can still undercut the smallest budget known
is bisected between the two, with the very searches that the budget will be given to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planning.candidates import unequal_candidate
from autopar.planning.layouts import Layout
from autopar.planning.memory_fit import leanest
from autopar.planning.one_stage import Failure, at_budget
from autopar.planning.pipelines import PipelineSearch
from autopar.planning.request import Request, divisors, usable_bytes
from autopar.planning.unequal.problem import FoundUnequal
from autopar.planning.unequal.search import UnequalSearch
from autopar.units import bytes_text
from search.pipeline_problem import PipelineInfeasibleError, PipelineSolution

NEAR = 0.02
"""Share by which the budget that is named may be larger than the smallest."""


def bisected(low: float, high: float, fits: Callable[[float], bool]) -> float:
    """A budget that fits, no more than NEAR above one that does not. high fits, what is below `low` does not."""
    while high > low * (1 + NEAR):
        middle = math.ceil((low + high) / 2)
        if middle >= high:
            break
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def smallest_pipeline(search: PipelineSearch) -> tuple[Failure, ...]:
    """The layout of which a rank needs the least bytes, with those of its leanest cut by kind."""
    reserved = search.request.capacity_bytes() - usable_bytes(search.request)
    bounded = []
    for number, layout in enumerate(search.layouts):
        if search.base(layout) is not None and not search.bases.repeats(layout.mesh, layout.rows, layout.price):
            for schedule in search.schedules_of(layout):
                bounded.append((search.least_bytes(layout, schedule), number, schedule))
    best: Failure | None = None
    limit = math.inf
    for bound, number, schedule in sorted(bounded):
        if bound * (1 + NEAR) >= limit:
            break
        layout = search.layouts[number]
        found = _leanest_below(search, layout, schedule, limit)
        if found is not None:
            limit, solution = found
            best = _failure(search, layout, schedule, solution, limit + reserved)
    return (best,) if best is not None else ()


def _leanest_below(
    search: PipelineSearch, layout: Layout, schedule: str, limit: float
) -> tuple[float, PipelineSolution] | None:
    """The least usable bytes with which a layout is found to fit, if that is less than `limit`."""
    problem, held = search.fitting(layout, schedule)
    lean = leanest(problem, held, str(layout.mesh))
    if lean is None or lean.least_bytes * (1 + NEAR) >= limit:
        return None
    solutions = {lean.num_bytes: lean.solution}

    def fits(num_bytes: float) -> bool:
        try:
            solutions[num_bytes] = search.solve(layout, schedule, num_bytes).solution
        except PipelineInfeasibleError:
            return False
        return True

    high = lean.num_bytes
    if high > limit:
        high = math.floor(limit / (1 + NEAR))
        if not fits(high):
            return None
    least = bisected(lean.least_bytes, high, fits)
    return least, solutions[least]


def _failure(
    search: PipelineSearch, layout: Layout, schedule: str, solution: PipelineSolution, num_bytes: float
) -> Failure:
    kinds = max(
        search.position_bytes(layout, schedule, search.costs(layout), solution), key=lambda kinds: sum(kinds.values())
    )
    reserved = search.request.capacity_bytes() - usable_bytes(search.request)
    axes, sizes = layout.mesh.axes, layout.mesh.sizes
    if layout.num_positions > 1:
        axes, sizes = ("pp", *axes), (layout.num_positions, *sizes)
    return Failure(num_bytes, Mesh(axes, sizes), layout.num_micro_batches, kinds | {"workspace": float(reserved)})


def smallest_of_one_stage(request: Request, failures: list[Failure], limit: float) -> Failure | None:
    """The one that needs least of the meshes of one stage, where that is less than `limit`."""
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


def smallest_unequal(search: UnequalSearch, limit: float) -> Failure | None:
    """Of positions that are not alike, where they fit in less than `limit`. search: which found nothing."""
    request, low = search.request, search.request.capacity_bytes() + search.smallest_excess
    if low == math.inf or low * (1 + NEAR) >= limit:
        return None
    found: dict[float, FoundUnequal] = {}

    def fits(num_bytes: float) -> bool:
        limits = replace(request.constraints, memory_bytes=int(num_bytes))
        solved = search.asked(replace(request, constraints=limits)).run()
        if solved is not None:
            found[num_bytes] = solved
        return solved is not None

    if limit == math.inf:
        high = float(math.ceil(low))
        while not fits(high):
            high = float(math.ceil(high * (1 + NEAR)))
    else:
        high = float(math.floor(limit / (1 + NEAR)))
        if not fits(high):
            return None
        high = bisected(low, high, fits)
    plan = unequal_candidate(found[high], request).plan
    return Failure(high, plan.mesh, plan.num_micro_batches, plan.prediction.num_bytes)


def nothing_fits(
    request: Request, failures: list[Failure], pipelines: tuple[Failure, ...], unequal: UnequalSearch | None
) -> InfeasibleError:
    """The error with the smallest budget that gives a plan, and that plan's bytes by kind.

    failures: of one stage. pipelines: the smallest of them. unequal: the search over positions that are not alike.
    """
    best = pipelines[0] if pipelines else None
    one = smallest_of_one_stage(request, failures, best.num_bytes if best else math.inf)
    best = one or best
    if unequal is not None:
        best = smallest_unequal(unequal, best.num_bytes if best else math.inf) or best
    if best is None or best.num_bytes == math.inf:
        where = "; ".join(failure.where for failure in failures)
        return InfeasibleError("no plan exists under these constraints", values=where or None)
    needed = math.ceil(best.num_bytes)
    kinds = sorted(best.kinds.items(), key=lambda pair: -pair[1])
    error = InfeasibleError(
        "no plan fits the memory of one rank",
        values={
            "memory per rank": bytes_text(request.capacity_bytes()),
            "smallest that was found to do": f"{bytes_text(best.num_bytes)} ({best.where})",
            "its plan's": ", ".join(f"{kind} {bytes_text(size)}" for kind, size in kinds if size),
        }
        | _kept_whole(request),
        alternatives=[
            f"a budget of {needed} bytes per rank (memory={needed})",
            "more devices, a smaller batch or sequence, or bf16 precision",
        ],
    )
    error.needed_bytes = needed
    return error


def _kept_whole(request: Request) -> dict[str, str]:
    """Why the batch is not cut into micro-batches, which would need less, where it must not be."""
    fewest = next(iter(divisors(request.global_batch_size)[1:]), 1)
    reason = request.trace.whole_batch_reason(fewest)
    return {} if reason is None else {"micro-batches": f"1, because {reason}"}
