"""Costs of stages by their contents: bounds for all stages at once, exact figures on demand.

A stage's cost depends on its *shape* (units of each class, seconds for which its boundaries occupy it, costs of tied
parameters), its submesh and its live micro-batches, not on its position in the chain. There is one ``StageCosts`` per
``Kind`` of stage (a submesh, and its neighbors' where transfers occupy the stage). With S shapes, F distinct pairs
of micro-batches (in flight, deferred), P multiplier vectors, E exact entries, N units, L units in the longest stage,
it has:

- ``shape_of`` [N, L]: the shape of the stage that starts at a unit and has a length, -1 where there is none
  (``stage_shapes``).
- A pool of multipliers (s, l_memory, l_steady, l_step), s = 1, or 0 for a proof of infeasibility. Each gives

      L(T, U) = sum_c n_c min_j [s fill_j + l . (memory_j(F), steady_j, step_j)] - l . (memory, T, U)

    for every shape and F at once (``_base``): a lower bound of the least fill within T and U, or, for s = 0 and
    L > 0, a proof that nothing fits. (Lagrangian duality; the multipliers come from the exact computations.)
  - Entries: the least fill within (T, U), with its steady and step time. An entry computed for (T', U') is a lower
    bound for every T <= T', U <= U', and exact where its times are within T and U.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from search.pipeline_problem import PipelineProblem, Point, Submesh
from search.problem import Array
from search.stage_knapsack import MAX_WAYS, SLACK, KnapsackResult, cheapest, combine, multisets, num_ways, totals
from search.stage_lp import FEASIBILITY_TOLERANCE, Indices, bound
from search.stage_shapes import shapes_of

Labels = dict[tuple[int, str], int]
"""How many units of a class (by number) take a point (by label)."""


@dataclass(frozen=True, slots=True, eq=False)
class Menu:
    """Undominated options of a stage: ``figures`` [5, K] fill, memory, steady, step, and their owners."""

    figures: Array
    starts: Indices
    owners: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The least fill within (steady_limit, step_limit); ``labels`` None: nothing costs less than ``fill``."""

    fill: float
    steady: float
    step: float
    labels: Labels | None


@dataclass(slots=True, eq=False)
class _Fills:
    """Bounds of the least fill within (steady, step) limits, from the multipliers and entries read so far.

    bound: lower bounds [F, S]. exact: the entries that are exact [F, S], else -1.
    """

    limits: tuple[float, float]
    bound: Array
    exact: Indices
    num_multipliers: int = 0
    num_entries: int = 0


