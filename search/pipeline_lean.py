"""Why no pipeline fits: the pipeline whose worst stage lacks the least memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from search.pipeline_problem import PipelineInfeasibleError, StageNeed
from search.problem import Array
from search.stage_chain import Chain
from search.stage_costs import StageCosts


def infeasible(chains: Iterable[Chain]) -> PipelineInfeasibleError | None:
    """The error that says what is missing, or None if some pipeline of the chains fits.

    Steady and step times are not limited, so a pipeline fits if and only if its leanest points do: the least over
    pipelines of the largest excess over a stage's memory is a bottleneck path (``Chain.solve``), and exact.
    """
    least = float("inf")
    needs: tuple[StageNeed, ...] = ()
    for chain in chains:
        bytes_needed = {kind: _least_bytes(cost) for kind, cost in chain.costs.items()}
        # Bottlenecks start from 0, so the memory is added on both sides of the comparison.
        most = max((submesh.memory_bytes for submesh in chain.problem.submeshes), default=0.0)
        tables = {kind: table + most - chain.costs[kind].submesh.memory_bytes for kind, table in bytes_needed.items()}
        value, cuts = chain.solve(tables, bottleneck=True)
        if value - most < least:
            least = value - most
            needs = tuple(
                StageNeed(
                    cut.start,
                    cut.end - 1,
                    chain.costs[cut.kind].submesh.name,
                    float(bytes_needed[cut.kind][cut.f, cut.shape]),
                    chain.costs[cut.kind].submesh.memory_bytes,
                )
                for cut in cuts
            )
    if needs and all(need.needed_bytes <= need.memory_bytes * (1 + 1e-12) for need in needs):
        return None
    return PipelineInfeasibleError(needs)


def _least_bytes(cost: StageCosts) -> Array:
    """[F, S] bytes of the leanest choice of points: per cap on the transient, the least of the rest of each class."""
    result = np.full((len(cost.held), len(cost.counts)), np.inf)
    every = [p for points in cost.points for p in points]
    caps = sorted({p.transient_bytes for p in every})
    for cap in caps:
        # The leanest point under a cap serves every block of its class, so one family per class forbids nothing here.
        total = np.tile(cap + cost.extra_bytes, (len(cost.held), 1))
        for c, points in enumerate(cost.points):
            least = np.full(len(cost.held), np.inf)
            for point in points:
                if point.transient_bytes <= cap:
                    own = cost.held @ np.array([point.micro_bytes, point.deferred_bytes])
                    least = np.minimum(least, point.fixed_bytes + own)
            count = cost.counts[:, c]
            total += np.where(count > 0, np.where(np.isinf(least), 0.0, least)[:, None] * count, 0.0)
            total[np.isinf(least)[:, None] & (count > 0)] = np.inf
        result = np.minimum(result, total)
    return result
