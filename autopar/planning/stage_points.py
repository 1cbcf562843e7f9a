"""A unit's costs as points of the inter-op problem, and the problem's solution as a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from autopar.costs.layer_costs import LayerCost, Mode, chosen_seconds, defers_weights
from autopar.ir.plan_data import RECOMPUTE_MODES, Pipeline, StagePlan
from cost_models.schedule import SCHEDULES
from search.pipeline_problem import InFlight, PipelineSolution, Point

CLOSED_FORMS = {name: schedule.closed_form for name, schedule in SCHEDULES.items() if schedule.closed_form is not None}
"""Closed forms by schedule; cuts minimize these. Schedules without one refine the best cut (chunked_schedules.py)."""

SEARCHED_SCHEDULES = tuple(name for name in CLOSED_FORMS if SCHEDULES[name].is_tried)
"""The schedules to try if none is pinned: their closed forms are minimized."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Micro-batches at the peak of rank i of p: in flight, and with deferred weight gradients."""

    in_flight: InFlight
    num_deferred: InFlight | None = None

    def least(self, ranks: Iterable[tuple[int, int]], mode: Mode) -> float:
        """Return the bytes of a layer on the rank of `ranks` (p, i) where it keeps least."""
        counts = {(self.in_flight(p, i), self.num_deferred(p, i) if self.num_deferred else 0.0) for p, i in ranks}
        return min(flying * mode.kept_bytes + waiting * mode.live.deferred for flying, waiting in counts)


def holding_of(schedule: str, count: int) -> Holding:
    """Return the micro-batches in flight under a schedule with a closed form, of `count` micro-batches; never more
    than `costs/peak.py` counts."""
    form = CLOSED_FORMS[schedule]
    num_deferred = partial(form.num_deferred, count) if form.num_deferred is not None else None
    return Holding(partial(form.in_flight, count), num_deferred)


def stretch_of(costs: Mapping[str, LayerCost], counts: Mapping[str, int], schedule: str, count: int) -> float:
    """Return the factor on the bottleneck's time per micro-batch under zero bubble. counts: of every unit; count: of
    micro-batches.

    With p equal stages of f, i and w seconds its schedule takes m (f + i + w) + (p - 1) (f + i - w). That is the sum
    of the stages' f + i - w, plus (m - 1) (f + i + w), plus 2 w: the last term is charged to the second, with the
    model's share of w. With one micro-batch there is no second term, and the first is f + i.
    """
    if not defers_weights(schedule) or count == 1:
        return 1.0
    costs_of_units = [(costs[name], number) for name, number in counts.items()]
    busy = sum((c.chosen_seconds + c.overlapped_seconds) * number for c, number in costs_of_units)
    weight = sum(c.weight_seconds * number for c, number in costs_of_units)
    return 1.0 + 2.0 * weight / busy / (count - 1) if busy else 1.0


def hidden_weights(count: int) -> int:
    """Return how many times a stage's weight gradients are subtracted in the fill and drain of zero bubble, relative
    to its busy time per micro-batch. count: of micro-batches."""
    return 2 if count > 1 else 1


def modes_of(cost: LayerCost, pinned: str | None = None, has_host: bool = True) -> Mapping[str, Mode]:
    """Return the recompute modes of a unit; calls outside layers keep everything. has_host: whether host memory is
    separate from the device's; else nothing is moved there unless pinned."""
    if not cost.modes:
        return {"none": Mode(0.0, cost.live.kept, cost.transient_bytes, cost.live)}
    if pinned in cost.modes:
        return {pinned: cost.modes[pinned]}
    return {name: mode for name, mode in cost.modes.items() if has_host or name != "offload"}


def point(
    cost: LayerCost, label: str, mode: Mode, schedule: str, stretch: float = 1.0, hidden: int = hidden_weights(2)
) -> Point:
    """Return one mode of a unit under a schedule; zero bubble fills its drain with weight gradients (f + i - w).
    hidden: see `hidden_weights`."""
    busy = cost.chosen_seconds + mode.seconds
    defers = defers_weights(schedule)
    busy += cost.overlapped_seconds if defers else 0.0
    fill = busy - hidden * cost.weight_seconds if defers else busy
    return Point(
        label=label,
        fill_seconds=fill,
        steady_seconds=busy * stretch,
        step_seconds=chosen_seconds(cost.step),
        fixed_bytes=cost.fixed_bytes,
        micro_bytes=mode.kept_bytes,
        transient_bytes=mode.transient_bytes,
        deferred_bytes=mode.live.deferred if defers else 0.0,
    )


def pipeline_of(solution: PipelineSolution, num_ranks: int, schedule: str, offload: str) -> Pipeline:
    """Return stages with the layers that recompute most first (their memory does not depend on the order)."""
    stages = []
    for choice in solution.stages:
        modes = {}
        for unit, counts in choice.counts:
            ordered = sorted(counts, key=lambda pair: -RECOMPUTE_MODES.index(pair[0]))
            if any(mode != "none" for mode, _ in ordered):
                modes[unit] = tuple(ordered)
        stages.append(StagePlan(choice.first, choice.last + 1, modes))
    if num_ranks == 1 and not offload and not any(stage.recompute for stage in stages):
        return Pipeline()
    return Pipeline(num_ranks, schedule if num_ranks > 1 else "", tuple(stages), offload)
