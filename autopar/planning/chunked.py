"""Schedules with several stages per position: interleaved 1F1B and the V-shaped zero bubble.

Their memory and time have no closed form that stages could be cut by, so they refine layouts that the search found: the
chain is cut into evenly long stages, all layers take one recompute mode, the one that keeps most of those that fit, and
the result is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.costs.block_costs import MODES, BlockCost
from autopar.costs.pipeline_costs import PipelineCosts
from autopar.costs.rates import is_cpu
from autopar.errors import ConstraintError
from autopar.planning.layouts import Layout
from autopar.planning.pipelines import GROUP, Found, PipelineSearch
from autopar.planning.request import usable_bytes
from autopar.planning.stage_points import modes_of, point
from search.inter_op import solve_pipeline
from search.pipeline_problem import PipelineInfeasibleError, PipelineProblem, PipelineSolution, Submesh

CHUNKED = ("interleaved", "zero-bubble-v")
FREE_MEMORY = 1e18
"""Bytes: more than any stage needs."""

MOST_LAYOUTS = 3
"""How many layouts are refined; with a pinned schedule, how many feasible ones are compared."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """A schedule and its stages per position."""

    schedule: str
    count: int


def refined(search: PipelineSearch, found: tuple[Found, ...]) -> Iterator[Found]:
    """Layouts of `found`, or the most promising ones, under the schedules with several stages per position."""
    pinned = search.request.constraints.schedule
    if pinned is not None and pinned not in CHUNKED:
        return
    promising = [f.layout for f in found if f.layout.num_positions > 1]
    if pinned is not None:
        _check_depth(search)
        promising = [layout for _, layout in search.promising()]
    for choice in chunks_of(search):
        accepted = 0
        for layout in promising:
            better = _best_mode(search, layout, choice) if accepted < MOST_LAYOUTS else None
            if better is not None:
                accepted += 1
                yield better


def _check_depth(search: PipelineSearch) -> None:
    """Raises ConstraintError where the model is too short for the pinned schedule on every layout."""
    positions = sorted({each.num_positions for each in search.layouts if each.num_positions > 1})
    needed = [p * choice.count for p in positions for choice in chunks_of(search)]
    if needed and min(needed) > len(search.blocks):
        limits = search.request.constraints
        raise ConstraintError(
            f"the schedule {limits.schedule!r} needs more stages than the model has blocks",
            values=f"{min(needed)} stages ({positions[0]} positions), {len(search.blocks)} blocks",
            alternatives=["1f1b, gpipe or zero-bubble", "fewer pipeline positions (pp)"],
        )


def chunks_of(search: PipelineSearch) -> Iterator[Chunks]:
    """Those that the constraints leave."""
    limits = search.request.constraints
    for schedule in CHUNKED:
        if limits.schedule in (None, schedule):
            count = limits.chunks if schedule == "interleaved" and limits.chunks else 2
            yield Chunks(schedule, count)


def _best_mode(search: PipelineSearch, layout: Layout, chunks: Chunks) -> Found | None:
    """The layout under the first recompute mode that fits."""
    for found, costs in cuts_by_mode(search, layout, chunks):
        if costs.peak_bytes <= usable_bytes(search.request):
            return replace(found, objective=costs.simulated().prediction.step_seconds)
    return None


def cuts_by_mode(search: PipelineSearch, layout: Layout, chunks: Chunks) -> Iterator[tuple[Found, PipelineCosts]]:
    """The even cut, and what it costs, under every recompute mode, the one that keeps most first."""
    num_stages = layout.num_positions * chunks.count
    if num_stages > len(search.blocks) or layout.num_micro_batches < 2 or search.base(layout) is None:
        return
    here, pinned = search.chain_costs(layout), search.request.constraints.recompute
    for mode in MODES:
        if pinned == mode or (pinned is None and (mode != "offload" or not is_cpu(search.request.cluster))):
            solution = _even_cut(search, layout, here.costs, mode, num_stages)
            if solution is not None:
                found = search.found(layout, chunks.schedule, solution)
                yield found, search.assembled(layout, chunks.schedule, here, solution)


def _even_cut(
    search: PipelineSearch, layout: Layout, costs: Mapping[str, BlockCost], mode: str, num_stages: int
) -> PipelineSolution | None:
    """Stages of which the longest is as short as can be."""
    name = str(layout.mesh)
    points = {}
    for block, cost in costs.items():
        modes = modes_of(cost)
        label = mode if mode in modes else "none"
        points[block, name] = (point(cost, label, modes[label], "1f1b"),)
    problem = PipelineProblem(
        search.blocks,
        (Submesh(name, GROUP, 1, FREE_MEMORY),),
        {GROUP: num_stages},
        points,
        lambda p, i: 1,
        layout.num_micro_batches,
        num_stages=(num_stages,),
    )
    try:
        return solve_pipeline(problem)
    except PipelineInfeasibleError:
        return None
