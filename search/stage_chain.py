"""The dynamic program over the chain of units for a given number of stages.

    V_i(a, u, g, h) = min over b > a and h' of  c_i(a, b, g, h, h') + boundary(b, h, h') + V_(i+1)(b, u - n_h, h, h')

is the least cost of stages i ... p - 1 when stage i starts at unit a on submesh h, stage i - 1 is on g, and these
stages use u_k devices of group k. It runs backwards, so that the stage number, and with it the micro-batches in
flight, is known. g and h' matter only where transfers occupy stages (``Chain.neighbors``). With one submesh there is
one u per i. The same program with max in place of + gives the least bottleneck.

Shape legend: N units, L the longest stage, U device counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from search.pipeline_problem import PipelineProblem
from search.problem import Array
from search.stage_costs import StageCosts
from search.stage_lp import Indices

Kind = tuple[int, int, int]
"""Submesh numbers of the previous stage (-1: none or irrelevant), of the stage, and of the next stage."""

Used = tuple[int, ...]
State = tuple[int, int]
"""Submesh numbers of the previous stage (-1: none or irrelevant) and of the stage."""

Tables = Mapping[Kind, Array]

MOST_NUMBERS = 1 << 20
"""The most numbers in one intermediate array."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The choice that attains V_i of one state.

    length, after [U, N]: the stage's length, by device count and first unit, and the next stage's submesh. source [U]:
    the next stage's device count. Counts are entries of ``Chain.layers``.
    """

    length: Indices
    after: Indices
    source: Indices


@dataclass(frozen=True, slots=True)
class Cut:
    """A stage of a path: units ``start`` to ``end`` - 1, its kind, and its (f, shape) numbers within that kind."""

    start: int
    end: int
    submesh: int
    kind: Kind
    f: int
    shape: int


class Chain:
    """All pipelines of ``num_stages`` stages."""

    def __init__(self, problem: PipelineProblem, num_stages: int) -> None:
        self.problem, self.num_stages = problem, num_stages
        self.num_units = len(problem.units)
        self.longest = self.num_units - num_stages + 1
        micro_batches = [problem.live_micro_batches(num_stages, i) for i in range(num_stages)]
        distinct, number = np.unique(np.array(micro_batches), axis=0, return_inverse=True)
        self.f_of: Indices = number.reshape(-1)
        seconds = problem.transfer_seconds or {}
        self.neighbors = problem.transfer_is_exposed and any(value > 0 for value in seconds.values())
        self.groups = tuple(problem.groups)
        self.devices = []
        for submesh in problem.submeshes:
            self.devices.append(tuple(submesh.num_devices * (group == submesh.group) for group in self.groups))
        self.layers = self._reachable()
        self.moves = self._moves()
        end = np.arange(self.num_units)[:, None] + np.arange(1, self.longest + 1)[None, :]
        self.start = np.arange(self.num_units)
        self.end = np.minimum(end, self.num_units)
        ends = range(-1, len(problem.submeshes))
        self._boundaries = {(h, n): self.boundary(h, n) for h in ends for n in ends}
        self.costs: dict[Kind, StageCosts] = {}
        self.shapes: dict[Kind, Indices] = {}
        for kind in self._kinds():
            cost = self.costs[kind] = StageCosts(
                problem=problem,
                submesh=problem.submeshes[kind[1]],
                busy=self._busy(kind),
                micro_batches=distinct,
                longest=self.longest,
            )
            self.shapes[kind] = np.where(cost.shape_of < 0, len(cost.counts), cost.shape_of)

    def _moves(self) -> list[list[tuple[Indices, Indices]]]:
        """Return, for each i and submesh, the entries of layers[i] that use the submesh for stage i, and the entries
        of layers[i + 1] that the remaining stages then use."""
        moves = []
        for layer, following in itertools.pairwise(self.layers):
            number = {used: row for row, used in enumerate(following)}
            pairs: list[list[tuple[int, int]]] = [[] for _ in self.devices]
            for h, more in enumerate(self.devices):
                for row, used in enumerate(layer):
                    rest = tuple(u - m for u, m in zip(used, more, strict=True))
                    if rest in number:
                        pairs[h].append((row, number[rest]))
            arrays = [np.array(links, dtype=np.int64).reshape(-1, 2).T for links in pairs]
            moves.append([(rows, sources) for rows, sources in arrays])
        return moves

    def _reachable(self) -> list[list[Used]]:
        """Return, for each i, the device counts of stages i ... p - 1 that earlier stages can complete."""
        total = tuple(self.problem.groups.values())
        sums: list[set[Used]] = [{(0,) * len(total)}]
        for _ in range(self.num_stages):
            new = {_add(used, more) for used in sums[-1] for more in set(self.devices)}
            sums.append({used for used in new if all(u <= t for u, t in zip(used, total, strict=True))})
        sums[-1] &= {total}
        kept = [set(sums[-1])]
        for i in range(self.num_stages - 1, -1, -1):
            pairs = itertools.product(kept[-1], self.devices)
            before = {tuple(u - m for u, m in zip(used, more, strict=True)) for used, more in pairs}
            kept.append(before & sums[i])
        return [sorted(layer) for layer in kept]

    def _kinds(self) -> list[Kind]:
        every = range(len(self.problem.submeshes))
        if not self.layers[0]:
            return []
        if not self.neighbors:
            return [(-1, h, -1) for h in every]
        # A stage has 2 ends of the pipeline if it is the only one, else at most 1.
        ends = {1: (2,), 2: (1,)}.get(self.num_stages, (0, 1))
        pairs = itertools.product((-1, *every), repeat=2)
        return [(g, h, n) for g, n in pairs if (g < 0) + (n < 0) in ends for h in every]

    def _busy(self, kind: Kind) -> tuple[Array, Array]:
        """Return the steady seconds of the boundary before each unit, as a stage's first and as its last."""
        return self.boundary(kind[0], kind[1]), self.boundary(kind[1], kind[2])

    def boundary(self, before: int, after: int) -> Array:
        """Return the [N + 1] seconds of the boundary before each unit; zero at both ends and without a neighbor."""
        result = np.zeros(self.num_units + 1)
        if min(before, after) >= 0:
            names = self.problem.submeshes[before].name, self.problem.submeshes[after].name
            for b in range(1, self.num_units):
                result[b] = self.problem.boundary_seconds(b, *names)
        return result

    def kind(self, before: int, submesh: int, after: int) -> Kind:
        """Return the kind of a stage between two neighbors."""
        return (before, submesh, after) if self.neighbors else (-1, submesh, -1)

    def solve(self, tables: Tables, *, bottleneck: bool) -> tuple[float, tuple[Cut, ...]]:
        """Return the least sum (with boundary fills) or the least maximum of the stages' costs, and a path that
        attains it.

        Args:
            tables: per kind [F, S] seconds, inf where impossible.

        Returns (inf, ()) if there is no path.
        """
        if not self.costs:
            return float("inf"), ()
        width = self._width(tables)
        spread = {kind: self._spread(kind, table, width) for kind, table in tables.items()}
        if len(self.problem.submeshes) == 1 and not self.neighbors:
            return self._solve_alike(spread[-1, 0, -1], bottleneck)
        every = range(len(self.problem.submeshes))
        done = np.full((1, self.num_units + 1), np.inf)
        done[0, -1] = 0.0
        values: dict[State, Array] = {(-1, -1): done}
        assignment: list[dict[State, Choice]] = [{} for _ in range(self.num_stages)]
        for i in range(self.num_stages - 1, -1, -1):
            following, values = values, {}
            for g, h in itertools.product(every if self.neighbors and i > 0 else (-1,), every):
                best_of_state = self._best(i, g, h, following, spread, bottleneck)
                if best_of_state is not None:
                    values[g, h], assignment[i][g, h] = best_of_state
        best, state, row = float("inf"), (-1, -1), 0
        for key, value in values.items():
            least = int(value[:, 0].argmin())
            if value[least, 0] < best:
                best, state, row = float(value[least, 0]), key, least
        return best, self._trace(state, row, assignment) if np.isfinite(best) else ()

    def _solve_alike(self, stage_costs: Array, bottleneck: bool) -> tuple[float, tuple[Cut, ...]]:
        """Solve for one submesh. Stage i starts at unit i + k, k < L, and the next stage at i + 1 + k'. Since
        k' = k + length - 1, the costs of all lengths are a window that slides over V_(i+1)."""
        width = stage_costs.shape[2]
        rows, boundary = np.arange(self.longest), self._boundaries[0, 0]
        value = np.full(self.longest + width - 1, np.inf)
        value[self.longest - 1] = 0.0
        following = np.lib.stride_tricks.sliding_window_view(value, width)
        lengths: list[Indices] = []
        for i in range(self.num_stages - 1, -1, -1):
            costs = stage_costs[self.f_of[i], i : i + self.longest]
            total = np.maximum(costs, following) if bottleneck else costs + following
            place = total.argmin(axis=1)
            lengths.append(place + 1)
            value[: self.longest] = total[rows, place]
            if not bottleneck and i:
                value[: self.longest] += boundary[i : i + self.longest]
        best = float(value[0])
        if not np.isfinite(best):
            return best, ()
        cuts: list[Cut] = []
        start, kind = 0, (-1, 0, -1)
        for i, length in enumerate(reversed(lengths)):
            end = start + int(length[start - i])
            shape = int(self.costs[kind].shape_of[start, end - start - 1])
            cuts.append(Cut(start=start, end=end, submesh=0, kind=kind, f=int(self.f_of[i]), shape=shape))
            start = end
        return best, tuple(cuts)

    def _best(
        self, i: int, g: int, h: int, values: Mapping[State, Array], spread: Tables, bottleneck: bool
    ) -> tuple[Array, Choice] | None:
        """Return V_i of all device counts [U, N + 1] and the choices; None where the kind is impossible."""
        rows, sources = self.moves[i][h]
        before = h if self.neighbors else -1
        afters = [n for b, n in values if b in (before, -1)]
        if not len(rows) or not afters:
            return None
        nexts = {n: values[before if n >= 0 else -1, n][sources] for n in afters}
        if not bottleneck:
            nexts = {n: value + self._boundaries[h, n] for n, value in nexts.items()}
        shape = len(self.layers[i]), self.num_units
        result = np.full((shape[0], shape[1] + 1), np.inf)
        choice = Choice(np.zeros(shape, dtype=np.int64), np.full(shape, -1), np.zeros(shape[0], dtype=np.int64))
        choice.source[rows] = sources
        if self.neighbors:
            for n, value in nexts.items():
                least, length = self._shortest(spread[g, h, n][self.f_of[i]], value, bottleneck)
                better = least < result[rows, :-1]
                at = np.nonzero(better)
                where = rows[at[0]], at[1]
                result[where], choice.length[where], choice.after[where] = least[at], length[at], n
            return result, choice
        stage_costs = spread[-1, h, -1][self.f_of[i]]
        if len(afters) == 1:
            result[rows, :-1], choice.length[rows] = self._shortest(stage_costs, nexts[afters[0]], bottleneck)
            choice.after[rows] = afters[0]
            return result, choice
        stacked = np.stack(list(nexts.values()))
        nearest = stacked.argmin(axis=0)
        result[rows, :-1], length = self._shortest(stage_costs, stacked.min(axis=0), bottleneck)
        choice.length[rows] = length
        end = np.minimum(self.start + length, self.num_units)
        choice.after[rows] = np.array(afters)[np.take_along_axis(nearest, end, axis=1)]
        return result, choice

    def _shortest(self, stage_costs: Array, following: Array, bottleneck: bool) -> tuple[Array, Indices]:
        """Return the best cost and length [R, N] of stages with costs `stage_costs` [N, L], each followed by
        `following` [R, N + 1]."""
        end = self.end[:, : stage_costs.shape[1]]
        if len(following) == 1:
            total = following[0][end]
            np.maximum(stage_costs, total, out=total) if bottleneck else np.add(stage_costs, total, out=total)
            place = total.argmin(axis=1)
            return total[self.start, place][None], place[None] + 1
        least, length = np.empty(shape := (len(following), self.num_units)), np.empty(shape, dtype=np.int64)
        step = max(MOST_NUMBERS // end.size, 1)
        for first in range(0, len(following), step):
            rows = slice(first, first + step)
            total = following[rows][:, end]
            np.maximum(stage_costs, total, out=total) if bottleneck else np.add(stage_costs, total, out=total)
            place = total.argmin(axis=2)
            least[rows] = np.take_along_axis(total, place[:, :, None], axis=2)[:, :, 0]
            length[rows] = place + 1
        return least, length

    def _spread(self, kind: Kind, table: Array, width: int) -> Array:
        """Return [F, N, width] costs by first unit and length. Forbidden stages have the number after the last."""
        forbidden = np.full((len(table), 1), np.inf)
        return np.take(np.append(table, forbidden, axis=1), self.shapes[kind][:, :width], axis=1)

    def _width(self, tables: Tables) -> int:
        """Return a length that no stage of finite cost exceeds."""
        longest = 1
        for kind, table in tables.items():
            finite = np.append(np.isfinite(table).any(axis=0), False)
            lengths = np.flatnonzero(np.take(finite, self.shapes[kind]).any(axis=0))
            longest = max(longest, int(lengths.max(initial=0)) + 1)
        return longest

    def _trace(self, state: State, row: int, assignment: list[dict[State, Choice]]) -> tuple[Cut, ...]:
        """Return the path from unit 0, from a state of stage 0 and a device count."""
        cuts: list[Cut] = []
        start = 0
        for i in range(self.num_stages):
            choice, (g, h) = assignment[i][state], state
            end, after = start + int(choice.length[row, start]), int(choice.after[row, start])
            kind = self.kind(g, h, after)
            shape = int(self.costs[kind].shape_of[start, end - start - 1])
            cuts.append(Cut(start=start, end=end, submesh=h, kind=kind, f=int(self.f_of[i]), shape=shape))
            start, row, state = end, int(choice.source[row]), (h if self.neighbors else -1, after)
        return tuple(cuts)


def _add(used: Used, more: Used) -> Used:
    return tuple(u + m for u, m in zip(used, more, strict=True))
