"""How many items of each group take which option, at least cost, within limits. Exact.

Shape legend: K options of all groups together, R rows (memory, steady time, step time), G groups (classes), C cuts.

    minimise    sum_j cost_j x_j
    subject to  sum_(j in g) x_j = n_g,    sum_j rows_rj x_j <= limit_r,    x whole and >= 0

Every multiplier vector l >= 0 gives non-negative reduced costs q_j = c_j + l . rows_j - min over the group, and every
solution that costs less than u meets the *cut* sum_j q_j x_j < u - bound(l) (``stage_lp.bound``). The same holds with a
row in the role of the cost and its limit in the role of u, and each row itself is a cut (l = 0). ``_Enumeration`` walks
all count vectors within all cuts, option by option, as arrays of partial vectors; the last two options of the last
group follow in closed form, as every cut leaves an interval of counts. u - bound grows from a small guess until the
best vector found costs at most u, which proves it (``cheapest``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search.problem import Array
from search.stage_lp import Indices, bound, relax

MAX_STATES = 20_000
"""Partial count vectors that are held at a time; more are walked in parts."""

SLACK = 1e-12
"""Relative rounding slack of the cuts; limits are checked anew, without it, on the vectors found."""

GROWTH = 4.0
"""Factor between successive guesses of the cost above the bound."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The result of ``cheapest``: ``counts`` [K] (None: infeasible, or not below the cutoff) and useful multipliers.

    ``multipliers`` [R] are of the linear relaxation; ``is_ray`` says that they prove infeasibility with zero costs.
    """

    counts: Indices | None
    cost: float
    multipliers: Array
    is_ray: bool


def cheapest(cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices, cutoff: float) -> Found:
    """The cheapest whole x that costs less than ``cutoff`` (inf: the cheapest).

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
        return Found(None, np.inf, over / np.maximum(np.abs(limits), 1e-300), True)
    binding = np.maximum.reduceat(rows, starts, axis=1) @ sizes > limits
    cuts = _Cuts(cost=cost, rows=rows[binding], limits=limits[binding], starts=starts, sizes=sizes)
    multipliers = nothing.copy()
    if binding.any():
        found, feasible = relax(cost, cuts.rows, cuts.limits, starts, sizes)
        multipliers[binding] = found
        if not feasible and bound(0 * cost, cuts.rows, cuts.limits, starts, sizes, found) > 0:
            return Found(None, np.inf, multipliers, True)
    base = cuts.cut_cost(multipliers[binding])
    most = float(np.maximum.reduceat(cuts.coefficients[0], starts) @ sizes)
    span = min(most, cutoff - base)
    if span < 0:
        return Found(None, np.inf, multipliers, False)
    positive = cuts.coefficients[0][cuts.coefficients[0] > 0]
    guess = min(span, float(np.median(positive)) / GROWTH if len(positive) else 0.0)
    for attempt in range(1000):
        if attempt == 1 and not cuts.cut_rows():
            return Found(None, np.inf, multipliers, False)
        budget = guess + SLACK * (abs(base) + most)
        counts, value = _Enumeration(cuts, budget).best()
        if value <= base + budget or guess >= span:
            break
        guess = min(span, value - base if np.isfinite(value) else guess * GROWTH)
    if counts is None or value >= cutoff:
        return Found(None, np.inf, multipliers, False)
    return Found(counts, value, multipliers, False)


class _Cuts:
    """The cuts: ``coefficients`` [C, K] >= 0 and ``budgets`` [C]; cut 0 is the cost's, its budget is set per try."""

    def __init__(self, cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices) -> None:
        self.cost, self.rows, self.limits, self.starts, self.sizes = cost, rows, limits, starts, sizes
        ends = np.append(starts[1:], len(cost))
        self.group = np.repeat(np.arange(len(starts)), ends - starts)
        least = np.minimum.reduceat(rows, starts, axis=1) if len(rows) else np.zeros((0, len(starts)))
        self.coefficients = np.vstack([np.zeros_like(cost), rows - least[:, self.group]])
        self.budgets = np.append(0.0, limits - least @ sizes + SLACK * np.abs(limits))

    def cut_cost(self, multipliers: Array) -> float:
        """Set cut 0; returns the bound."""
        reduced = self.cost + multipliers @ self.rows
        least = np.minimum.reduceat(reduced, self.starts)
        self.coefficients[0] = reduced - least[self.group]
        return float(least @ self.sizes - multipliers @ self.limits)

    def cut_rows(self) -> bool:
        """Add a cut per row with the row as the cost; False if one proves infeasibility."""
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
    """All count vectors within the cuts; keeps the cheapest that meets the limits."""

    def __init__(self, cuts: _Cuts, budget: float) -> None:
        self.cuts = cuts
        self.budgets = np.append(budget, cuts.budgets[1:])
        self.found: Indices | None = None
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
        """The counts [K] and their cost; (None, inf) if there are none."""
        num_cuts, num_options = self.cuts.coefficients.shape
        counts = np.zeros((1, num_options), dtype=np.int64)
        self._walk(0, counts, np.zeros(1, dtype=np.int64), np.zeros((num_cuts, 1)))
        return self.found, self.value

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
        """How many more items of an option the cuts allow, [S]."""
        room = np.maximum(self.budgets[:, None] - sums, 0.0)
        ratio = np.full(sums.shape, 1e9)
        np.divide(room, column, out=ratio, where=column > 1e-300)
        whole: Indices = np.minimum(ratio.min(axis=0) + 1e-9, 1e9).astype(np.int64)
        return whole

    def _pair(self, counts: Indices, left: Indices, sums: Array, a: int, b: int) -> Indices:
        """The last two options: each cut leaves an interval for the count of ``a``; the cost is linear on it."""
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
        # The neighbour too: rounding may have let in an end of the interval that a limit then forbids.
        fits = (taken >= bottom[state]) & (taken <= top[state])
        state = np.broadcast_to(state, taken.shape)[fits]
        counts = counts[state]
        counts[:, a] = taken[fits]
        counts[:, b] = left[state] - taken[fits]
        return counts

    def _keep(self, counts: Indices) -> None:
        """Keep the cheapest vector if it meets the limits and beats the one found before."""
        usage = self.cuts.rows @ counts.T
        cost = np.where((usage <= self.cuts.limits[:, None]).all(axis=0), counts @ self.cuts.cost, np.inf)
        if not len(cost):
            return
        best = int(np.argmin(cost))
        if cost[best] < self.value:
            self.found, self.value = counts[best], float(cost[best])
