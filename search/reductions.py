"""Exact reductions: drop options that no optimal choice needs, before any search.

Two rules run until neither drops anything (the second for a few rounds only):

* dead ends: an option with infinite cost, or without an allowed partner across some edge;
* dominance (Goldstein's dead-end elimination; R. Goldstein, Biophysical Journal 66 (1994), equation 4): option q of
  variable v is dropped in favor of option p when

      c_v(p) - c_v(q) + sum over edges (v, w) of max over x_w of [c(p, x_w) - c(q, x_w)] <= 0

  and p uses no more of the budget. Swapping q for p then never costs or uses more, whatever the other variables
  do. Of equal options the lowest index stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from search.core import Core, Mask
from search.problem import Array

Places = npt.NDArray[np.int64]
"""Numbers of options, ascending."""

MAX_DOMINANCE_ROUNDS = 3
NUM_SAMPLED_PARTNERS = 4


class EmptyDomainError(Exception):
    """No option of ``variable`` is left; caught inside the package."""

    def __init__(self, variable: int) -> None:
        super().__init__(variable)
        self.variable = variable


def reduce_core(core: Core) -> Core:
    """Drop dead ends and dominated options.

    Raises:
        EmptyDomainError: a variable has no option left.
    """
    core = drop_dead_ends(core)
    neighbors = core.costs.neighbors()
    open_ = set(range(len(core.sizes)))
    for _ in range(MAX_DOMINANCE_ROUNDS):
        smaller, changed = _drop_dominated(core, neighbors, open_)
        smaller, before = drop_dead_ends(smaller), smaller.sizes
        changed |= {v for v, (new, old) in enumerate(zip(smaller.sizes, before, strict=True)) if new < old}
        if smaller.sizes == core.sizes:
            break
        open_ |= {w for v in changed for w in neighbors[v]}
        core = smaller
    return core


def drop_dead_ends(core: Core) -> Core:
    """Drop options of infinite cost and options without an allowed partner, until none is left (arc consistency)."""
    masks: list[Mask] = [np.isfinite(unary) for unary in core.costs.unaries]
    finite = {pair: np.isfinite(table) for pair, table in core.costs.edges.items()}
    finite = {pair: table for pair, table in finite.items() if not table.all()}
    for variable, mask in enumerate(masks):
        if not mask.any():
            raise EmptyDomainError(variable)
    changed = True
    while changed:
        changed = False
        for (a, b), table in finite.items():
            for v, supported in ((a, table[:, masks[b]].any(axis=1)), (b, table[masks[a], :].any(axis=0))):
                smaller = masks[v] & supported
                if smaller.sum() < masks[v].sum():
                    masks[v], changed = smaller, True
                    if not smaller.any():
                        raise EmptyDomainError(v)
    return core.keep(masks)


def _drop_dominated(core: Core, neighbors: Sequence[Sequence[int]], open_: set[int]) -> tuple[Core, set[int]]:
    """Apply one round of the dominance rule; return the core and the variables that lost options.

    Each variable is compared over its neighbors' current options.

    open_: the variables to compare; afterwards, those with a neighbor that has lost options since their comparison.
    The others cannot lose more: their options were compared over the same partners.
    """
    masks: list[Mask] = [np.ones(size, dtype=np.bool_) for size in core.sizes]
    kept: list[Places] = [_all_places(size) for size in core.sizes]
    changed: set[int] = set()
    for v, size in enumerate(core.sizes):
        if v not in open_:
            continue
        open_.discard(v)
        if size > 1:
            masks[v] = _undominated(core, v, {w: kept[w] for w in neighbors[v]})
            if not masks[v].all():
                kept[v] = np.flatnonzero(masks[v])
                changed.add(v)
                open_.update(neighbors[v])
    return core.keep(masks), changed


def _undominated(core: Core, v: int, partners: Mapping[int, Places]) -> Mask:
    """Return the mask of the options of ``v`` that remain, compared over its neighbors' remaining options."""
    size = core.sizes[v]
    keep: Mask = np.ones(size, dtype=np.bool_)
    # The maximum over a few partners is a lower bound, which refutes most pairs cheaply.
    likely = (_excess_of_all(core, v, {w: kept[_places(len(kept))] for w, kept in partners.items()}) <= 0) & _pairs(
        size
    )
    if core.usage is not None:
        likely &= core.usage[v][:, None] <= core.usage[v][None, :]
    if not likely.any():
        return keep
    first, second = np.nonzero(likely)
    if any(len(kept) > NUM_SAMPLED_PARTNERS for kept in partners.values()):
        proven = _excess(core, v, first, second, partners) <= 0
        first, second = first[proven], second[proven]
    for p, q in zip(first.tolist(), second.tolist(), strict=True):
        if keep[p] and keep[q]:
            keep[q] = False
    return keep


@lru_cache(maxsize=4096)
def _pairs(size: int) -> Mask:
    """Return the [n, n] mask of all pairs of different options."""
    return ~np.eye(size, dtype=np.bool_)


@lru_cache(maxsize=4096)
def _all_places(size: int) -> Places:
    return np.arange(size)


@lru_cache(maxsize=4096)
def _places(count: int) -> Places:
    """Return a few evenly spaced places among ``count`` partners."""
    return np.linspace(0, count - 1, num=min(NUM_SAMPLED_PARTNERS, count)).astype(np.int64)


def _excess_of_all(core: Core, v: int, partners: Mapping[int, Places]) -> Array:
    """Return the left side of the dominance rule for every pair (better, worse), [n, n]; NaN where it is undecided."""
    unary = core.costs.unaries[v]
    total: Array = unary[:, None] - unary[None, :]
    with np.errstate(invalid="ignore"):
        for w, kept in partners.items():
            table = core.costs.table(v, w)
            table = table if len(kept) == table.shape[1] else table[:, kept]
            gaps = table[:, None, :] - table[None, :, :]
            # A partner that is forbidden with ``worse`` does not matter, whatever it costs with ``better``.
            barred = np.isinf(table)
            if barred.any():
                gaps[:, barred] = -np.inf
            total += gaps.max(axis=2)
    return total


def _excess(
    core: Core,
    v: int,
    better: Places,
    worse: Places,
    partners: Mapping[int, Places],
) -> Array:
    """Return the left side of the dominance rule for each pair (better[i], worse[i]); NaN where it is undecided."""
    unary = core.costs.unaries[v]
    total: Array = unary[better] - unary[worse]
    with np.errstate(invalid="ignore"):
        for w, kept in partners.items():
            table = core.costs.table(v, w)[:, kept]
            gaps = table[better] - table[worse]
            gaps[np.isinf(table)[worse]] = -np.inf
            total += gaps.max(axis=1)
    return total
