"""The best pipeline under given terms: cut, submeshes and recompute modes, as one problem of `search.inter_op`.

Transfers between two submeshes are priced at the border with the most bytes and taken to be linear in them. A
parameter that two blocks read costs as much as on the seat where a second copy costs most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.costs.borders import hop_seconds
from autopar.costs.pipeline_costs import ChainCosts, pipeline_costs
from autopar.plan import Pipeline, StagePlan
from autopar.planning.bases import stored_parameters
from autopar.planning.memory_fit import Fitting, solve_in_rounds
from autopar.planning.request import usable_bytes
from autopar.planning.stage_points import HOLDING, modes_of, pipeline_of, point, stretch_of
from autopar.planning.unequal.seat_costs import SeatCosts
from autopar.planning.unequal.terms import Terms
from autopar.seats import Seat
from autopar.sharding.choices import Choices
from search.pipeline_problem import PipelineProblem, PipelineSolution, Submesh, Tied

Seats = Mapping[str, Seat]
"""Shapes by the names of their submeshes."""

Table = Mapping[str, ChainCosts]
"""What the chain costs on every submesh, by its name."""


@dataclass(frozen=True, slots=True)
class FoundUnequal:
    """A solved problem. objective: seconds by the closed form. choices: on `axes`. pipeline: with its seats."""

    objective: float
    terms: Terms
    choices: Choices
    axes: tuple[str, ...]
    pipeline: Pipeline


def solve(costs: SeatCosts, terms: Terms, cutoff: float = math.inf) -> FoundUnequal:
    """The best pipeline. Raises PipelineInfeasibleError; with a cutoff NothingBelowCutoffError where none is faster."""
    return found(costs, terms, solve_in_rounds(fitting(costs, terms), cutoff))


def fitting(costs: SeatCosts, terms: Terms) -> Fitting:
    """A pipeline under the terms to be cut in the memory of the request's devices."""
    seats = {str(seat): seat for seat in terms.seats}
    table = {name: costs.chain_costs(seat, terms) for name, seat in seats.items()}

    def held(solution: PipelineSolution) -> dict[str, float]:
        fullest: dict[str, float] = {}
        pipeline = _pipeline(costs, solution, terms, seats)
        ranks = [table[str(seat)] for seat in pipeline.seats]
        counted = pipeline_costs(ranks, pipeline, costs.request.whole).num_bytes()
        for seat, kinds in zip(pipeline.seats, counted, strict=True):
            fullest[str(seat)] = max(fullest.get(str(seat), 0.0), sum(kinds.values()))
        return fullest

    usable = {name: usable_bytes(costs.request.of_group(seat.group)) for name, seat in seats.items()}
    return Fitting(lambda limits: _problem(costs, terms, seats, table, limits), held, usable)


def found(costs: SeatCosts, terms: Terms, solution: PipelineSolution) -> FoundUnequal:
    """Terms with a solution of their problem."""
    seats = {str(seat): seat for seat in terms.seats}
    choices, axes = costs.choices(terms)
    here = costs.choices_at(terms, terms.rows)
    staged = replace(here, parameters=stored_parameters(choices, axes, axes, terms.zero))
    return FoundUnequal(solution.objective, terms, staged, axes, _pipeline(costs, solution, terms, seats))


def _problem(
    costs: SeatCosts, terms: Terms, seats: Seats, table: Table, memory_bytes: Mapping[str, float]
) -> PipelineProblem:
    count, pinned = terms.num_micro_batches, costs.request.constraints.recompute
    points, holding = {}, HOLDING[terms.schedule](count)
    for name, here in table.items():
        stretch = stretch_of(here.costs, costs.counts, terms.schedule, count)
        for block, cost in here.costs.items():
            modes = modes_of(cost, pinned, has_host=not costs.is_on_cpu)
            points[block, name] = tuple(point(cost, k, mode, terms.schedule, stretch) for k, mode in modes.items())
    sizes = {name: here.border_bytes for name, here in table.items()}
    return PipelineProblem(
        costs.blocks,
        tuple(Submesh(n, str(s.group), s.mesh.num_ranks, memory_bytes[n]) for n, s in seats.items()),
        {str(number): group.num_devices for number, group in enumerate(costs.groups)},
        points,
        holding.in_flight,
        count,
        tuple(max(border) for border in zip(*sizes.values(), strict=True)),
        _byte_seconds(costs, seats, sizes),
        costs.is_on_cpu,
        tuple(_tied(costs, table)),
        num_stages=costs.positions(terms.seats),
        put_off=holding.put_off,
    )


def _byte_seconds(
    costs: SeatCosts, seats: Seats, sizes: Mapping[str, tuple[float, ...]]
) -> dict[tuple[str, str], float]:
    """Of one byte of the largest message, between any two submeshes. sizes: of every submesh at every border."""
    largest = [max(border) for border in zip(*sizes.values(), strict=True)]
    at = max(range(len(largest)), key=lambda i: largest[i])
    return {
        (a, b): hop_seconds(costs.request.whole, seats[a], seats[b], max(sizes[a][at], sizes[b][at]))
        / max(largest[at], 1.0)
        for a in seats
        for b in seats
    }


def _tied(costs: SeatCosts, table: Table) -> Iterator[Tied]:
    """Parameters that two blocks read."""
    ties = [here.ties(num_ranks=2) for here in table.values()] if costs.shared else []
    for name, (first, last) in costs.shared.items():
        known = [each[name] for each in ties if name in each]
        if known:
            size, seconds = max(sum(sizes) for sizes, _ in known), max(seconds for _, seconds in known)
            yield Tied(first, last, size, seconds, alike=False)


def _pipeline(costs: SeatCosts, solution: PipelineSolution, terms: Terms, seats: Seats) -> Pipeline:
    positions = tuple(seats[stage.submesh] for stage in solution.stages)
    pipeline = pipeline_of(solution, len(positions), terms.schedule, terms.offload)
    stages = pipeline.stages or (StagePlan(0, len(costs.blocks)),)
    return replace(pipeline, stages=stages, seats=positions)
