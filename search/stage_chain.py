"""The dynamic program over the chain of blocks for a given number of stages.

    V_i(a, u, g, h) = min over b > a and h' of  c_i(a, b, g, h, h') + border(b, h, h') + V_(i+1)(b, u - n_h, h, h')

is the least cost of stages i ... p - 1 when stage i starts at block a on submesh h, stage i - 1 is on g, and these
stages use u_k devices of group k. Backwards, so that the stage number, and with it the micro-batches in flight, is
known. g and h' matter only where transfers keep stages busy (``Chain.neighbours``). With one submesh there is one u
per i. The same program with max in place of + gives the least bottleneck.

Shape legend: N blocks, L the longest stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from search.core import Mask
from search.pipeline_problem import PipelineProblem
from search.problem import Array
from search.stage_costs import StageCosts
from search.stage_lp import Indices

Kind = tuple[int, int, int]
"""Submesh numbers of the stage before (-1: none or irrelevant), of the stage, and of the stage after it."""

Used = tuple[int, ...]
State = tuple[Used, int, int]
Tables = Mapping[Kind, Array]
Library = dict[tuple[int, Kind], StageCosts]
Choice = tuple[Indices, Indices, list[State]]
"""Per first block the stage's length and the number of the next stage's state, and those states."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage of a path: blocks ``start`` to ``end`` - 1, its kind, and the kind's (in flight, shape) numbers."""

    start: int
    end: int
    submesh: int
    kind: Kind
    f: int
    shape: int


