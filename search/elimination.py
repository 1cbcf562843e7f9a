"""Exact min-sum variable elimination (bucket elimination) on dense tables.

For variables v1, v2, ... in elimination order, the bucket of v holds every table that mentions v and no earlier
variable. The message of v is

    m_v(S_v) = min over x_v of the sum of v's bucket

with S_v, the separator, the other variables of that bucket. It joins the bucket of v's parent, the earliest variable
in S_v (the next variable in the order where S_v is empty, so that the components of the graph form one tree and the
last message is the optimum). A backward pass gives the completion

    r_v(S_v) = min over all variables outside v's subtree and S_v of all tables outside v's subtree

so that m_v + r_v is the best objective with S_v fixed. Source: R. Dechter, "Bucket elimination: a unifying framework
for reasoning", Artificial Intelligence 113 (1999), sections 4 and 5.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from search.core import Pairwise
from search.problem import Array

BLOCK_CELLS = 1 << 16
TARGET_BLOCK_CELLS = 1 << 14
"""Cells per block of a table sum, and of the result it is minimized into: 512 KiB and 128 KiB. A block then stays in
a core's second-level cache. Measured: 1.5 ns per cell, against 2 ns with blocks of 1 << 10 cells."""

MAX_MESSAGE_CELLS = 3e7
"""240 MB of messages. A search under a budget keeps up to three such sets (costs, completions, marginals)."""

MAX_TOTAL_CELLS = 3e9
"""About five seconds for one elimination."""


class Factor(NamedTuple):
    """A table; axis i of ``array`` is variable ``scope[i]``. Scopes are in elimination order."""

    scope: tuple[int, ...]
    array: Array


@dataclass(frozen=True, slots=True)
class Plan:
    """An elimination order and the sizes that follow from it.

    ``separators`` and ``parents`` are indexed by variable; the last variable has parent -1. ``total_cells`` counts the
    cells of all bucket tables (the time), ``message_cells`` those of all messages (the memory).
    """

    order: tuple[int, ...]
    separators: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]
    total_cells: float
    message_cells: float

    @property
    def is_affordable(self) -> bool:
        """Whether the plan's tables fit into memory and take seconds rather than minutes."""
        return self.message_cells <= MAX_MESSAGE_CELLS and self.total_cells <= MAX_TOTAL_CELLS

    def children(self) -> tuple[tuple[int, ...], ...]:
        """List, for each variable, the variables whose message joins its bucket, in elimination order."""
        children: list[list[int]] = [[] for _ in self.order]
        for variable in self.order[:-1]:
            children[self.parents[variable]].append(variable)
        return tuple(tuple(group) for group in children)


@dataclass(frozen=True, slots=True, eq=False)
class Elimination:
    """The forward pass: each variable's bucket (messages of ``plan.children()`` last) and message, and the optimum."""

    plan: Plan
    sizes: tuple[int, ...]
    buckets: tuple[tuple[Factor, ...], ...]
    messages: tuple[Factor, ...]
    value: float


