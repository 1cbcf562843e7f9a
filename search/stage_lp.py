"""Compute multipliers for the knapsack of one stage from its linear relaxation.

Shape legend: K options of all groups together, R rows (resources), G groups.

    minimize    sum_j cost_j x_j
    subject to  sum_(j in g) x_j = n_g              for every group g
                sum_j rows_rj x_j <= limit_r        for every row r,    x >= 0

``relax`` runs the primal simplex method on a dense tableau (G + R <= 6 rows in practice). Nothing relies on its
optimality: for ANY multipliers l >= 0

    bound(l) = sum_g n_g min_(j in g) (cost_j + sum_r l_r rows_rj) - sum_r l_r limit_r

is a lower bound, and ``relax`` returns multipliers from which the caller recomputes that bound.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from search.problem import Array

Indices = npt.NDArray[np.int64]

MAX_PIVOTS = 60
"""Pivots after which the current multipliers are taken. This ends the cycles that degenerate tableaus can run into."""

FEASIBILITY_TOLERANCE = 1e-9
"""The least violation, relative to a row's limit, that counts as infeasible."""


def relax(cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices) -> tuple[Array, bool]:
    """Return multipliers [R] >= 0 of the rows, and whether the linear relaxation may be feasible.

    Args:
        cost: [K].
        rows: [R, K], >= 0.
        limits: [R], >= 0.
        starts: [G] first option of each group; options of a group are contiguous.
        sizes: [G] how many items each group places.

    If False, the multipliers are a ray: with zero costs their bound is positive, so nothing is feasible.
    """
    num_rows, num_options = rows.shape
    scale = np.where(limits > 0, limits, np.maximum(rows.max(axis=1), 1e-300))
    scaled = rows / scale[:, None]
    ends = np.append(starts[1:], num_options)
    lean = scaled.max(axis=0)
    first = [int(s + np.argmin(lean[s:e])) for s, e in zip(starts, ends, strict=True)]
    group = np.repeat(np.arange(len(starts)), ends - starts)
    # Columns: options, slacks, violations, right-hand side. Rows: groups, then resources.
    tableau = np.zeros((len(starts) + num_rows, num_options + 2 * num_rows + 1))
    tableau[group, np.arange(num_options)] = 1.0
    tableau[: len(starts), -1] = sizes
    body = tableau[len(starts) :]
    body[:, :num_options] = scaled - scaled[:, first][:, group]
    body[:, -1] = limits / scale - scaled[:, first] @ sizes
    slack = num_options + np.arange(num_rows)
    body[np.arange(num_rows), slack] = 1.0
    body[np.arange(num_rows), slack + num_rows] = -1.0
    violated = body[:, -1] < 0
    body[violated] *= -1.0
    basis = np.array([*first, *np.where(violated, slack + num_rows, slack)])
    width = num_options + num_rows
    if violated.any():
        price = np.zeros(tableau.shape[1])
        price[width:-1] = 1.0
        price -= body[violated].sum(axis=0)
        price = _simplex(tableau, basis, price, width + num_rows)
        if -price[-1] > FEASIBILITY_TOLERANCE:
            return np.maximum(price[num_options:width], 0.0) / scale, False
    price = np.zeros(tableau.shape[1])
    price[:num_options] = cost
    price -= np.append(cost, np.zeros(2 * num_rows))[basis] @ tableau
    price = _simplex(tableau, basis, price, width)
    return np.maximum(price[num_options:width], 0.0) / scale, True


def _simplex(tableau: Array, basis: Indices, price: Array, width: int) -> Array:
    """Pivot in place over the first ``width`` columns until no reduced price is negative; return the prices."""
    scale = 1e-12 * max(1e-300, float(np.abs(price[:-1]).max()))
    for _ in range(MAX_PIVOTS):
        column = int(np.argmin(price[:width]))
        if price[column] >= -scale:
            break
        entering = tableau[:, column]
        positive = entering > 1e-11
        if not positive.any():
            break
        ratios = np.where(positive, tableau[:, -1] / np.where(positive, entering, 1.0), np.inf)
        row = int(np.argmin(ratios))
        tableau[row] /= entering[row]
        factors = tableau[:, column].copy()
        factors[row] = 0.0
        tableau -= np.outer(factors, tableau[row])
        price = price - price[column] * tableau[row]
        basis[row] = column
    return price


def bound(cost: Array, rows: Array, limits: Array, starts: Indices, sizes: Indices, multipliers: Array) -> float:
    """Return ``bound(l)`` of the module's docstring."""
    least = np.minimum.reduceat(cost + multipliers @ rows, starts)
    return float(least @ sizes - multipliers @ limits)