class Chain:
    """The pipelines of ``num_stages`` stages in which each block keeps to its ``allowed`` submeshes.

    Args:
        allowed: [H, N] whether a submesh may hold a block.
        library: costs of the same problem's stages that other chains know; this chain adds its own.
    """

    def __init__(self, problem: PipelineProblem, num_stages: int, allowed: Mask, library: Library) -> None:
        self.problem, self.num_stages = problem, num_stages
        self.num_blocks = len(problem.blocks)
        self.longest = self.num_blocks - num_stages + 1
        in_flight = [float(problem.in_flight(num_stages, i)) for i in range(num_stages)]
        distinct, number = np.unique(in_flight, return_inverse=True)
        self.f_of: Indices = number.reshape(-1)
        seconds = problem.transfer_seconds or {}
        self.neighbours = problem.transfer_is_exposed and any(value > 0 for value in seconds.values())
        self.groups = tuple(problem.groups)
        self.devices = []
        for submesh in problem.submeshes:
            self.devices.append(tuple(submesh.num_devices * (group == submesh.group) for group in self.groups))
        self.layers = self._reachable()
        end = np.arange(self.num_blocks)[:, None] + np.arange(1, self.longest + 1)[None, :]
        self.end = np.minimum(end, self.num_blocks)
        ends = range(-1, len(problem.submeshes))
        self._borders = {(h, n): self.border(h, n) for h in ends for n in ends}
        self.costs: dict[Kind, StageCosts] = {}
        self.forbidden: dict[Kind, Mask] = {}
        for kind in self._kinds():
            cost = library.get((num_stages, kind))
            if cost is None:
                cost = StageCosts(problem, problem.submeshes[kind[1]], self._busy(kind), distinct, self.longest)
                library[num_stages, kind] = cost
            self.costs[kind] = cost
            outside = np.append(0, np.cumsum(~allowed[kind[1]]))
            crossing = outside[self.end] > outside[: self.num_blocks, None]
            self.forbidden[kind] = (cost.shape_of < 0) | (end > self.num_blocks) | crossing

    def _reachable(self) -> list[set[Used]]:
        """Per i: the device counts that stages i ... p - 1 may use so that stages 0 ... i - 1 can use the others."""
        total = tuple(self.problem.groups.values())
        sums: list[set[Used]] = [{(0,) * len(total)}]
        for _ in range(self.num_stages):
            new = {_add(used, more) for used in sums[-1] for more in set(self.devices)}
            sums.append({used for used in new if all(u <= t for u, t in zip(used, total, strict=True))})
        if self.problem.use_all:
            sums[-1] &= {total}
        kept = [set(sums[-1])]
        for i in range(self.num_stages - 1, -1, -1):
            pairs = itertools.product(kept[-1], self.devices)
            before = {tuple(u - m for u, m in zip(used, more, strict=True)) for used, more in pairs}
            kept.append(before & sums[i])
        return kept

    def _kinds(self) -> list[Kind]:
        every = range(len(self.problem.submeshes))
        if not self.layers[0]:
            return []
        if not self.neighbours:
            return [(-1, h, -1) for h in every]
        # Ends of the pipeline that a stage has: 2 if it is the only one, else at most one.
        ends = {1: (2,), 2: (1,)}.get(self.num_stages, (0, 1))
        pairs = itertools.product((-1, *every), repeat=2)
        return [(g, h, n) for g, n in pairs if (g < 0) + (n < 0) in ends for h in every]

    def _busy(self, kind: Kind) -> tuple[Array, Array]:
        """What the border before each block adds to the steady time as the stage's first and as its last border."""
        return self.border(kind[0], kind[1]), self.border(kind[1], kind[2])

    def border(self, before: int, after: int) -> Array:
        """[N + 1] seconds of the border before each block; zero at both ends and without a neighbour."""
        result = np.zeros(self.num_blocks + 1)
        if min(before, after) >= 0:
            names = self.problem.submeshes[before].name, self.problem.submeshes[after].name
            for b in range(1, self.num_blocks):
                result[b] = self.problem.border_seconds(b, *names)
        return result

    def kind(self, before: int, submesh: int, after: int) -> Kind:
        """The kind of a stage between two neighbours."""
        return (before, submesh, after) if self.neighbours else (-1, submesh, -1)

    def solve(self, tables: Tables, *, bottleneck: bool) -> tuple[float, tuple[Cut, ...]]:
        """The least sum (with border fills) or the least maximum of the stages' costs, and a path that has it.

        Args:
            tables: per kind [F, S] seconds, inf where impossible.

        Returns (inf, ()) if there is no path.
        """
        if not self.costs:
            return float("inf"), ()
        width = self._width(tables)
        spread = {kind: self._spread(kind, table, width) for kind, table in tables.items()}
        every = range(len(self.problem.submeshes))
        done = np.full(self.num_blocks + 1, np.inf)
        done[-1] = 0.0
        values: dict[State, Array] = {((0,) * len(self.groups), -1, -1): done}
        choices: list[dict[State, Choice]] = [{} for _ in range(self.num_stages)]
        for i in range(self.num_stages - 1, -1, -1):
            sources: dict[State, list[State]] = {}
            for state in values:
                for h in every if state[1] < 0 else (state[1],):
                    total = _add(state[0], self.devices[h])
                    if total in self.layers[i]:
                        for g in every if self.neighbours and i > 0 else (-1,):
                            sources.setdefault((total, g, h), []).append(state)
            before, values = values, {}
            for target, states in sources.items():
                values[target], choices[i][target] = self._best(i, target, states, before, spread, bottleneck)
        start = min(values, key=lambda state: float(values[state][0]), default=None)
        if start is None or not np.isfinite(values[start][0]):
            return float("inf"), ()
        return float(values[start][0]), self._trace(start, choices)

    def _best(
        self,
        i: int,
        target: State,
        states: list[State],
        values: Mapping[State, Array],
        spread: Tables,
        bottleneck: bool,
    ) -> tuple[Array, Choice]:
        """V_i of one state [N + 1], and the length and the next state that attain it."""
        _, g, h = target
        result = np.full(self.num_blocks + 1, np.inf)
        length = np.zeros(self.num_blocks, dtype=np.int64)
        following = np.zeros(self.num_blocks, dtype=np.int64)
        start = np.arange(self.num_blocks)
        for number, state in enumerate(states):
            kind = self.kind(g, h, state[2])
            own = spread[kind][self.f_of[i]]
            end = self.end[:, : own.shape[1]]
            if bottleneck:
                total = np.maximum(own, values[state][end])
            else:
                total = own + (values[state] + self._borders[h, state[2]])[end]
            place = total.argmin(axis=1)
            least = total[start, place]
            if len(states) == 1:
                result[:-1], length = least, place + 1
                break
            better = least < result[:-1]
            result[:-1][better] = least[better]
            length[better], following[better] = place[better] + 1, number
        return result, (length, following, states)

    def _spread(self, kind: Kind, table: Array, width: int) -> Array:
        """[F, N, width] costs by first block and length."""
        shape = self.costs[kind].shape_of[:, :width]
        if not table.shape[1]:
            return np.full((len(table), *shape.shape), np.inf)
        # Shape -1 reads some other shape's cost here, which the mask then removes.
        result: Array = table[:, shape]
        result[:, self.forbidden[kind][:, :width]] = np.inf
        return result

    def _width(self, tables: Tables) -> int:
        """No stage with a finite cost is longer."""
        longest = 1
        for kind, table in tables.items():
            shape = self.costs[kind].shape_of
            if table.shape[1]:
                finite: Mask = np.any(np.isfinite(table), axis=0)
                lengths = np.flatnonzero((finite[shape] & ~self.forbidden[kind]).any(axis=0))
                longest = max(longest, int(lengths.max(initial=0)) + 1)
        return longest

    def _trace(self, state: State, choices: list[dict[State, Choice]]) -> tuple[Cut, ...]:
        """The path from block 0 in a state of stage 0."""
        cuts: list[Cut] = []
        start = 0
        for i in range(self.num_stages):
            length, following, states = choices[i][state]
            end = start + int(length[start])
            after = states[int(following[start])]
            kind = self.kind(state[1], state[2], after[2])
            shape = int(self.costs[kind].shape_of[start, end - start - 1])
            cuts.append(Cut(start, end, state[2], kind, int(self.f_of[i]), shape))
            start, state = end, after
        return tuple(cuts)


def _add(used: Used, more: Used) -> Used:
    return tuple(u + m for u, m in zip(used, more, strict=True))
