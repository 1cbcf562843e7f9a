"""Choose how many items of each group take which option, at least cost, within limits. Exact.

Shape legend: K options of all groups together, R rows (memory, steady time, step time), G groups (classes), C cuts.

    minimize    sum_j cost_j x_j
        subject to  sum_(j in g) x_j = n_g,    sum_j rows_rj x_j <= limit_r,    x integral and >= 0

Every multiplier vector l >= 0 gives non-negative reduced costs q_j = c_j + l . rows_j - min over the group, and every
solution that costs less than u meets the *cut* sum_j q_j x_j < u - bound(l) (``stage_lp.bound``). The same holds with
a row in the role of the cost and its limit in the role of u, and each row itself is a cut (l = 0). ``_Enumeration``
walks all count vectors within all cuts, option by option, as arrays of partial vectors. The last two options of the
last group follow in closed form, as every cut leaves an interval of counts. u - bound grows from a small guess until
the best vector costs at most u, which proves it optimal (``cheapest``).

For a stage of few units it is faster to enumerate all ways to run it, as arrays (``num_ways`` and below; Q ways, one
count per option).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from search.problem import Array
from search.stage_lp import Indices, bound, relax

MAX_STATES = 20_000
"""Partial count vectors kept at a time; more are walked in halves."""

SLACK = 1e-12
"""Relative rounding slack of the cuts; the resulting vectors are checked against the limits without it."""

MAX_WAYS = 4096
"""The most ways to run a stage that are enumerated; ``cheapest`` solves larger stages."""

GROWTH = 4.0
"""Factor between successive guesses of the cost above the bound."""


@dataclass(frozen=True, slots=True, eq=False)
class KnapsackResult:
    """The result of ``cheapest``: ``counts`` [K] (None: infeasible, or not below the cutoff) and useful multipliers.

    ``multipliers`` [R] belong to the linear relaxation; ``is_ray`` says that they prove infeasibility with zero costs.
    """

    counts: Indices | None
    cost: float
    multipliers: Array
    is_ray: bool


def cheapest(cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices, cutoff: float) -> KnapsackResult:
    """Return the cheapest integral x that costs less than ``cutoff`` (inf: the cheapest of all).

    Args:
        cost: [K].
        rows: [R, K], >= 0.
        limits: [R].
        starts: [G] first option of each group; options of a group are contiguous.
        sizes: [G] items to place in each group, >= 1.
    """
    num_rows = len(rows)
    nothing = np.zeros(num_rows)
    least = np.minimum.reduceat(rows, starts, axis=1) @ sizes
    over = least > limits + SLACK * np.abs(limits)
    if over.any():
        return KnapsackResult(None, np.inf, over / np.maximum(np.abs(limits), 1e-300), True)
    binding = np.maximum.reduceat(rows, starts, axis=1) @ sizes > limits
    cuts = _Cuts(cost=cost, rows=rows[binding], limits=limits[binding], starts=starts, sizes=sizes)
    multipliers = nothing.copy()
    if binding.any():
        relaxed, feasible = relax(cost, cuts.rows, cuts.limits, starts, sizes)
        multipliers[binding] = relaxed
        if not feasible and bound(0 * cost, cuts.rows, cuts.limits, starts, sizes, relaxed) > 0:
            return KnapsackResult(None, np.inf, multipliers, True)
    base = cuts.cut_cost(multipliers[binding])
    most = float(np.maximum.reduceat(cuts.coefficients[0], starts) @ sizes)
    span = min(most, cutoff - base)
    if span < 0:
        return KnapsackResult(None, np.inf, multipliers, False)
    positive = cuts.coefficients[0][cuts.coefficients[0] > 0]
    guess = min(span, float(np.median(positive)) / GROWTH if len(positive) else 0.0)
    for attempt in range(1000):
        if attempt == 1 and not cuts.cut_rows():
            return KnapsackResult(None, np.inf, multipliers, False)
        budget = guess + SLACK * (abs(base) + most)
        counts, value = _Enumeration(cuts, budget).best()
        if value <= base + budget or guess >= span:
            break
        guess = min(span, value - base if np.isfinite(value) else guess * GROWTH)
    if counts is None or value >= cutoff:
        return KnapsackResult(None, np.inf, multipliers, False)
    return KnapsackResult(counts, value, multipliers, False)


class _Cuts:
    """The cuts: ``coefficients`` [C, K] >= 0 and ``budgets`` [C]. Cut 0 is the cost's; each try sets its budget."""

    def __init__(self, cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices) -> None:
        self.cost, self.rows, self.limits, self.starts, self.sizes = cost, rows, limits, starts, sizes
        ends = np.append(starts[1:], len(cost))
        self.group = np.repeat(np.arange(len(starts)), ends - starts)
        least = np.minimum.reduceat(rows, starts, axis=1) if len(rows) else np.zeros((0, len(starts)))
        self.coefficients = np.vstack([np.zeros_like(cost), rows - least[:, self.group]])
        self.budgets = np.append(0.0, limits - least @ sizes + SLACK * np.abs(limits))

    def cut_cost(self, multipliers: Array) -> float:
        """Set cut 0; return the bound."""
        reduced = self.cost + multipliers @ self.rows
        least = np.minimum.reduceat(reduced, self.starts)
        self.coefficients[0] = reduced - least[self.group]
        return float(least @ self.sizes - multipliers @ self.limits)

    def cut_rows(self) -> bool:
        """Add a cut per row with the row as the cost; return False if a cut proves infeasibility."""
        for r in range(len(self.rows) if len(self.rows) > 1 else 0):
            others = np.arange(len(self.rows)) != r
            rows, limits = self.rows[others], self.limits[others]
            multipliers, feasible = relax(self.rows[r], rows, limits, self.starts, self.sizes)
            if not feasible:
                continue
            reduced = self.rows[r] + multipliers @ rows
            least = np.minimum.reduceat(reduced, self.starts)
            budget = self.limits[r] - float(least @ self.sizes - multipliers @ limits)
            budget += SLACK * (abs(self.limits[r]) + float(multipliers @ limits))
            if budget < 0:
                return False
            self.coefficients = np.vstack([self.coefficients, reduced - least[self.group]])
            self.budgets = np.append(self.budgets, budget)
        return True