class StageCosts:
    """Costs of the stages on one submesh between given neighbors.

    Args:
        submesh: of the stage.
            busy: [N + 1] seconds for which the boundary before each unit occupies the stage as its first boundary, and
                (second array) as its last; zero at 0 and N.
            micro_batches: [F, 2] distinct pairs of micro-batches in flight and deferred.
            longest: units of the longest stage.
    """

    def __init__(
        self, problem: PipelineProblem, submesh: Submesh, busy: tuple[Array, Array], micro_batches: Array, longest: int
    ) -> None:
        self.problem, self.submesh, self.micro_batches = problem, submesh, micro_batches
        self.classes = tuple(dict.fromkeys(problem.units))
        self.points = tuple(problem.points.get((kind, submesh.name), ()) for kind in self.classes)
        self._find_shapes(busy, longest)
        figures = [[_figures(point) for point in points] for points in self.points]
        self._figures = [np.array(rows, dtype=np.float64).reshape(-1, 7) for rows in figures]
        leanest = np.array([min((p.transient_bytes for p in points), default=0.0) for points in self.points])
        self.transient = np.where(self.counts > 0, leanest, 0.0).max(axis=1)
        self.base = np.zeros((0, len(micro_batches), len(self.counts)))
        self.pool = np.zeros((0, 4))
        self.entries: list[Entry] = []
        self.where = np.zeros((0, 2), dtype=np.int64)
        self.numbers = np.zeros((0, 5))
        self._ways: dict[int, tuple[Indices, Array, Array] | None] = {}
        self._fills: _Fills | None = None
        self._times: dict[int, tuple[Array, int]] = {}
        self._enumerated: set[tuple[int, float, float]] = set()
        self._menus: dict[tuple[int, tuple[int, ...], float], Menu] = {}
        for multipliers in ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)):
            self.add_multipliers(np.array(multipliers, dtype=np.float64))

    def _find_shapes(self, busy: tuple[Array, Array], longest: int) -> None:
        """Set ``shape_of``, and per shape ``counts`` [S, classes], ``busy``, ``extra_bytes``, ``extra_step`` [S]."""
        problem = self.problem
        shapes = shapes_of(
            problem.units,
            longest,
            (tuple(busy[0]), tuple(busy[1])),
            tuple(bool(points) for points in self.points),
            tuple((pair.first, pair.second) for pair in problem.tied),
            problem.uncut,
        )
        self.shape_of, self.counts, self.busy = shapes.shape_of, shapes.counts, shapes.busy
        self.extra_bytes = shapes.second_alone @ np.array([pair.fixed_bytes for pair in problem.tied])
        self.extra_step = shapes.one_alone @ np.array([pair.step_seconds for pair in problem.tied])

    def add_multipliers(self, multipliers: Array) -> None:
        """Add (s, l_memory, l_steady, l_step) to the pool."""
        self.pool = np.concatenate([self.pool, multipliers[None]])
        self.base = np.concatenate([self.base, self._base(multipliers)[None]])

    def _base(self, multipliers: Array) -> Array:
        """Return [F, S] L(0, 0) of one multiplier vector."""
        s, memory, steady, step = multipliers
        total = memory * (self.transient + self.extra_bytes - self.submesh.largest_allowed)
        total = total + steady * self.busy + step * self.extra_step
        result = np.tile(total, (len(self.micro_batches), 1))
        for c, figures in enumerate(self._figures):
            if len(figures):
                seconds = s * figures[:, 0] + steady * figures[:, 1] + step * figures[:, 2] + memory * figures[:, 3]
                least = (seconds + memory * (self.micro_batches @ figures[:, 4:6].T)).min(axis=1)
                result += least[:, None] * self.counts[:, c]
        return result

    def least_fill(self, steady_limit: float, step_limit: float) -> tuple[Array, Indices]:
        """Return [F, S] lower bounds of the fill within finite limits, and the exact entries (else -1)."""
        fills = self._fills
        if fills is None or fills.limits != (steady_limit, step_limit):
            shape = self.base.shape[1:]
            fills = self._fills = _Fills(
                (steady_limit, step_limit), bound=np.full(shape, -np.inf), exact=np.full(shape, -1, dtype=np.int64)
            )
        pool, base = self.pool[fills.num_multipliers :], self.base[fills.num_multipliers :]
        if len(pool):
            limits = pool[:, 2] * steady_limit + pool[:, 3] * step_limit
            values = base - limits[:, None, None]
            is_ray = pool[:, 0] == 0
            size = limits + pool[:, 1] * abs(self.submesh.largest_allowed)
            proof = values[is_ray] > FEASIBILITY_TOLERANCE * size[is_ray][:, None, None]
            np.maximum(fills.bound, values[~is_ray].max(axis=0, initial=-np.inf), out=fills.bound)
            fills.bound[proof.any(axis=0)] = np.inf
            fills.num_multipliers = len(self.pool)
        if fills.num_entries < len(self.entries):
            fill, steady, step, most_steady, most_step = self.numbers[fills.num_entries :].T
            valid = np.flatnonzero((most_steady >= steady_limit) & (most_step >= step_limit))
            where = self.where[fills.num_entries :]
            np.maximum.at(fills.bound, tuple(where[valid].T), fill[valid])
            fits = (steady[valid] <= steady_limit * (1 + SLACK)) & (step[valid] <= step_limit * (1 + SLACK))
            valid = valid[fits]
            fills.exact[tuple(where[valid].T)] = fills.num_entries + valid
            fills.num_entries = len(self.entries)
        result, at = fills.bound.copy(), np.nonzero(fills.exact >= 0)
        result[at] = self.numbers[fills.exact[at], 0]
        return result, fills.exact.copy()

    def least_time(self, row: int) -> Array:
        """Return [F, S] lower bounds of the steady (row 1) or step (row 2) time; inf: cannot fit."""
        bounds, count = self._times.get(row, (np.zeros(self.base.shape[1:]), 0))
        if count < len(self.pool):
            pool, base = self.pool[count:], self.base[count:]
            weight, other = pool[:, 1 + row], pool[:, 4 - row]
            use = (pool[:, 0] == 0) & (weight > 0) & (other == 0)
            bounds = np.maximum(bounds, (base[use] / weight[use][:, None, None]).max(axis=0, initial=0.0))
            alone = (pool[:, [0, 2, 3]] == 0).all(axis=1)
            size = FEASIBILITY_TOLERANCE * pool[alone, 1] * abs(self.submesh.largest_allowed)
            bounds[(base[alone] > size[:, None, None]).any(axis=0)] = np.inf
            self._times[row] = bounds, len(self.pool)
        return bounds.copy()

    def refine(self, f: int, shape: int, steady_limit: float, step_limit: float, cutoff: float) -> None:
        """Compute and keep the least fill exactly, or only note that it is ``cutoff`` or more."""
        limits = np.array([0.0, steady_limit * (1 + SLACK), step_limit * (1 + SLACK)])
        ways = self._all_ways(shape)
        if ways is not None:
            self._refine_small(ways, shape, steady_limit, step_limit)
            return
        best: Entry = Entry(cutoff, np.inf, np.inf, None)
        for menu, result in self._solutions(f, shape, 0, limits, cutoff):
            self._learn(f, shape, result, steady_limit, step_limit)
            if result.counts is not None and result.cost < best.fill:
                best = self._entry(menu, result, shape)
        self._keep([best], [f], shape, steady_limit, step_limit)

    def _keep(
        self, entries: list[Entry], numbers_of_f: Sequence[int], shape: int, steady_limit: float, step_limit: float
    ) -> None:
        """Append entries of one shape."""
        self.entries += entries
        self.where = np.concatenate([self.where, [[number, shape] for number in numbers_of_f]])
        numbers = [[entry.fill, entry.steady, entry.step, steady_limit, step_limit] for entry in entries]
        self.numbers = np.concatenate([self.numbers, numbers])

    def _all_ways(self, shape: int) -> tuple[Indices, Array, Array] | None:
        """Return counts [Q, K], totals [7, Q] and memory [F, Q] of all ways to run a shape; None if too many."""
        if shape not in self._ways:
            sizes = [int(n) for n in self.counts[shape]]
            present = [c for c, n in enumerate(sizes) if n]
            if num_ways(sizes, [len(points) for points in self.points]) > MAX_WAYS:
                self._ways[shape] = None
            else:
                counts = combine([multisets(sizes[c], len(self.points[c])) for c in present])
                sums = totals(counts, np.concatenate([self._figures[c] for c in present]))
                memory = sums[3] + self.micro_batches @ sums[4:6] + sums[6] + self.extra_bytes[shape]
                memory = np.where(memory <= self.submesh.largest_allowed, 0.0, np.inf)
                self._ways[shape] = counts, sums, memory
        return self._ways[shape]

    def _refine_small(
        self, ways: tuple[Indices, Array, Array], shape: int, steady_limit: float, step_limit: float
    ) -> None:
        """Refine by enumerating all ways, for every number of micro-batches in flight at once."""
        if (shape, steady_limit, step_limit) in self._enumerated:
            return
        self._enumerated.add((shape, steady_limit, step_limit))
        counts, sums, memory = ways
        steady, step = sums[1] + self.busy[shape], sums[2] + self.extra_step[shape]
        fits = (steady <= steady_limit * (1 + SLACK)) & (step <= step_limit * (1 + SLACK))
        fill = memory + np.where(fits, sums[0], np.inf)
        present = [c for c, n in enumerate(self.counts[shape]) if n]
        owners = [(c, point.label) for c in present for point in self.points[c]]
        entries, labels = [], {}
        for f, way in enumerate(fill.argmin(axis=1)):
            if np.isinf(fill[f, way]):
                entries.append(Entry(np.inf, np.inf, np.inf, None))
                continue
            if way not in labels:
                labels[way] = {owner: int(n) for owner, n in zip(owners, counts[way], strict=True) if n}
            entries.append(Entry(float(fill[f, way]), float(steady[way]), float(step[way]), labels[way]))
        self._keep(entries, range(len(entries)), shape, steady_limit, step_limit)

    def exact_steady(self, f: int, shape: int) -> float:
        """Return the least steady time, with the step time unlimited; inf if nothing fits."""
        extra = float(self.busy[shape])
        ways = self._all_ways(shape)
        if ways is not None:
            return float((ways[1][1] + ways[2][f]).min()) + extra
        best = float("inf")
        for _, result in self._solutions(f, shape, 2, np.full(3, np.inf), best):
            if result.multipliers[0] > 0:
                weights = np.array([0.0, result.multipliers[0], 0.0 if result.is_ray else 1.0, 0.0])
                self._offer(f, shape, weights, 0.0, 0.0)
            best = min(best, result.cost + extra)
        return best

    def _entry(self, menu: Menu, result: KnapsackResult, shape: int) -> Entry:
        assert result.counts is not None
        steady, step = menu.figures[2:4] @ result.counts
        labels = {menu.owners[j]: int(n) for j, n in enumerate(result.counts) if n}
        return Entry(result.cost, float(steady + self.busy[shape]), float(step + self.extra_step[shape]), labels)

    def _learn(self, f: int, shape: int, result: KnapsackResult, steady_limit: float, step_limit: float) -> None:
        """Add the multipliers of an exact computation to the pool if they tighten the bound of its stage."""
        if result.multipliers.any():
            weights = np.append(0.0 if result.is_ray else 1.0, result.multipliers)
            self._offer(f, shape, weights, steady_limit, step_limit)

    def _offer(self, f: int, shape: int, weights: Array, steady_limit: float, step_limit: float) -> None:
        """Add multipliers unless a vector of the pool bounds the stage as well."""
        finite = [limit if np.isfinite(limit) else 0.0 for limit in (steady_limit, step_limit)]
        if weights[0] > 0:
            bounds = self.base[:, f, shape] - self.pool[:, 2] * finite[0] - self.pool[:, 3] * finite[1]
            bounds = bounds[self.pool[:, 0] > 0]
            new = self._base(weights)[f, shape] - weights[2] * finite[0] - weights[3] * finite[1]
            if new <= bounds.max() + 1e-6 * abs(bounds.max()):
                return
        elif (np.abs(self.pool - weights) <= 1e-6 * np.abs(weights)).all(axis=1).any():
            return
        self.add_multipliers(weights)

    def _solutions(
        self, f: int, shape: int, objective: int, limits: Array, cutoff: float
    ) -> Iterator[tuple[Menu, KnapsackResult]]:
        """Solve for each cap on the transient, larger ones first; later ones must beat earlier ones."""
        present = tuple(int(c) for c in np.flatnonzero(self.counts[shape]))
        sizes = self.counts[shape][list(present)]
        room = self.submesh.largest_allowed - float(self.extra_bytes[shape])
        tried: list[KnapsackResult] = []
        sets = [[point.transient_bytes for point in self.points[c]] for c in present]
        least = max(map(min, sets))
        for cap in sorted({value for values in sets for value in values if value >= least}, reverse=True):
            menu = self._menu(f, present, cap)
            rows = menu.figures[1:4]
            extra = np.array([room - cap, limits[1] - self.busy[shape], limits[2] - self.extra_step[shape]])
            cost = menu.figures[objective]
            if any(_excludes(old, cost, rows, extra, menu.starts, sizes, cutoff) for old in tried):
                continue
            result = cheapest(cost, rows, extra, menu.starts, sizes, cutoff)
            tried.append(result)
            cutoff = min(cutoff, result.cost)
            yield menu, result

    def _menu(self, f: int, present: tuple[int, ...], cap: float) -> Menu:
        """Return the undominated options under a cap that leaves every class at least one."""
        key = (f, present, cap)
        if key not in self._menus:
            self._menus[key] = self._new_menu(*key)
        return self._menus[key]

    def _new_menu(self, f: int, present: tuple[int, ...], cap: float) -> Menu:
        parts: list[Array] = []
        owners: list[tuple[int, str]] = []
        starts: list[int] = []
        for c in present:
            allowed = [j for j, point in enumerate(self.points[c]) if point.transient_bytes <= cap]
            points = self._figures[c][allowed]
            memory = points[:, 3] + points[:, 4:6] @ self.micro_batches[f]
            figures = np.stack([points[:, 0], memory, points[:, 1], points[:, 2]])
            kept = _undominated(figures)
            starts.append(len(owners))
            owners += [(c, self.points[c][allowed[j]].label) for j in kept]
            parts.append(figures[:, kept])
        return Menu(np.concatenate(parts, axis=1), np.array(starts), tuple(owners))


def _excludes(
    old: KnapsackResult, cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices, cutoff: float
) -> bool:
    """Whether the multipliers of an earlier computation prove that nothing here costs less than the cutoff."""
    use = old.multipliers > 0
    priced = cost * (0.0 if old.is_ray else 1.0)
    value = bound(priced, rows[use], limits[use], starts, sizes, old.multipliers[use])
    if old.is_ray:
        return value > FEASIBILITY_TOLERANCE * float(old.multipliers[use] @ np.abs(limits[use]))
    return value >= cutoff


def _figures(point: Point) -> tuple[float, ...]:
    return (
        point.fill_seconds,
        point.steady_seconds,
        point.step_seconds,
        point.fixed_bytes,
        point.micro_bytes,
        point.deferred_bytes,
        point.transient_bytes,
    )


def _undominated(figures: Array) -> list[int]:
    """List the columns that no other column beats or, with a lower index, equals in every row."""
    no_worse = (figures[:, :, None] <= figures[:, None, :]).all(axis=0)
    equal = no_worse & no_worse.T
    index = np.arange(figures.shape[1])
    beaten = (no_worse & ~equal) | (equal & (index[:, None] < index[None, :]))
    return [int(j) for j in index[~beaten.any(axis=0)]]