def plan_elimination(sizes: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Plan:
    """Return the cheaper of two greedy orders by table sizes: least bucket table, or least added fill in cells."""
    plans = [_plan_for(_greedy_order(sizes, pairs, by_fill), sizes, pairs) for by_fill in (False, True)]
    return min(plans, key=lambda plan: plan.total_cells + plan.message_cells)


def eliminate(function: Pairwise, plan: Plan) -> Elimination:
    """Run the forward pass."""
    count, sizes = len(plan.order), function.sizes
    position = {variable: index for index, variable in enumerate(plan.order)}
    buckets: list[list[Factor]] = [[Factor((v,), function.unaries[v])] for v in range(count)]
    for a, b in sorted(function.edges):
        first, second = (a, b) if position[a] < position[b] else (b, a)
        buckets[first].append(Factor((first, second), function.table(first, second)))
    messages = [Factor((), np.zeros(()))] * count
    for variable in plan.order:
        messages[variable] = project(buckets[variable], plan.separators[variable], sizes)
        if plan.parents[variable] >= 0:
            buckets[plan.parents[variable]].append(messages[variable])
    value = float(messages[plan.order[-1]].array) if count else 0.0
    return Elimination(
        plan=plan,
        sizes=sizes,
        buckets=tuple(tuple(bucket) for bucket in buckets),
        messages=tuple(messages),
        value=value,
    )


def decode(elimination: Elimination) -> tuple[int, ...]:
    """Return the assignment that attains the optimum. Ties go to the lowest option, last eliminated variable first."""
    assignment = [0] * len(elimination.sizes)
    for variable in reversed(elimination.plan.order):
        total = np.zeros(elimination.sizes[variable])
        for factor in elimination.buckets[variable]:
            total = total + factor.array[tuple(slice(None) if v == variable else assignment[v] for v in factor.scope)]
        assignment[variable] = int(np.argmin(total))
    return tuple(assignment)


def completions(elimination: Elimination) -> tuple[Factor, ...]:
    """Run the backward pass: return r_v of the module's docstring for each variable v, over the axes S_v."""
    plan = elimination.plan
    children = plan.children()
    result = [Factor((), np.zeros(()))] * len(plan.order)
    for variable in reversed(plan.order):
        bucket = elimination.buckets[variable]
        num_tables = len(bucket) - len(children[variable])
        for index, child in enumerate(children[variable], start=num_tables):
            others = [*bucket[:index], *bucket[index + 1 :], result[variable]]
            result[child] = project(others, plan.separators[child], elimination.sizes)
    return tuple(result)


def marginals(elimination: Elimination, rests: Sequence[Factor]) -> tuple[Array, ...]:
    """Return, for each variable and option, the best objective with that option fixed (inf if there is none).

    It is m_u + r_u for the smallest separator S_u that contains the variable, or its own bucket if no separator does.
    """
    sizes, smallest = elimination.sizes, [-1] * len(elimination.sizes)
    for child, message in enumerate(elimination.messages):
        for v in message.scope:
            if smallest[v] < 0 or message.array.size < elimination.messages[smallest[v]].array.size:
                smallest[v] = child
    minima: list[Array] = []
    for v, child in enumerate(smallest):
        factors = elimination.buckets[v] if child < 0 else (elimination.messages[child],)
        rest = rests[v] if child < 0 else rests[child]
        minima.append(project([*factors, rest], (v,), sizes).array)
    return tuple(minima)


def project(factors: Sequence[Factor], target: tuple[int, ...], sizes: Sequence[int]) -> Factor:
    """Minimize the sum of ``factors`` over all variables outside ``target``, block by block to save memory."""
    eliminated = tuple(sorted({v for factor in factors for v in factor.scope} - set(target)))
    axes = eliminated + target
    arrays = sorted((_aligned(factor, axes) for factor in factors), key=lambda array: array.size)
    out = np.full(tuple(sizes[v] for v in target), np.inf)
    eliminated_shape = tuple(sizes[v] for v in eliminated)
    eliminated_axes = tuple(range(len(eliminated)))
    for target_block in _blocks(out.shape, TARGET_BLOCK_CELLS):
        view = out[target_block] if target else out
        for eliminated_block in _blocks(eliminated_shape, max(1, BLOCK_CELLS // max(1, view.size))):
            block = eliminated_block + target_block
            total = _part(arrays[0], block)
            for array in arrays[1:]:
                total = total + _part(array, block)
            np.minimum(view, total.min(axis=eliminated_axes), out=view)
    return Factor(target, out)


def _aligned(factor: Factor, axes: tuple[int, ...]) -> Array:
    """Return the factor's array with one axis per entry of ``axes``; axes it does not depend on have length one."""
    permutation = sorted(range(len(factor.scope)), key=lambda axis: axes.index(factor.scope[axis]))
    array = np.ascontiguousarray(factor.array.transpose(permutation))
    lengths = {factor.scope[axis]: factor.array.shape[axis] for axis in permutation}
    return array.reshape(tuple(lengths.get(v, 1) for v in axes))


def _part(array: Array, block: tuple[slice, ...]) -> Array:
    """Return a block of an aligned array."""
    part: Array = array[tuple(slice(None) if size == 1 else s for size, s in zip(array.shape, block, strict=True))]
    return part


def _blocks(shape: tuple[int, ...], max_cells: int) -> Iterator[tuple[slice, ...]]:
    """Cut a shape into blocks of at most ``max_cells`` cells (at least one), leading axes first."""
    if math.prod(shape) <= max_cells:
        yield tuple(slice(0, size) for size in shape)
        return
    rest = math.prod(shape[1:])
    step = max(1, max_cells // max(1, rest))
    for start in range(0, shape[0], step):
        for block in _blocks(shape[1:], max_cells):
            yield (slice(start, min(start + step, shape[0])), *block)


def _greedy_order(sizes: Sequence[int], pairs: Sequence[tuple[int, int]], by_fill: bool) -> tuple[int, ...]:
    """Eliminate the variable with the least score until none is left; ties go to the lowest index."""
    graph = _Scored(sizes)
    for a, b in {(min(pair), max(pair)) for pair in pairs}:
        graph.connect(a, b)

    def entry(v: int) -> tuple[int, int, int]:
        return (graph.fill[v], graph.cells[v], v) if by_fill else (graph.cells[v], 0, v)

    entries = [entry(v) for v in range(len(sizes))]
    heap, order = sorted(entries), dict[int, None]()
    while heap:
        smallest = heapq.heappop(heap)
        chosen = smallest[2]
        if chosen not in order and smallest == entries[chosen]:
            order[chosen] = None
            for v in graph.eliminate(chosen):
                if entry(v) != entries[v]:
                    entries[v] = entry(v)
                    heapq.heappush(heap, entries[v])
    return tuple(order)


class _Scored:
    """A graph that keeps both scores of every variable up to date, in exact integers, as edges come and go.

    Recomputing scores would be quadratic for a variable with thousands of neighbors, such as the ZeRO stage of an
    unrolled recurrence.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.adjacent: list[set[int]] = [set() for _ in sizes]
        self.around = [0] * len(sizes)
        """The sum of the neighbors' sizes."""
        self.cells, self.fill = list(sizes), [0] * len(sizes)

    def connect(self, a: int, b: int) -> set[int]:
        """Add an edge; return the common neighbors, for which it no longer counts as fill."""
        sizes, common = self.sizes, self.adjacent[a] & self.adjacent[b]
        shared = sum(sizes[v] for v in common)
        for v in common:
            self.fill[v] -= sizes[a] * sizes[b]
        for v, other in ((a, b), (b, a)):
            self.fill[v] += sizes[other] * (self.around[v] - shared)
            self.around[v] += sizes[other]
            self.cells[v] *= sizes[other]
            self.adjacent[v].add(other)
        return common

    def eliminate(self, chosen: int) -> set[int]:
        """Remove a variable and connect its neighbors; return the variables whose scores may have changed."""
        sizes, around = self.sizes, sorted(self.adjacent[chosen])
        for v in around:
            apart = self.around[v] - sizes[chosen] - sum(sizes[u] for u in self.adjacent[v] & self.adjacent[chosen])
            self.fill[v] -= sizes[chosen] * apart
            self.around[v] -= sizes[chosen]
            self.cells[v] //= sizes[chosen]
            self.adjacent[v].remove(chosen)
        touched = set(around)
        for a, b in combinations(around, 2):
            if b not in self.adjacent[a]:
                touched |= self.connect(a, b)
        return touched


def _plan_for(order: tuple[int, ...], sizes: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Plan:
    """Compute separators, parents and sizes of one order."""
    position = {variable: index for index, variable in enumerate(order)}
    scopes: list[set[int]] = [set() for _ in sizes]
    for a, b in pairs:
        first, second = (a, b) if position[a] < position[b] else (b, a)
        scopes[first].add(second)
    separators: list[tuple[int, ...]] = [()] * len(sizes)
    parents = [-1] * len(sizes)
    total_cells = message_cells = 0.0
    for index, variable in enumerate(order):
        separator = tuple(sorted(scopes[variable], key=position.__getitem__))
        separators[variable] = separator
        if separator:
            parents[variable] = separator[0]
            scopes[separator[0]].update(separator[1:])
        elif index + 1 < len(order):
            parents[variable] = order[index + 1]
        cells = math.prod(float(sizes[v]) for v in separator)
        message_cells += cells
        total_cells += cells * sizes[variable]
    return Plan(
        order=order,
        separators=tuple(separators),
        parents=tuple(parents),
        total_cells=total_cells,
        message_cells=message_cells,
    )
