"""A block's costs as points of the inter-op problem, and the problem's solution as a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.costs.block_costs import BlockCost, Mode
from autopar.plan import RECOMPUTE_MODES, Pipeline, StagePlan
from search.pipeline_problem import (
    InFlight,
    PipelineSolution,
    Point,
    all_forward_all_backward,
    one_forward_one_backward,
)

HOLDING: Mapping[str, Callable[[int], InFlight]] = {
    "gpipe": all_forward_all_backward,
    "1f1b": one_forward_one_backward,
    "zero-bubble": lambda count: lambda p, i: min(count, p),
}
"""Micro-batches in flight by schedule; the drain of zero bubble's later positions waits with weight gradients."""


def stretched(weight: float, busy: float, num_micro_batches: int) -> float:
    """1 + 2 w / (f + i + w) / (m - 1); 1 for one micro-batch."""
    return 1.0 + 2.0 * weight / busy / (num_micro_batches - 1) if num_micro_batches > 1 else 1.0


def stretch_of(costs: Mapping[str, BlockCost], counts: Mapping[str, int], schedule: str, count: int) -> float:
    """By what the bottleneck's time per micro-batch is multiplied under zero bubble. counts: of every block; count: of
    micro-batches.

    With p equal stages of f, i and w seconds its schedule takes m (f + i + w) + (p - 1) (f + i - w), that is the
    sum of the stages' f + i - w, plus (m - 1) (f + i + w), plus 2 w: the last term is charged to the second, with
    the model's own share of w.
    """
    if schedule != "zero-bubble" or count == 1:
        return 1.0
    weight = sum(costs[name].weight_seconds * number for name, number in counts.items())
    busy = sum((costs[n].forward_seconds + costs[n].backward_seconds) * c for n, c in counts.items())
    return stretched(weight, busy, count)


def modes_of(cost: BlockCost, pinned: str | None = None, has_host: bool = True) -> Mapping[str, Mode]:
    """The recompute modes of a block; calls outside layers keep everything. has_host: whether host memory is another
    than the device's; else nothing is moved there unless that is pinned."""
    if not cost.modes:
        return {"none": Mode(0.0, cost.live.kept, cost.transient_bytes)}
    if pinned in cost.modes:
        return {pinned: cost.modes[pinned]}
    return {name: mode for name, mode in cost.modes.items() if has_host or name != "offload"}


def point(cost: BlockCost, label: str, mode: Mode, schedule: str, stretch: float = 1.0) -> Point:
    """One mode of a block under a schedule; zero bubble fills its drain with weight gradients (f + i - w)."""
    forward, backward = cost.forward_seconds, cost.backward_seconds + mode.seconds
    busy = forward + backward
    fill = busy - 2 * cost.weight_seconds if schedule == "zero-bubble" else busy
    return Point(
        label,
        forward,
        backward,
        fill,
        busy * stretch,
        cost.step_seconds,
        cost.fixed_bytes,
        mode.kept_bytes,
        mode.transient_bytes,
    )


def pipeline_of(solution: PipelineSolution, num_positions: int, schedule: str, offload: str) -> Pipeline:
    """Stages with the layers that recompute most first (their memory does not depend on the order)."""
    stages = []
    for choice in solution.stages:
        modes = {}
        for block, counts in choice.counts:
            ordered = sorted(counts, key=lambda pair: -RECOMPUTE_MODES.index(pair[0]))
            if any(mode != "none" for mode, _ in ordered):
                modes[block] = tuple(ordered)
        stages.append(StagePlan(choice.first, choice.last + 1, modes))
    if num_positions == 1 and not any(stage.recompute for stage in stages):
        return Pipeline(offload=offload)
    return Pipeline(num_positions, schedule if num_positions > 1 else "", tuple(stages), offload)
