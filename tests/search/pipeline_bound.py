"""A lower bound of a pipeline's seconds by relaxation, near the optimum of problems too large to enumerate."""

from __future__ import annotations

import numpy as np

from search.inter_op import PipelineProblem, _ceilings, _numbers_of_stages
from search.stage_chain import Chain
from search.stage_costs import StageCosts
from search.stage_lp import relax

MAX_ROUNDS = 20


def lower_bound(problem: PipelineProblem) -> float:
    """Seconds that no pipeline of the problem beats; inf when it is proven that none fits.

    The stages' knapsacks are relaxed to fractions (any mix of points, mixed transients at their least), and the three
    parts of the objective are bounded apart: the least bottleneck, the least fill and the least largest step time, each
    by the dynamic program over the cuts.
    """
    least = float("inf")
    for p in _numbers_of_stages(problem):
        chain = Chain(problem, p)
        steady, step = _tightened(chain, 1), _tightened(chain, 2)
        if np.isfinite(steady) and np.isfinite(step):
            least = min(least, _tightened(chain, 0) + (problem.num_micro_batches - 1) * steady + step)
    return least


def _tightened(chain: Chain, row: int) -> float:
    """A lower bound of the fill (row 0) or the largest steady or step time, near that of the stages' relaxations."""
    limits = _ceilings(chain)
    value = -float("inf")
    for _ in range(MAX_ROUNDS):
        if row:
            tables = {kind: cost.least_time(row) for kind, cost in chain.costs.items()}
        else:
            tables = {kind: cost.least_fill(*limits)[0] for kind, cost in chain.costs.items()}
        new, cuts = chain.solve(tables, bottleneck=row > 0)
        if not cuts or new <= value + 1e-6 * abs(value):
            return max(new, value)
        value = new
        for cut in cuts:
            _tighten(chain.costs[cut.kind], cut.f, cut.shape, row, limits)
    return value


def _tighten(cost: StageCosts, f: int, shape: int, row: int, limits: tuple[float, float]) -> None:
    """Add the multipliers of a stage's relaxation that bound its fill (row 0), steady or step time (1, 2).

    Transients at their least are relaxed too.
    """
    present = tuple(int(c) for c in np.flatnonzero(cost.counts[shape]))
    least = float(cost.transient[shape])
    menu = cost._menu(f, present, float("inf"))
    rows = menu.figures[1:4]
    room = cost.submesh.largest_allowed - float(cost.extra_bytes[shape]) - least
    most = np.array([room, limits[0] - cost.busy[shape], limits[1] - cost.extra_step[shape]])
    use = np.array([True, row == 0, row == 0]) & (most >= 0)
    multipliers = np.zeros(4)
    figures = menu.figures[(0, 2, 3)[row]]
    sizes = cost.counts[shape][list(present)]
    multipliers[1:][use], feasible = relax(figures, rows[use], most[use], menu.starts, sizes)
    if feasible:
        multipliers[row if row == 0 else row + 1] = 1.0
    cost._offer(f, shape, multipliers, *limits)
