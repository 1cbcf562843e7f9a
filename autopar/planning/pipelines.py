"""The search over pipelines: layouts, best bound first, each cut into stages to optimality by `search.inter_op`.

A layout's bound is what its blocks take with memory to spare and evenly cut; layouts are solved in the order of their
bounds until the next bound is no better than the best solution. The objective is the closed form of `search.inter_op`;
the plan that wins is then simulated event by event, which is what its prediction says.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.chain import chain, homes_of
from autopar.costs.block_costs import BlockCost, BusySeconds, Mode, exposed
from autopar.costs.borders import border_bytes, second_copies, shared_parameters, tie_costs, transfer_seconds
from autopar.costs.cost_table import combined
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import position_bytes as bytes_of_positions
from autopar.costs.stage_costs import shared_costs, stage_costs
from autopar.costs.stored_costs import StoredCost, stored_costs
from autopar.mesh import Mesh
from autopar.placement import Stored
from autopar.plan import StagePlan
from autopar.planning.bases import Base, Bases
from autopar.planning.layouts import Layout, layouts
from autopar.planning.memory_fit import Fitting, least_kept, least_recompute, solve_in_rounds
from autopar.planning.one_stage import Failure
from autopar.planning.request import Request, pricer_for, usable_bytes
from autopar.planning.stage_points import HOLDING, modes_of, pipeline_of, point, stretch_of, stretched
from autopar.sharding.strategies import scopes_of
from search.inter_op import NothingBelowCutoffError
from search.pipeline_problem import (
    PipelineInfeasibleError,
    PipelineProblem,
    PipelineSolution,
    Submesh,
    Tied,
)

SEARCHED_SCHEDULES = ("1f1b", "zero-bubble")
"""Of these the closed form is minimised; schedules with several stages per position refine the best (chunked.py)."""

EXACT_BASES = 16
"""Up to this many (tp, rows) every base is solved for its own rows; beyond, for TYPICAL_ROWS and reused."""

TYPICAL_ROWS = 2
GROUP = "devices"


Bounded = tuple[float, int, Layout, str, bool]
"""(lower bound in seconds, number of the layout, layout, schedule, whether the bound is tightened)"""


@dataclass(frozen=True, slots=True)
class Found:
    """A solved layout. objective: seconds by the closed form. costs: of every block with its parameters."""

    objective: float
    layout: Layout
    schedule: str
    solution: PipelineSolution
    base: Base
    costs: Mapping[str, BlockCost]


@dataclass(frozen=True)
class Pipelines:
    """What a search found: the best of each (positions, mesh) that was solved, fastest first.

    skipped: (lower bound in seconds, positions, mesh) of the others.
    """

    found: tuple[Found, ...]
    skipped: tuple[tuple[float, int, Mesh], ...]
    search: PipelineSearch

    @cached_property
    def smallest(self) -> Failure | None:
        """The pipeline that needs the least memory, where nothing fits."""
        from autopar.planning.smallest import smallest_pipeline

        return None if self.found else smallest_pipeline(self.search)


@dataclass
class PipelineSearch:
    """All that layouts of one request share: bases, blocks, prices of parameters.

    shared_bases: of another request that differs only in what bases do not depend on (see bases.py).
    """

    request: Request
    shared_bases: Bases | None = None
    _stored: dict[tuple[Mesh, int, int, str, bool], dict[str, StoredCost]] = field(default_factory=dict)
    _borders: dict[tuple[Mesh, int, float], tuple[float, ...]] = field(default_factory=dict)
    _synchronised: dict[tuple[Mesh, int, int, str], dict[str, tuple[float, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph = self.request.trace(self.request.global_batch_size)
        self.blocks = chain(self.graph)
        self.counts = Counter(self.blocks)
        self.homes = homes_of(self.graph)
        self.scopes = scopes_of(self.graph)
        self.shared = shared_parameters(self.graph)
        self.layouts = tuple(layouts(self.request, len(self.blocks)))
        kinds = {(each.mesh.size("tp"), each.rows) for each in self.layouts}
        self.bases = self.shared_bases or Bases(self.request, None if len(kinds) <= EXACT_BASES else TYPICAL_ROWS)

    @cached_property
    def schedules(self) -> tuple[str, ...]:
        """Those whose closed form is minimised, by the constraints."""
        pinned = self.request.constraints.schedule
        if pinned is None:
            return SEARCHED_SCHEDULES
        return (pinned,) if pinned in HOLDING else ()

    def run(self) -> Pipelines:
        """Layouts by their bounds, until none can be better than the best.

        A bound is tightened before its layout is solved, and the layout put back where another then comes first. Until
        one fits, the schedules take turns: where memory is scarce, those with the least bounds may all not fit.
        """
        queues: dict[str, list[Bounded]] = {}
        for each in self._bounded():
            queues.setdefault(each[3], []).append(each)
        for queue in queues.values():
            heapq.heapify(queue)
        found: dict[tuple[int, str], Found] = {}
        best = math.inf
        turn = 0
        while heads := [queue for queue in queues.values() if queue and queue[0][0] < best]:
            queue = heads[turn % len(heads)] if best == math.inf else min(heads, key=lambda head: head[0][:2])
            _, number, layout, schedule, is_tight = heapq.heappop(queue)
            if not is_tight:
                bound = self.tightened(layout, schedule)
                if bound < best:
                    heapq.heappush(queue, (bound, number, layout, schedule, True))
                continue
            turn += 1
            try:
                solved = self.solve(layout, schedule, usable_bytes(self.request), best)
            except (PipelineInfeasibleError, NothingBelowCutoffError):
                continue
            best = min(best, solved.objective)
            key = (layout.num_positions, str(layout.mesh))
            if key not in found or solved.objective < found[key].objective:
                found[key] = solved
        left: dict[tuple[int, str], tuple[float, int, Mesh]] = {}
        for bound, _, layout, _, _ in sorted(itertools.chain(*queues.values()), key=lambda each: each[:2]):
            left.setdefault((layout.num_positions, str(layout.mesh)), (bound, layout.num_positions, layout.mesh))
        return Pipelines(
            tuple(sorted(found.values(), key=lambda f: (f.objective, f.layout.key, f.schedule))),
            tuple(skipped for key, skipped in left.items() if key not in found),
            self,
        )

    def _bounded(self) -> Iterator[Bounded]:
        for number, layout in enumerate(self.layouts):
            base = self.base(layout)
            if base is None or self.bases.repeats(layout.mesh, layout.rows, layout.price):
                continue
            for schedule in self.schedules_of(layout):
                yield self.bound(layout, schedule), number, layout, schedule, False

    def schedules_of(self, layout: Layout) -> tuple[str, ...]:
        """Zero bubble needs a second micro-batch to fill the bubble with."""
        if layout.num_positions == 1:
            return () if self.request.constraints.schedule else ("1f1b",)
        if self.request.constraints.schedule is None and layout.num_micro_batches == 1:
            return ("1f1b",)
        return self.schedules

    def tightened(self, layout: Layout, schedule: str) -> float:
        """`bound` with the recomputation and the transfers that any cut has; inf where the memory is too small."""
        recompute_seconds = self.least_recompute(layout, schedule)
        if recompute_seconds == math.inf or layout.num_positions == 1:
            return self.bound(layout, schedule, recompute_seconds)
        borders, crossed = self.borders(layout), layout.num_positions - 1
        seconds = 2 * crossed * self._byte_seconds(layout) * min(borders[1:])
        return self.bound(layout, schedule, recompute_seconds) + seconds

    def bound(self, layout: Layout, schedule: str, recompute_seconds: float = 0.0) -> float:
        """Seconds that no cut of this layout can undercut: free memory, no transfers, stages as equal as whole blocks
        allow.

        recompute_seconds: of all layers per micro-batch, that any plan has.
        """
        positions, repeats = layout.num_positions, layout.num_micro_batches - 1
        activity, stored = self._totals(layout)
        busy, weight, step, longest = 0.0, 0.0, 0.0, 0.0
        for name, count in self.counts.items():
            own, (per_micro, per_step) = activity[name], stored.get(name, (0.0, 0.0))
            micro = own.under(schedule)
            busy += (micro + per_micro) * count
            weight += own.weight * count
            step += per_step * count
            longest = max(longest, (micro + per_micro) * math.ceil(count / positions))
        stretch = 1.0
        if schedule == "zero-bubble":
            stretch = stretched(weight, busy, layout.num_micro_batches)
        busy += recompute_seconds
        fill = busy - 2 * weight if schedule == "zero-bubble" else busy
        return fill + repeats * stretch * max(busy / positions, longest) + step / positions

    def least_recompute(self, layout: Layout, schedule: str) -> float:
        """Seconds per micro-batch that recomputation takes at least; inf where the layout does not fit."""
        p = layout.num_positions
        blocks, fixed = self._kept_of_blocks(layout)
        holding = HOLDING[schedule](layout.num_micro_batches)
        return least_recompute(blocks, holding, [(p, i) for i in range(p)], p * usable_bytes(self.request), fixed)

    def least_bytes(self, layout: Layout, schedule: str) -> float:
        """Of the fullest rank: no cut of this layout needs less."""
        p = layout.num_positions
        blocks, fixed = self._kept_of_blocks(layout)
        holding = HOLDING[schedule](layout.num_micro_batches)
        return (fixed + least_kept(blocks, holding, [(p, i) for i in range(p)])) / p

    def stored_bytes(self, layout: Layout) -> float:
        """Of one rank of every position together: all that stays from step to step."""
        stored = self.stored(layout)
        return sum(sum(stored[n].fixed.values()) * count for n, count in self.counts.items() if n in stored)

    def _kept_of_blocks(self, layout: Layout) -> tuple[list[tuple[int, Iterable[Mode]]], float]:
        """How often each block stands in the model with the modes it may run in, and `stored_bytes`."""
        base = self.base(layout)
        assert base is not None
        modes: list[tuple[int, Iterable[Mode]]] = []
        modes += ((count, self.modes(base.costs[name]).values()) for name, count in self.counts.items())
        return modes, self.stored_bytes(layout)

    def modes(self, cost: BlockCost) -> Mapping[str, Mode]:
        """The modes of a block that the constraints and the device leave."""
        return modes_of(cost, self.request.constraints.recompute, has_host=not is_cpu(self.request.cluster))

    def _totals(self, layout: Layout) -> tuple[Mapping[str, BusySeconds], dict[str, tuple[float, float]]]:
        """By block: seconds per micro-batch without parameters; (seconds per micro-batch, seconds per step) of
        parameters."""
        base = self.base(layout)
        assert base is not None
        own = (layout.mesh, base.storage, layout.zero, layout.offload)
        if own not in self._synchronised:
            stored = self.stored(layout)
            self._synchronised[own] = {n: (exposed(s.per_micro), exposed(s.per_step)) for n, s in stored.items()}
        return base.activity.seconds, self._synchronised[own]

    def base(self, layout: Layout) -> Base | None:
        """The decisions that a layout's mesh shares with all meshes of its tensor-parallel degree."""
        return self.bases.base(layout.mesh, layout.rows, layout.price)

    def costs(self, layout: Layout) -> dict[str, BlockCost]:
        """Every block with its parameters on this layout."""
        base = self.base(layout)
        assert base is not None
        return combined(base.costs, self.stored(layout))

    def stored(self, layout: Layout) -> dict[str, StoredCost]:
        """The parameters of every block on this layout."""
        base = self.base(layout)
        assert base is not None
        # Gradients that are summed over micro-batches take room of their own, however many there are.
        key = (layout.mesh, base.storage, layout.zero, layout.offload, layout.num_micro_batches > 1)
        if key not in self._stored:
            pricer = self.pricer(layout)
            parameters = base.parameters(layout.zero)
            self._stored[key] = stored_costs(self.graph, pricer, parameters, self.homes, self.scopes)
        return self._stored[key]

    def _parameters(self, layout: Layout) -> Mapping[tuple[str, str], Stored]:
        base = self.base(layout)
        assert base is not None
        return base.parameters(layout.zero)

    def pricer(self, layout: Layout) -> Pricer:
        """Prices on the layout's mesh, whose state may live in host memory."""
        return pricer_for(self.request, layout.mesh, layout.num_micro_batches, layout.offload)

    def solve(self, layout: Layout, schedule: str, memory_bytes: float, cutoff: float = math.inf) -> Found:
        """The best stages of a layout in `memory_bytes` per rank. Raises PipelineInfeasibleError; with a cutoff
        NothingBelowCutoffError where none is faster."""
        return self.found(layout, schedule, solve_in_rounds(self.fitting(layout, schedule, memory_bytes), cutoff))

    def found(self, layout: Layout, schedule: str, solution: PipelineSolution) -> Found:
        """A layout with its solution."""
        base = self.base(layout)
        assert base is not None
        return Found(solution.objective, layout, schedule, solution, base, self.costs(layout))

    def fitting(self, layout: Layout, schedule: str, memory_bytes: float) -> Fitting:
        """A layout to be cut in `memory_bytes` per rank."""
        costs, name = self.costs(layout), str(layout.mesh)
        return Fitting(
            lambda limits: self.problem(layout, schedule, costs, limits[name]),
            lambda solution: {name: self.peak_bytes(layout, schedule, costs, solution)},
            {name: memory_bytes},
        )

    def peak_bytes(
        self, layout: Layout, schedule: str, costs: Mapping[str, BlockCost], solution: PipelineSolution
    ) -> float:
        """Of the fullest position, as the prediction will count it."""
        return max(sum(kinds.values()) for kinds in self.position_bytes(layout, schedule, costs, solution))

    def position_bytes(
        self, layout: Layout, schedule: str, costs: Mapping[str, BlockCost], solution: PipelineSolution
    ) -> list[dict[str, float]]:
        """Bytes by kind of every position, as the prediction will count them."""
        pipeline = pipeline_of(solution, layout.num_positions, schedule, layout.offload)
        borders = (*self.borders(layout), 0.0)
        stages = pipeline.stages or (StagePlan(0, len(self.blocks)),)
        pricer, parameters = self.pricer(layout), self._parameters(layout)
        copies = second_copies(self.graph, pricer, parameters)
        staged = stage_costs(costs, self.blocks, stages, borders, copies)
        ties = tie_costs(self.graph, pricer, parameters, layout.num_positions)
        return bytes_of_positions(staged, pipeline, layout.num_micro_batches, shared_costs(stages, self.shared, ties))

    def problem(
        self, layout: Layout, schedule: str, costs: Mapping[str, BlockCost], memory_bytes: float
    ) -> PipelineProblem:
        """The stages of a layout as an inter-op problem with one kind of submesh."""
        mesh, count = layout.mesh, layout.num_micro_batches
        name = str(mesh)
        stretch, holding = stretch_of(costs, self.counts, schedule, count), HOLDING[schedule](count)
        points = {
            (block, name): tuple(
                point(cost, label, mode, schedule, stretch) for label, mode in self.modes(cost).items()
            )
            for block, cost in costs.items()
        }
        return PipelineProblem(
            self.blocks,
            (Submesh(name, GROUP, mesh.num_ranks, memory_bytes),),
            {GROUP: self.request.cluster.num_devices},
            points,
            holding.in_flight,
            count,
            self.borders(layout),
            {(name, name): self._byte_seconds(layout)},
            is_cpu(self.request.cluster),
            self.tied(layout),
            num_stages=(layout.num_positions,),
            put_off=holding.put_off,
        )

    def _byte_seconds(self, layout: Layout) -> float:
        """Of one byte of the largest message between neighbouring positions."""
        largest = max(self.borders(layout))
        return self.transfer_seconds(layout, largest) / max(largest, 1.0)

    def transfer_seconds(self, layout: Layout, num_bytes: float) -> float:
        """Of one message between neighbouring positions."""
        return transfer_seconds(self.pricer(layout), layout.num_positions, num_bytes)

    def promising(self) -> list[tuple[float, Layout]]:
        """Layouts of several positions by their bounds, whatever their schedule."""
        costed = (each for each in self.layouts if each.num_positions > 1 and self.base(each))
        return sorted(
            ((self.bound(layout, "1f1b"), layout) for layout in costed),
            key=lambda pair: (pair[0], pair[1].key),
        )

    def borders(self, layout: Layout) -> tuple[float, ...]:
        """Bytes per micro-batch and rank at every border."""
        base = self.base(layout)
        assert base is not None
        key = (base.costed, layout.rows, layout.price)
        if key not in self._borders:
            graph = self.request.trace.estimate(layout.rows * base.costed.num_data_ranks)
            self._borders[key] = border_bytes(graph, base.costed, base.costed_choices)
        return self._borders[key]

    def tied(self, layout: Layout) -> tuple[Tied, ...]:
        """Parameters that two blocks read: a second copy, and the sum of both gradients, where they are apart."""
        ties = tie_costs(self.graph, self.pricer(layout), self._parameters(layout), layout.num_positions)
        return tuple(Tied(*self.shared[name], sum(sizes), seconds) for name, (sizes, seconds) in ties.items())