class _Enumeration:
    """A walk over all count vectors within the cuts that keeps the cheapest one within the limits."""

    def __init__(self, cuts: _Cuts, budget: float) -> None:
        self.cuts = cuts
        self.budgets = np.append(budget, cuts.budgets[1:])
        self.counts: Indices | None = None
        self.value = float("inf")
        share = (cuts.coefficients / np.maximum(self.budgets, 1e-300)[:, None]).max(axis=0)
        self.levels: list[tuple[str, int, int]] = []
        order = np.argsort(cuts.sizes, kind="stable")
        for place, g in enumerate(order):
            options = [int(j) for j in np.flatnonzero(cuts.group == g)]
            options.sort(key=lambda j: -share[j])
            pair = place == len(order) - 1 and len(options) > 1
            self.levels.append(("open", int(cuts.sizes[g]), 0))
            self.levels += [("expand", j, 0) for j in options[: -2 if pair else -1]]
            self.levels.append(("pair", options[-2], options[-1]) if pair else ("rest", options[-1], 0))

    def best(self) -> tuple[Indices | None, float]:
        """Return the counts [K] and their cost; (None, inf) if there are none."""
        num_cuts, num_options = self.cuts.coefficients.shape
        counts = np.zeros((1, num_options), dtype=np.int64)
        self._walk(0, counts, np.zeros(1, dtype=np.int64), np.zeros((num_cuts, 1)))
        return self.counts, self.value

    def _walk(self, level: int, counts: Indices, left: Indices, sums: Array) -> None:
        """Place the options from ``level`` on: counts [S, K], items left in the group [S], cuts used [C, S]."""
        for place in range(level, len(self.levels)):
            kind, a, b = self.levels[place]
            if kind == "open":
                left = np.full(len(counts), a)
                continue
            column = self.cuts.coefficients[:, a][:, None]
            if kind == "expand":
                most = np.minimum(left, self._room(sums, column))
                total = int(most.sum()) + len(most)
                if total > MAX_STATES and len(counts) > 1:
                    for half in np.array_split(np.arange(len(counts)), 2):
                        self._walk(place, counts[half], left[half], sums[:, half])
                    return
                state = np.repeat(np.arange(len(most)), most + 1)
                taken = np.arange(total) - np.repeat(np.cumsum(most + 1) - most - 1, most + 1)
                counts, left = counts[state], left[state] - taken
            elif kind == "rest":
                state = np.flatnonzero(left <= self._room(sums, column))
                taken = left[state]
                counts = counts[state]
            else:
                counts = self._pair(counts, left, sums, a, b)
                break
            counts[:, a] = taken
            sums = sums[:, state] + column * taken
            if not len(counts):
                return
        self._keep(counts)

    def _room(self, sums: Array, column: Array) -> Indices:
        """Return how many more items of an option the cuts allow, [S]."""
        room = np.maximum(self.budgets[:, None] - sums, 0.0)
        ratio = np.full(sums.shape, 1e9)
        np.divide(room, column, out=ratio, where=column > 1e-300)
        whole: Indices = np.minimum(ratio.min(axis=0) + 1e-9, 1e9).astype(np.int64)
        return whole

    def _pair(self, counts: Indices, left: Indices, sums: Array, a: int, b: int) -> Indices:
        """Place the last two options: cuts leave an interval for the count of ``a``, where the cost is linear."""
        slope = (self.cuts.coefficients[:, a] - self.cuts.coefficients[:, b])[:, None]
        room = self.budgets[:, None] - sums - self.cuts.coefficients[:, b][:, None] * left
        high = np.where(slope > 0, room / np.where(slope > 0, slope, 1.0), np.inf).min(axis=0)
        low = np.where(slope < 0, room / np.where(slope < 0, slope, 1.0), -np.inf).max(axis=0)
        bad = ((slope == 0) & (room < 0)).any(axis=0)
        top = np.minimum(np.floor(np.minimum(high, 1e9) + 1e-9), left).astype(np.int64)
        bottom = np.maximum(np.ceil(np.maximum(low, -1.0) - 1e-9), 0).astype(np.int64)
        state = np.flatnonzero((bottom <= top) & ~bad)
        cheap, step = (bottom, 1) if self.cuts.cost[a] >= self.cuts.cost[b] else (top, -1)
        taken = np.stack([cheap[state], cheap[state] + step])
        # The next count too: rounding may have admitted an end of the interval that a limit then forbids.
        fits = (taken >= bottom[state]) & (taken <= top[state])
        state = np.broadcast_to(state, taken.shape)[fits]
        counts = counts[state]
        counts[:, a] = taken[fits]
        counts[:, b] = left[state] - taken[fits]
        return counts

    def _keep(self, counts: Indices) -> None:
        """Keep the cheapest vector if it meets the limits and beats the best one so far."""
        usage = self.cuts.rows @ counts.T
        cost = np.where((usage <= self.cuts.limits[:, None]).all(axis=0), counts @ self.cuts.cost, np.inf)
        if not len(cost):
            return
        best = int(np.argmin(cost))
        if cost[best] < self.value:
            self.counts, self.value = counts[best], float(cost[best])


