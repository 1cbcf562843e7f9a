"""What is fixed before the stages of a pipeline of unlike positions are cut, and all of it that is tried.

A pipeline may have one shape of submesh in each group of nodes, and two where there is one group; all positions
together take all devices. A group of n devices has n / a positions of its one shape of a ranks, or x positions of a
ranks and y of b ranks, x, y >= 1, with x a + y b = n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.planning.bases import PRICES, named_mesh
from autopar.planning.layouts import micro_batch_counts, offloads
from autopar.planning.pipelines import SEARCHED_SCHEDULES
from autopar.planning.request import Request, divisors
from autopar.planning.stage_points import HOLDING
from autopar.planning.unequal.decisions import Decisions
from autopar.seats import Seat
from cost_models.machine import Cluster

MANY_DEVICES = 8
"""In larger groups of several nodes a submesh has half a node at least."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What is fixed before stages are cut. seats: the shapes that positions may have; rows: of a micro-batch; price: of
    a byte, as in bases.py."""

    seats: tuple[Seat, ...]
    rows: int
    price: float
    num_micro_batches: int
    zero: int
    offload: str
    schedule: str

    @property
    def tp(self) -> int:
        """The largest tensor-parallel degree, for which decisions are made."""
        return max(seat.mesh.size("tp") for seat in self.seats)


def all_terms(decisions: Decisions, num_blocks: int) -> Iterator[Terms]:
    """Those that agree with the constraints."""
    for outline in outlines(decisions, num_blocks):
        yield from variants(decisions.request, outline)


def outlines(decisions: Decisions, num_blocks: int) -> Iterator[Terms]:
    """Without what bears on parameters only: ZeRO stage 0 and no offload stand for all."""
    request = decisions.request
    counts = micro_batch_counts(request.global_batch_size, request.constraints.micro_batches)
    for count in filter(request.splits, counts):
        rows = request.global_batch_size // count
        for seats in shapes(decisions, num_blocks, rows):
            prices = decisions.prices(max(seat.mesh.size("tp") for seat in seats), rows)
            for schedule, price in itertools.product(_schedules(request, count), prices):
                yield Terms(seats, rows, price, count, 0, "", schedule)


def variants(request: Request, outline: Terms) -> Iterator[Terms]:
    """Every ZeRO stage and offload of an outline."""
    stages: tuple[int, ...] = (0, 2, 3) if outline.num_micro_batches == 1 else (0, 1, 2, 3)
    if all(seat.mesh.num_data_ranks == 1 for seat in outline.seats):
        stages = (0,)
    elif request.constraints.zero is not None:
        stages = (request.constraints.zero,)
    for zero in stages:
        for offload in offloads(request, zero):
            yield replace(outline, zero=zero, offload=offload)


def shapes(decisions: Decisions, num_blocks: int, rows: int) -> Iterator[tuple[Seat, ...]]:
    """Sets of shapes for micro-batches of `rows` rows: one of every group, or two of the only one."""
    request = decisions.request
    legal = [list(_seats(request, number, rows)) for number in range(len(request.whole.groups))]
    sets = itertools.product(*legal) if len(legal) > 1 else itertools.combinations(legal[0], 2)
    for seats in sets:
        degrees, data = [s.mesh.size("tp") for s in seats], [s.mesh.num_data_ranks for s in seats]
        tp = max(degrees)
        has_room = decisions.has_data(tp, rows) or max(data) == 1
        is_cut = all(tp % degree == 0 for degree in degrees) and rows % math.lcm(*data) == 0
        is_legal = is_cut and has_room and position_counts(request, num_blocks, seats)
        if is_legal and decisions.choices(tp, rows, PRICES[0]) is not None:
            yield seats


def position_counts(request: Request, num_blocks: int, seats: tuple[Seat, ...]) -> set[int]:
    """How many positions of these shapes, each at least once, take all devices; no more than there are blocks."""
    found = {0}
    for number, group in enumerate(request.whole.groups):
        first, *others = [seat.mesh.num_ranks for seat in seats if seat.group == number]
        counts = range(1, group.num_devices // first + 1)
        rests = {n: group.num_devices - n * first for n in counts}
        if others:
            own = {n + rest // others[0] for n, rest in rests.items() if rest and rest % others[0] == 0}
        else:
            own = {n for n, rest in rests.items() if not rest}
        found = {a + b for a in found for b in own}
    pinned = request.constraints.degrees.get("pp")
    return {n for n in found if n <= num_blocks and pinned in (None, n)}


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


def _seats(request: Request, number: int, rows: int) -> Iterator[Seat]:
    """Submeshes of a group that divide its devices and a micro-batch."""
    group, degrees = request.whole.groups[number], request.constraints.degrees
    for size in submesh_sizes(group):
        for tp in divisors(size):
            data = size // tp
            pinned = degrees.get("tp", tp) == tp and degrees.get("dp", data) == data
            if pinned and rows % data == 0 and tp <= group.devices_per_node:
                yield Seat(named_mesh(data, tp), number)


def _schedules(request: Request, count: int) -> tuple[str, ...]:
    pinned = request.constraints.schedule
    if pinned is not None:
        return (pinned,) if pinned in HOLDING else ()
    return SEARCHED_SCHEDULES if count > 1 else ("1f1b",)
