"""Find the shortest sequence of one-axis steps from one tuple of placements to another.

Each step is one autograd function of the runtime, which also determines its backward (`METHODS` of
codegen/reshards.py).

If several axes shard one dim at the same level, the first axis is the outer one. An axis may join or leave such a dim
only while no inner axis shards it. So a sequence can have more steps than axes that change.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

from autopar.ir.placement import Placement, Placements, R
from codegen.reshards import METHODS, Collective

_STEP_PENALTY = 1e-3
_WEIGHT: dict[Collective | None, float] = {
    None: 0.0,
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
    "all_to_all": 1.0,
}
_BYTES_MOVED = {kinds: _WEIGHT[method.forward] + _WEIGHT[method.backward] for kinds, method in METHODS.items()}
"""Bytes that each kind of step moves forward and backward, in multiples of `Step.fraction` of the tensor."""


Move = tuple[Placements, int, Placement]
"""(previous placements, axis, the axis' new placement)"""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of one axis from `source` to `target`.

    fraction: bytes of the collective (one rank's gathered, reduced or exchanged buffer) relative to the whole tensor.
    source_sections, target_sections: section counts of the local tensor at that moment.
    """

    axis: int
    source: Placement
    target: Placement
    fraction: float
    source_sections: int
    target_sections: int

    @property
    def forward(self) -> Collective | None:
        return METHODS[self.source.kind, self.target.kind].forward

    @property
    def backward(self) -> Collective | None:
        return METHODS[self.source.kind, self.target.kind].backward


@lru_cache(maxsize=200_000)
def steps(source: Placements, target: Placements, axis_sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """Return the cheapest sequence by bytes moved, or None if there is none."""
    if source == target:
        return ()
    changed = [axis for axis, (before, after) in enumerate(zip(source, target, strict=True)) if before != after]
    if len(changed) == 1:
        # Any other way goes through R, where at most as many axes share the bytes, so it moves more.
        axis = changed[0]
        goal = target[axis]
        if (source[axis].kind, goal.kind) in METHODS and _is_legal(source, axis, goal, axis_sizes):
            return (_step(source, axis, goal, axis_sizes),)
    return _cheapest(source, target, axis_sizes)


def _cheapest(source: Placements, target: Placements, axis_sizes: tuple[int, ...]) -> tuple[Step, ...] | None:
    """Run Dijkstra's algorithm over placements."""
    queue: list[tuple[float, int, Placements, tuple[Move, ...]]] = [(0.0, 0, source, ())]
    done: set[Placements] = set()
    count = 0
    while queue:
        cost, _, current, path = heapq.heappop(queue)
        if current == target:
            return tuple(_step(before, axis, goal, axis_sizes) for before, axis, goal in path)
        if current in done:
            continue
        done.add(current)
        for axis, goal, weight in _moves(current, target, axis_sizes):
            following = (*current[:axis], goal, *current[axis + 1 :])
            if following not in done:
                count += 1
                heapq.heappush(queue, (cost + weight, count, following, (*path, (current, axis, goal))))
    return None


def _moves(current: Placements, target: Placements, axis_sizes: tuple[int, ...]) -> list[tuple[int, Placement, float]]:
    """Return (axis, its new placement, weight) of the legal steps."""
    moves = []
    ways = math.prod([n for p, n in zip(current, axis_sizes, strict=True) if p.kind == "S"])
    for axis, (placement, target_placement) in enumerate(zip(current, target, strict=True)):
        for goal in (target_placement,) if target_placement == R else (target_placement, R):
            bytes_moved = _BYTES_MOVED.get((placement.kind, goal.kind)) if goal != placement else None
            if bytes_moved is not None and _is_legal(current, axis, goal, axis_sizes):
                fraction = _fraction(ways, placement, goal, axis_sizes[axis])
                moves.append((axis, goal, fraction * bytes_moved + _STEP_PENALTY))
    return moves


def _is_legal(current: Placements, axis: int, goal: Placement, axis_sizes: tuple[int, ...]) -> bool:
    """Whether no inner axis shards the level left or joined, all_to_all changes the dim, and levels nest."""
    current_placement = current[axis]
    inner = current[axis + 1 :]
    if current_placement.kind == goal.kind == "S" and current_placement.dim == goal.dim:
        return False
    if inner and (
        (current_placement.kind == "S" and current_placement in inner) or (goal.kind == "S" and goal in inner)
    ):
        return False
    if goal.kind != "S":
        return True
    return _nests((*current[:axis], goal, *inner), goal.dim, axis_sizes)


def _nests(placements: Placements, dim: int, axis_sizes: tuple[int, ...]) -> bool:
    """Whether the sections of each shard of `dim` divide into whole parts of the next coarser one (see `divides`)."""
    if sum([p.dim == dim for p in placements]) < 2:
        return True
    levels: dict[int, int] = {}
    for placement, size in zip(placements, axis_sizes, strict=True):
        if placement.is_shard and placement.dim == dim:
            levels[placement.sections] = levels.get(placement.sections, 1) * size
    ordered = sorted(levels)
    return all(fine % (coarse * levels[coarse]) == 0 for coarse, fine in zip(ordered, ordered[1:], strict=False))


def _fraction(ways: int, current: Placement, goal: Placement, axis_size: int) -> float:
    """Return `Step.fraction` of changing an axis' placement. ways: ranks that share the tensor before it."""
    if current.kind != "S":
        return 1.0 / ways
    others = ways // axis_size
    return 1.0 / others / (axis_size if goal.kind == "S" else 1)


def _step(current: Placements, axis: int, goal: Placement, axis_sizes: tuple[int, ...]) -> Step:
    placement = current[axis]
    ways = math.prod([n for p, n in zip(current, axis_sizes, strict=True) if p.kind == "S"])
    return Step(
        axis=axis,
        source=placement,
        target=goal,
        fraction=_fraction(ways, placement, goal, axis_sizes[axis]),
        source_sections=_local_sections(current, axis, placement, axis_sizes),
        target_sections=_local_sections(current, axis, goal, axis_sizes),
    )


def _local_sections(current: Placements, axis: int, shard: Placement, axis_sizes: tuple[int, ...]) -> int:
    """Return the sections of a dim in the local tensor, after axes with a coarser level have split it."""
    if not shard.is_shard:
        return 1
    coarser = (
        n
        for i, (p, n) in enumerate(zip(current, axis_sizes, strict=True))
        if i != axis and p.is_shard and p.dim == shard.dim and p.sections < shard.sections
    )
    return shard.sections // math.prod(coarser)
