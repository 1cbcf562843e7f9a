"""Pipelines whose positions are not alike: submeshes of several sizes, and groups of unlike nodes.

A pipeline may have one shape of submesh in each group of nodes, and two where there is one group. For each such set of
shapes, number of micro-batches, ZeRO stage, offload, schedule and price of memory, `search.inter_op` finds the cut into
stages and the submesh of every stage together. The decisions are made once, for the largest tensor-parallel degree in
the set: what is cut evenly in eight is in four, and on a submesh without an axis its decisions fall away. Problems are
solved in the order of a bound, until the next one is no better than the best pipeline known.

As in Alpa (Zheng et al., OSDI 2022, section 5.2) a submesh is part of one node, or some whole nodes, of one group.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.block_costs import BlockCost, StoredCost, chain, combined, exposed, homes_of, stored_costs
from autopar.costs.borders import border_bytes, hop_seconds, last_holders, second_copies, shared_parameters, tie_costs
from autopar.costs.memory_bound import least_seconds
from autopar.costs.price import Pricer, is_cpu
from autopar.costs.stage_costs import Copy, position_bytes, shared_costs, stage_cost
from autopar.mesh import Mesh
from autopar.placement import Stored
from autopar.plan import Pipeline, StagePlan
from autopar.planning.bases import PRICES, Activity, Bases, named_mesh
from autopar.planning.layouts import micro_batch_counts, offloads
from autopar.planning.pipelines import MAX_MEMORY_ROUNDS, SEARCHED_SCHEDULES
from autopar.planning.request import Request, divisors, pricer_for, usable_bytes
from autopar.planning.stage_points import HOLDING, modes_of, pipeline_of, point, stretch_of
from autopar.seats import Seat
from autopar.sharding.choices import Choices, on_axes
from autopar.sharding.strategies import Operator, scopes_of
from cost_models.machine import Cluster
from search.inter_op import NothingBelowCutoffError, solve_pipeline
from search.pipeline_problem import PipelineInfeasibleError, PipelineProblem, PipelineSolution, Submesh, Tied

FEW_DEVICES = 16
GAP = 0.03
"""Share of the step by which a better pipeline may be missed where there are more than FEW_DEVICES."""

MOST_SOLVED = 300
"""Problems, most promising first, of more than FEW_DEVICES that are solved once a pipeline is known."""

MANY_DEVICES = 8
"""In larger groups of several nodes a submesh has half a node at least."""

TYPICAL_ROWS = 2
"""Of one data-parallel rank, for which decisions are made."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is fixed before stages are cut. seats: the shapes that positions may have; price: of a byte, as in
    bases.py."""

    seats: tuple[Seat, ...]
    price: float
    num_micro_batches: int
    zero: int
    offload: str
    schedule: str

    @property
    def tp(self) -> int:
        """The largest tensor-parallel degree, for which decisions are made."""
        return max(seat.mesh.size("tp") for seat in self.seats)


@dataclass(frozen=True, slots=True)
class FoundUnequal:
    """A solved problem. objective: seconds by the closed form. choices: on `axes`. pipeline: with its seats."""

    objective: float
    terms: Terms
    choices: Choices
    axes: tuple[str, ...]
    pipeline: Pipeline


@dataclass
class UnequalSearch:
    """All that the problems of one request share."""

    request: Request
    _activity: dict[tuple[int, Mesh, int, int, float], Activity] = field(default_factory=dict)
    _stored: dict[tuple[Seat, int, float, int, str, bool, bool], dict[str, StoredCost]] = field(default_factory=dict)
    _borders: dict[tuple[int, Mesh, int, int, float], tuple[float, ...]] = field(default_factory=dict)
    _totals: dict[tuple[Seat, int, float, int, int, str], list[tuple[float, float, float]]] = field(
        default_factory=dict
    )
    _bases: dict[int, Bases] = field(default_factory=dict)
    smallest_excess: float = math.inf
    """Bytes per rank that the pipeline nearest to fitting lacks, where none fits."""

    def __post_init__(self) -> None:
        self.graph = self.request.trace(self.request.global_batch_size)
        self.blocks = chain(self.graph)
        self.counts = Counter(self.blocks)
        self.homes, self.scopes = homes_of(self.graph), scopes_of(self.graph)
        self.shared = shared_parameters(self.graph)
        self.groups = self.request.whole.groups
        self.is_on_cpu = is_cpu(self.groups[0])

    def run(self, cutoff: float = math.inf) -> FoundUnequal | None:
        """The best pipeline that takes less than `cutoff` seconds; on many devices the best to GAP, or that of the
        MOST_SOLVED most promising problems."""
        is_large = self.request.whole.num_devices > FEW_DEVICES
        share, most = (1.0 - GAP, MOST_SOLVED) if is_large else (1.0, math.inf)
        num_solved = 0
        numbers = itertools.count()
        queue = [(self._outline_bound(outline), next(numbers), outline, True) for outline in self._outlines()]
        heapq.heapify(queue)
        best, found, too_large = cutoff, None, list[Terms]()
        while queue and queue[0][0] < best * share:
            _, _, terms, is_outline = heapq.heappop(queue)
            if is_outline:
                for each in self._variants(terms):
                    heapq.heappush(queue, (self.bound(each), next(numbers), each, False))
                continue
            bound = self.bound(terms, self.least_recompute(terms))
            if bound >= best * share:
                too_large += [terms] if bound == math.inf else []
                continue
            num_solved += 1
            if found is not None and num_solved > most:
                break
            try:
                solved = self.solve(terms, best * share)
            except NothingBelowCutoffError:
                continue
            except PipelineInfeasibleError as error:
                self.smallest_excess = min(self.smallest_excess, error.smallest_excess)
                continue
            best, found = solved.objective, solved
        if found is None and cutoff == math.inf:
            self._measure_excess(too_large)
        return found

    def _measure_excess(self, too_large: list[Terms]) -> None:
        """What those that fit in no way lack at least."""
        for terms in too_large:
            try:
                self.solve(terms)
            except PipelineInfeasibleError as error:
                self.smallest_excess = min(self.smallest_excess, error.smallest_excess)

    def asked(self, request: Request) -> UnequalSearch:
        """A search for other constraints or another batch, with the same decisions and prices."""
        shared = self._activity, self._stored, self._borders
        return UnequalSearch(request, *shared, _bases=self._bases)

    def priced_for(self, request: Request) -> UnequalSearch:
        """A search with the same decisions on other devices or links."""
        return UnequalSearch(request, _bases={n: b.priced_for(request.of_group(n)) for n, b in self._bases.items()})

    # --- what is tried ------------------------------------------------------------------------------------------------

    def terms(self) -> Iterator[Terms]:
        """All of them that agree with the constraints."""
        for outline in self._outlines():
            yield from self._variants(outline)

    def _outlines(self) -> Iterator[Terms]:
        """Without what bears on parameters only."""
        limits, rows = self.request.constraints, self.request.global_batch_size
        for count in micro_batch_counts(rows, limits.micro_batches):
            for seats in self.shapes(rows // count):
                prices = self._prices(max(seat.mesh.size("tp") for seat in seats), rows // count)
                for schedule, price in itertools.product(self._schedules(count), prices):
                    yield Terms(seats, price, count, 0, "", schedule)

    def _variants(self, outline: Terms) -> Iterator[Terms]:
        """Every ZeRO stage and offload of an outline."""
        stages: tuple[int, ...] = (0, 2, 3) if outline.num_micro_batches == 1 else (0, 1, 2, 3)
        if all(seat.mesh.num_data_ranks == 1 for seat in outline.seats):
            stages = (0,)
        elif self.request.constraints.zero is not None:
            stages = (self.request.constraints.zero,)
        for zero in stages:
            for offload in offloads(self.request, zero):
                yield replace(outline, zero=zero, offload=offload)

    def shapes(self, rows: int) -> Iterator[tuple[Seat, ...]]:
        """Sets of shapes for micro-batches of `rows` rows: one of every group, or two of the only one."""
        legal = [list(self._seats(number, rows)) for number in range(len(self.groups))]
        sets = itertools.product(*legal) if len(legal) > 1 else itertools.combinations(legal[0], 2)
        for seats in sets:
            degrees, data = [s.mesh.size("tp") for s in seats], [s.mesh.num_data_ranks for s in seats]
            tp = max(degrees)
            has_room = self._has_data(tp, rows) or max(data) == 1
            is_cut = all(tp % degree == 0 for degree in degrees) and rows % math.lcm(*data) == 0
            if is_cut and has_room and self._numbers(seats) and self._choices(tp, PRICES[0], rows) is not None:
                yield seats

    def _numbers(self, seats: tuple[Seat, ...]) -> set[int]:
        """Of positions of these shapes, each at least once, that take all devices."""
        found = {0}
        for number, group in enumerate(self.groups):
            first, *others = [seat.mesh.num_ranks for seat in seats if seat.group == number]
            counts = range(1, group.num_devices // first + 1)
            rests = {n: group.num_devices - n * first for n in counts}
            if others:
                own = {n + rest // others[0] for n, rest in rests.items() if rest and rest % others[0] == 0}
            else:
                own = {n for n, rest in rests.items() if not rest}
            found = {a + b for a in found for b in own}
        pinned = self.request.constraints.degrees.get("pp")
        return {n for n in found if n <= len(self.blocks) and pinned in (None, n)}

    def _schedules(self, count: int) -> tuple[str, ...]:
        pinned = self.request.constraints.schedule
        if pinned is not None:
            return (pinned,) if pinned in HOLDING else ()
        return SEARCHED_SCHEDULES if count > 1 else ("1f1b",)

    def _seats(self, number: int, rows: int) -> Iterator[Seat]:
        """Submeshes of a group that divide its devices and a micro-batch."""
        group, degrees = self.groups[number], self.request.constraints.degrees
        for size in submesh_sizes(group):
            for tp in divisors(size):
                data = size // tp
                pinned = degrees.get("tp", tp) == tp and degrees.get("dp", data) == data
                if pinned and rows % data == 0 and tp <= group.devices_per_node:
                    yield Seat(named_mesh(data, tp), number)

    def _has_data(self, tp: int, rows: int) -> bool:
        """Whether decisions are made with a data axis. rows: of a micro-batch; one row is not shared."""
        return rows > 1 and 2 * tp <= self._main(tp).num_devices

    def _rows(self, terms: Terms) -> int:
        """Of a micro-batch."""
        return self.request.global_batch_size // terms.num_micro_batches

    def _main(self, tp: int) -> Cluster:
        """The group that decisions are made for: with room for two data-parallel ranks if there is one, and of these
        the one with the highest rate of all devices together."""
        fits = [g for g in self.groups if tp <= g.num_devices]
        has_room = [g for g in fits if 2 * tp <= g.num_devices] or fits
        return max(has_room, key=lambda g: g.num_devices * max(g.device.peak_flops_per_second.values()))

    # --- decisions and costs ------------------------------------------------------------------------------------------

    def _choices(self, tp: int, price: float, rows: int) -> Choices | None:
        number = self.groups.index(self._main(tp))
        if number not in self._bases:
            self._bases[number] = Bases(self.request.of_group(number), TYPICAL_ROWS)
        return self._bases[number].choices(tp, self._has_data(tp, rows), min(rows, TYPICAL_ROWS), price)

    def _prices(self, tp: int, rows: int) -> list[float]:
        """Those that make a difference to the decisions."""
        found: list[float] = []
        for price in PRICES:
            if all(self._choices(tp, price, rows) != self._choices(tp, other, rows) for other in found):
                found.append(price)
        return found

    def _axes(self, tp: int, rows: int) -> tuple[str, ...]:
        """Of the decisions."""
        return named_mesh(2 if self._has_data(tp, rows) else 1, tp).axes

    def _activity_of(self, seat: Seat, terms: Terms) -> Activity:
        """What one rank of a seat does: that depends on its rows, not on how many such ranks there are."""
        rows = self._rows(terms) // seat.mesh.num_data_ranks
        costed = named_mesh(min(seat.mesh.num_data_ranks, 2), seat.mesh.size("tp"))
        key = (seat.group, costed, rows, terms.tp, terms.price)
        if key not in self._activity:
            choices = self._choices(terms.tp, terms.price, self._rows(terms))
            assert choices is not None
            whole = rows * costed.num_data_ranks
            graph = self.request.trace.estimate(whole)
            own = on_axes(choices, self._axes(terms.tp, self._rows(terms)), costed.axes)
            self._activity[key] = Activity(graph, self._operators(whole), self._pricer(Seat(costed, seat.group)), own)
        return self._activity[key]

    def _operators(self, rows: int) -> Mapping[tuple[str, str], Operator]:
        return next(iter(self._bases.values())).operators(rows)

    def _pricer(self, seat: Seat, count: int = 1, offload: str = "") -> Pricer:
        return pricer_for(self.request.of_group(seat.group), seat.mesh, count, offload)

    def parameters(self, seat: Seat, terms: Terms) -> Mapping[tuple[str, str], Stored]:
        """As they are stored on a seat."""
        choices = self._choices(terms.tp, terms.price, self._rows(terms))
        assert choices is not None
        whole = with_zero(choices, self._axes(terms.tp, self._rows(terms)), terms.zero)
        return on_axes(whole, self._axes(terms.tp, self._rows(terms)), seat.mesh.axes).parameters

    def _stored_of(self, seat: Seat, terms: Terms) -> dict[str, StoredCost]:
        several = terms.num_micro_batches > 1
        key = (seat, terms.tp, terms.price, terms.zero, terms.offload, several, self._rows(terms) == 1)
        if key not in self._stored:
            pricer = self._pricer(seat, terms.num_micro_batches, terms.offload)
            parameters = self.parameters(seat, terms)
            self._stored[key] = stored_costs(self.graph, pricer, parameters, self.homes, self.scopes)
        return self._stored[key]

    def costs(self, seat: Seat, terms: Terms) -> dict[str, BlockCost]:
        """Every block on a seat."""
        return combined(self._activity_of(seat, terms).costs, self._stored_of(seat, terms))

    def borders(self, seat: Seat, terms: Terms) -> tuple[float, ...]:
        """Bytes per micro-batch and rank of a seat at every border."""
        activity = self._activity_of(seat, terms)
        rows = self._rows(terms) // seat.mesh.num_data_ranks
        key = (seat.group, activity.pricer.mesh, rows, terms.tp, terms.price)
        if key not in self._borders:
            self._borders[key] = border_bytes(activity.graph, activity.pricer.mesh, activity.choices)
        return self._borders[key]

    # --- solving ------------------------------------------------------------------------------------------------------

    def bound(self, terms: Terms, recompute_seconds: float = 0.0) -> float:
        """Seconds that no pipeline can undercut: every block on the seat that is best for it, memory free.

        recompute_seconds: of all layers per micro-batch, that any plan has.
        """
        return self._bound(terms, [self._seconds(seat, terms) for seat in terms.seats], recompute_seconds)

    def _outline_bound(self, outline: Terms) -> float:
        """The same whatever becomes of the parameters."""
        seconds = [self._activity_of(seat, outline).seconds for seat in outline.seats]
        return self._bound(outline, [[(*own[name], 0.0) for name in self.counts] for own in seconds], 0.0)

    def _bound(self, terms: Terms, totals: list[list[tuple[float, float, float]]], recompute_seconds: float) -> float:
        """totals: as `_seconds` of every seat."""
        is_split, least, drained = terms.schedule == "zero-bubble", recompute_seconds, recompute_seconds
        for index, count in enumerate(self.counts.values()):
            least += count * min(own[index][0] for own in totals)
            drained += count * min(own[index][0] - 2 * own[index][1] for own in totals)
        busy = self._bottleneck(terms.seats, [[micro for micro, _, _ in own] for own in totals])
        step = self._bottleneck(terms.seats, [[once for _, _, once in own] for own in totals])
        busy = max(busy, least / max(self._numbers(terms.seats)))
        return (drained if is_split else least) + (terms.num_micro_batches - 1) * busy + step

    def least_recompute(self, terms: Terms) -> float:
        """Seconds per micro-batch that recomputation takes at least, if the memory of all positions were one and every
        block kept what it keeps on the seat and the position where that is least; inf where even so nothing fits."""
        costs, numbers = [self.costs(seat, terms) for seat in terms.seats], self._numbers(terms.seats)
        usable = [usable_bytes(self.request.of_group(group)) for group in range(len(self.groups))]
        if len(self.groups) == 1:
            room = usable[0] * max(numbers)
        else:
            ranks = {seat.group: seat.mesh.num_ranks for seat in terms.seats}
            room = sum(usable[g] * (self.groups[g].num_devices // n) for g, n in ranks.items())
        classes, holding = [], HOLDING[terms.schedule](terms.num_micro_batches)
        positions = [(p, i) for p in numbers for i in range(p)]
        for name, count in self.counts.items():
            room -= count * min(own[name].fixed_bytes for own in costs)
            modes = [modes_of(own[name], self.request.constraints.recompute, not self.is_on_cpu) for own in costs]
            kept = {k: min(holding.least(positions, own[k]) for own in modes) for k in modes[0]}
            classes.append((count, [(min(own[k].seconds for own in modes), kept[k]) for k in modes[0]]))
        return least_seconds(classes, room * (1 + 1e-6)) if room > 0 else math.inf

    def _bottleneck(self, seats: tuple[Seat, ...], seconds: list[list[float]]) -> float:
        """What the busiest stage takes at least. seconds: of every class of blocks on every seat.

        A stage of n ranks that is busy for t has n t rank-seconds, and all stages together have as many ranks as there
        are. So the busiest takes at least the least rank-seconds of all blocks over the ranks. Where every group has
        one shape, the number of its stages is known, and more can be said: if any block takes at least rho_s times as
        long on shape s as on the first, in T seconds N_s stages do at most what takes N_s T / rho_s on the first.
        """
        counts = list(self.counts.values())
        areas = [[seat.mesh.num_ranks * each for each in own] for seat, own in zip(seats, seconds, strict=True)]
        least = sum(n * min(area[i] for area in areas) for i, n in enumerate(counts)) / self.request.whole.num_devices
        work = sum(n * each for n, each in zip(counts, seconds[0], strict=True))
        if len(self.groups) == 1 or not work:
            return least
        rate = 0.0
        for seat, own in zip(seats, seconds, strict=True):
            slower = min(a / b for a, b in zip(own, seconds[0], strict=True) if b)
            if not slower:
                return least
            rate += self.groups[seat.group].num_devices / seat.mesh.num_ranks / slower
        return max(least, work / rate)

    def _seconds(self, seat: Seat, terms: Terms) -> list[tuple[float, float, float]]:
        """Of every class of blocks on a seat: busy per micro-batch, of this weight gradients, and once per step."""
        key = (seat, terms.tp, terms.price, terms.num_micro_batches, terms.zero, terms.offload)
        if key not in self._totals:
            activity, stored = self._activity_of(seat, terms).seconds, self._stored_of(seat, terms)
            found = []
            for name in self.counts:
                (micro, weight), own = activity[name], stored.get(name, StoredCost())
                found.append((micro + exposed(own.per_micro), weight, exposed(own.per_step)))
            self._totals[key] = found
        return self._totals[key]

    def solve(self, terms: Terms, cutoff: float = math.inf) -> FoundUnequal:
        """The best pipeline. Raises PipelineInfeasibleError; with a cutoff NothingBelowCutoffError where none is
        faster."""
        seats = {str(seat): seat for seat in terms.seats}
        costs = {name: self.costs(seat, terms) for name, seat in seats.items()}
        usable = {name: usable_bytes(self.request.of_group(seat.group)) for name, seat in seats.items()}
        limits = dict(usable)
        for _ in range(MAX_MEMORY_ROUNDS):
            solution = solve_pipeline(self._problem(terms, seats, costs, limits), cutoff=cutoff, diagnose=False)
            pipeline = self._pipeline(solution, terms, seats)
            excess: dict[str, float] = {}
            for seat, held in zip(pipeline.seats, self._held(pipeline, terms, costs), strict=True):
                excess[str(seat)] = max(excess.get(str(seat), 0.0), held - usable[str(seat)])
            if max(excess.values()) <= 0:
                break
            limits |= {name: limits[name] - max(lacking, 0.0) for name, lacking in excess.items()}
        else:
            raise PipelineInfeasibleError(())
        choices = self._choices(terms.tp, terms.price, self._rows(terms))
        assert choices is not None
        axes = self._axes(terms.tp, self._rows(terms))
        return FoundUnequal(solution.objective, terms, with_zero(choices, axes, terms.zero), axes, pipeline)

    def _pipeline(self, solution: PipelineSolution, terms: Terms, seats: Mapping[str, Seat]) -> Pipeline:
        positions = tuple(seats[stage.submesh] for stage in solution.stages)
        pipeline = pipeline_of(solution, len(positions), terms.schedule, terms.offload)
        stages = pipeline.stages or (StagePlan(0, len(self.blocks)),)
        return replace(pipeline, stages=stages, seats=positions)

    def _held(self, pipeline: Pipeline, terms: Terms, costs: Mapping[str, Mapping[str, BlockCost]]) -> Iterator[float]:
        """Bytes of a rank of every position, as the prediction will count them."""
        borders = [(*self.borders(seat, terms), 0.0) for seat in pipeline.seats]
        staged = [
            stage_cost(costs[str(seat)], self.blocks, stage, border[stage.last], self._copies(seat, terms))
            for seat, stage, border in zip(pipeline.seats, pipeline.stages, borders, strict=True)
        ]
        ties = last_holders(self.shared, pipeline.stages, [self._ties(seat, terms) for seat in pipeline.seats])
        shared = shared_costs(pipeline.stages, self.shared, ties)
        for kinds in position_bytes(staged, pipeline, terms.num_micro_batches, shared):
            yield sum(kinds.values())

    def _copies(self, seat: Seat, terms: Terms) -> tuple[Copy, ...]:
        pricer = self._pricer(seat, terms.num_micro_batches, terms.offload)
        return second_copies(self.graph, pricer, self.parameters(seat, terms))

    def _ties(self, seat: Seat, terms: Terms) -> Mapping[str, tuple[tuple[float, float, float], float]]:
        pricer = self._pricer(seat, terms.num_micro_batches, terms.offload)
        return tie_costs(self.graph, pricer, self.parameters(seat, terms), num_positions=2)

    def _problem(
        self,
        terms: Terms,
        seats: Mapping[str, Seat],
        costs: Mapping[str, Mapping[str, BlockCost]],
        memory_bytes: Mapping[str, float],
    ) -> PipelineProblem:
        count, pinned = terms.num_micro_batches, self.request.constraints.recompute
        points, holding = {}, HOLDING[terms.schedule](count)
        for name, own in costs.items():
            stretch = stretch_of(own, self.counts, terms.schedule, count)
            for block, cost in own.items():
                modes = modes_of(cost, pinned, has_host=not self.is_on_cpu)
                points[block, name] = tuple(point(cost, k, mode, terms.schedule, stretch) for k, mode in modes.items())
        sizes = {name: self.borders(seat, terms) for name, seat in seats.items()}
        largest = tuple(max(border) for border in zip(*sizes.values(), strict=True))
        at = max(range(len(largest)), key=lambda i: largest[i])
        hops = {
            (a, b): hop_seconds(self.request.whole, seats[a], seats[b], max(sizes[a][at], sizes[b][at]))
            / max(largest[at], 1.0)
            for a in seats
            for b in seats
        }
        return PipelineProblem(
            self.blocks,
            tuple(Submesh(n, str(s.group), s.mesh.num_ranks, memory_bytes[n]) for n, s in seats.items()),
            {str(number): group.num_devices for number, group in enumerate(self.groups)},
            points,
            holding.in_flight,
            count,
            largest,
            hops,
            self.is_on_cpu,
            tuple(self._tied(seats, terms)),
            num_stages=self._numbers(terms.seats),
            put_off=holding.put_off,
        )

    def _tied(self, seats: Mapping[str, Seat], terms: Terms) -> Iterator[Tied]:
        """Parameters that two blocks read, by the seat on which a second copy costs most."""
        ties = [self._ties(seat, terms) for seat in seats.values()] if self.shared else []
        for name, (first, last) in self.shared.items():
            known = [each[name] for each in ties if name in each]
            if known:
                size, seconds = max(sum(sizes) for sizes, _ in known), max(seconds for _, seconds in known)
                yield Tied(first, last, size, seconds, alike=False)


def submesh_sizes(cluster: Cluster) -> list[int]:
    """Numbers of devices of a submesh, such that submeshes laid out largest first never lie across two nodes in part:
    any on one node; else halves of a node (of many devices, no less than half a node), and whole nodes, doubled as long
    as they fit."""
    per_node, nodes = cluster.devices_per_node, cluster.num_nodes
    if nodes == 1:
        return list(range(1, per_node + 1))
    smallest = per_node // 2 if cluster.num_devices > MANY_DEVICES else 1
    parts = [n for k in range(per_node.bit_length()) if per_node % 2**k == 0 and (n := per_node // 2**k) >= smallest]
    wholes = {per_node * 2**k for k in range(nodes.bit_length()) if 2**k <= nodes} | {per_node * nodes}
    return sorted({*parts, *wholes})


def with_zero(choices: Choices, axes: tuple[str, ...], zero: int) -> Choices:
    """The decisions with a ZeRO stage wherever one is possible."""
    if "dp" not in axes:
        return choices
    at = axes.index("dp")
    parameters = {
        key: Stored(stored.placements, zero if stored.placements[at].kind == "Rp" else 0)
        for key, stored in choices.parameters.items()
    }
    return replace(choices, parameters=parameters)
