"""The search over pipelines of unlike positions: terms in the order of their bounds, until none can win.

Outlines, which leave open what bears on parameters only, are bounded first, and their variants when their turn comes.
Before its problem is solved, the bound of terms is tightened by the recomputation that any plan has.
"""

from __future__ import annotations

import heapq
import itertools
import math

from autopar.planning.request import Request
from autopar.planning.unequal.bounds import bound, outline_bound, recompute_bound
from autopar.planning.unequal.decisions import Decisions
from autopar.planning.unequal.problem import FoundUnequal, solve
from autopar.planning.unequal.seat_costs import SeatCosts
from autopar.planning.unequal.terms import outlines, variants
from search.inter_op import NothingBelowCutoffError
from search.pipeline_problem import PipelineInfeasibleError

FEW_DEVICES = 16
GAP = 0.03
"""Share of the step by which a better pipeline may be missed where there are more than FEW_DEVICES."""

MOST_SOLVED = 300
"""Problems, most promising first, of more than FEW_DEVICES that are solved once a pipeline is known."""


class UnequalSearch:
    """The search for one request. costs: where those of another one are to be used."""

    def __init__(self, request: Request, costs: SeatCosts | None = None) -> None:
        self.request = request
        self.costs = costs or SeatCosts(Decisions(request))

    def run(self, cutoff: float = math.inf) -> FoundUnequal | None:
        """The best pipeline that takes less than `cutoff` seconds; on many devices the best to GAP, or that of the
        MOST_SOLVED most promising problems."""
        is_large = self.request.whole.num_devices > FEW_DEVICES
        share, most = (1.0 - GAP, MOST_SOLVED) if is_large else (1.0, math.inf)
        num_solved = 0
        numbers = itertools.count()
        tried = outlines(self.costs.decisions, len(self.costs.blocks))
        queue = [(outline_bound(self.costs, outline), next(numbers), outline, True) for outline in tried]
        heapq.heapify(queue)
        best, found = cutoff, None
        while queue and queue[0][0] < best * share:
            _, _, terms, is_outline = heapq.heappop(queue)
            if is_outline:
                for each in variants(self.request, terms):
                    heapq.heappush(queue, (bound(self.costs, each), next(numbers), each, False))
                continue
            tightened = bound(self.costs, terms, recompute_bound(self.costs, terms))
            if tightened >= best * share:
                continue
            num_solved += 1
            if found is not None and num_solved > most:
                break
            try:
                solved = solve(self.costs, terms, best * share)
            except (NothingBelowCutoffError, PipelineInfeasibleError):
                continue
            best, found = solved.objective, solved
        return found

    def asked(self, request: Request) -> UnequalSearch:
        """A search for other constraints or another batch, with the same decisions and prices."""
        return UnequalSearch(request, self.costs.asked(request))

    def priced_for(self, request: Request) -> UnequalSearch:
        """A search with the same decisions on other devices or links."""
        return UnequalSearch(request, SeatCosts(self.costs.decisions.priced_for(request)))