def num_ways(sizes: Sequence[int], num_points: Sequence[int]) -> int:
    """Return Q: the product of the multiset coefficients."""
    return math.prod(math.comb(n + k - 1, n) for n, k in zip(sizes, num_points, strict=True) if n)


@lru_cache(maxsize=256)
def multisets(size: int, num_points: int) -> Indices:
    """Return [Q, k] counts of k points that place ``size`` units of one class; read-only."""
    rows = [list(row) for row in itertools.combinations_with_replacement(range(num_points), size)]
    counts = np.zeros((len(rows), num_points), dtype=np.int64)
    if size:
        np.add.at(counts, (np.repeat(np.arange(len(rows)), size), np.array(rows).reshape(-1)), 1)
    counts.setflags(write=False)
    return counts


def combine(parts: Sequence[Indices]) -> Indices:
    """Return [Q, K] all combinations of the ways of each class, points side by side."""
    result = parts[0]
    for part in parts[1:]:
        result = np.hstack([np.repeat(result, len(part), axis=0), np.tile(part, (len(result), 1))])
    return result


def totals(counts: Indices, figures: Array) -> Array:
    """Return [7, Q]: sums of fill, steady, step, fixed, micro and deferred bytes, and the largest transient.

    Args:
        counts: [Q, K].
        figures: [K, 7] of the points.
    """
    sums = counts @ figures[:, :6]
    largest = np.where(counts > 0, figures[:, 6], 0.0).max(axis=1)
    return np.concatenate([sums.T, largest[None]])
