"""Explain why no pipeline fits: find the pipeline whose worst stage lacks the least memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from search.pipeline_problem import PipelineInfeasibleError, StageNeed
from search.problem import Array
from search.stage_chain import Chain
from search.stage_costs import StageCosts


def infeasible(chains: Iterable[Chain]) -> PipelineInfeasibleError:
    """Return the error that says how much memory is missing where no pipeline of the chains fits.

    Steady and step times are not limited, so a pipeline fits if and only if its leanest points do. The least over
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
                    first=cut.start,
                    last=cut.end - 1,
                    submesh=chain.costs[cut.kind].submesh.name,
                    needed_bytes=float(bytes_needed[cut.kind][cut.f, cut.shape]),
                    memory_bytes=chain.costs[cut.kind].submesh.memory_bytes,
                )
                for cut in cuts
            )
    return PipelineInfeasibleError(needs)


def _least_bytes(cost: StageCosts) -> Array:
    """Return [F, S] bytes of the leanest points: per cap on the transient, the least of the rest of each class."""
    result = np.full((len(cost.micro_batches), len(cost.counts)), np.inf)
    transients = [np.array([p.transient_bytes for p in points]) for points in cost.points]
    bytes_of = [np.array([[p.fixed_bytes, p.micro_bytes, p.deferred_bytes] for p in points]) for points in cost.points]
    weights = np.column_stack([np.ones(len(cost.micro_batches)), cost.micro_batches])
    before = None
    for cap in np.unique(np.concatenate(transients)):
        allowed = [sizes <= cap for sizes in transients]
        can = np.array([mask.any() for mask in allowed])
        least = np.zeros((len(cost.micro_batches), len(cost.points)))
        for c in np.flatnonzero(can):
            least[:, c] = (weights @ bytes_of[c][allowed[c]].T).min(axis=1)
        if before is not None and np.array_equal(before[0], can) and np.array_equal(before[1], least):
            continue
        before = can, least
        total = cap + least @ cost.counts.T + cost.extra_bytes
        total[:, (cost.counts[:, ~can] > 0).any(axis=1)] = np.inf
        np.minimum(result, total, out=result)
    return result
