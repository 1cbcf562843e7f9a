"""The bottlenecks of a plan and the split of its step time, in sentences with their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.costs.layer_costs import FIRST_PASS, HIDDEN, HOST, RECOMPUTATION, SYNCHRONISATION
from autopar.costs.stage_costs import BUBBLE
from autopar.explain.explanation import WhatIf
from autopar.plan import Plan
from autopar.report.costs import kind_words
from autopar.units import bytes_text, seconds_text

LEAST_GAIN = 0.01
"""Share of the step below which a change buys nothing."""

TIE = 1e-6
"""Share of the step below which two step times are equal."""

COMPUTE = ("forward compute", "backward compute")


def verdict_words(plan: Plan, searched: Plan, capacity_bytes: float, what_ifs: Sequence[WhatIf]) -> Iterator[str]:
    """Yield the bottlenecks, largest gain first, then the resources that are no bottleneck.

    searched: the best plan for the unchanged request. If it is faster than the explained plan, resources are judged by
    the explained plan as it is. Changes that need a new plan (more memory, a larger batch) are judged by the best
    plans.
    """
    now, best = plan.prediction.step_seconds, searched.prediction.step_seconds
    is_best = best >= now * (1 - TIE)
    if not is_best:
        yield f"the plan itself: the best plan takes {seconds_text(best)}, not {seconds_text(now)}"
    before = now if is_best else best
    gains = []
    for what_if in what_ifs:
        after = what_if.best_seconds if is_best else what_if.same_plan_seconds
        if what_if.resource not in ("memory", "batch", "devices") and after is not None:
            gains.append((1 - after / now, what_if.resource, f"with {what_if.words} {_moved(now, after)}"))
    lines = [line for line in gains if line[0] >= LEAST_GAIN]
    memory_gain = max((_gain(w, before) for w in what_ifs if w.resource == "memory"), default=0.0)
    slack = _memory_words(plan, capacity_bytes, what_ifs, before)
    if memory_gain >= LEAST_GAIN:
        lines.append((memory_gain, f"memory of {_fullest(plan)}", slack))
    bubble = plan.prediction.seconds.get(BUBBLE, 0.0)
    if bubble:
        idle = f"the busiest pipeline rank waits {seconds_text(bubble)}, {bubble / now:.0%} of the step"
        # Half the bubble compares with twice another resource.
        more = _amortised(plan, what_ifs, before)
        lines.append((bubble / 2 / now, "the pipeline's bubble", idle + more))
    for index, (_, name, text) in enumerate(sorted(lines, key=lambda line: -line[0])):
        yield f"then {name}: {text}" if index else f"{name} binds: {text}"
    if memory_gain < LEAST_GAIN:
        yield slack
    idle_rates = [name for gain, name, _ in gains if gain < LEAST_GAIN]
    if idle_rates:
        yield f"more of these gains less than {LEAST_GAIN:.0%}: {', '.join(idle_rates)}"


def _gain(what_if: WhatIf, before: float) -> float:
    """Return the share of the best plan's step that a change saves."""
    return 1.0 - what_if.seconds / before if what_if.seconds is not None else 0.0


def _moved(now: float, after: float) -> str:
    return f"a step takes {seconds_text(after)} instead of {seconds_text(now)} ({after / now - 1:+.0%})"


def _fullest(plan: Plan) -> str:
    pipeline_ranks = [sum(kinds.values()) for kinds in plan.prediction.pipeline_ranks]
    return f"pipeline rank {pipeline_ranks.index(max(pipeline_ranks))}" if pipeline_ranks else "a rank"


def _memory_words(plan: Plan, capacity: float, what_ifs: Sequence[WhatIf], before: float) -> str:
    peak = plan.prediction.peak_bytes
    usage = f"{bytes_text(peak)} of {bytes_text(capacity)} in use ({peak / capacity:.0%})"
    memory_changes = [w for w in what_ifs if w.resource == "memory" and w.seconds is not None]
    useful = sorted(
        (w.seconds, w.words) for w in memory_changes if w.seconds is not None and _gain(w, before) >= LEAST_GAIN
    )
    if useful:
        (least, words), (most, most_words) = useful[-1], useful[0]
        more = f", with {most_words} {seconds_text(most)}" if most < least else ""
        return f"{usage}; with {words} {_moved(before, least)}{more}"
    if not memory_changes:
        return f"memory of {_fullest(plan)}: {usage}"
    return f"memory does not bind: {usage} on {_fullest(plan)}, and {memory_changes[0].words} gains nothing"


def _amortised(plan: Plan, what_ifs: Sequence[WhatIf], step_seconds: float) -> str:
    """Return how a larger batch changes the seconds per row, in words, or "" if no larger batch was tried."""
    batch = next((w for w in what_ifs if w.resource == "batch" and w.seconds is not None), None)
    if batch is None or batch.seconds is None:
        return ""
    before, after = step_seconds / plan.global_batch_size, batch.seconds / batch.rows
    return f"; with {batch.words} a row takes {seconds_text(after)} instead of {seconds_text(before)}"


def time_words(plan: Plan) -> Iterator[str]:
    """Yield sentences on the split of the step and on overlap."""
    seconds, total = plan.prediction.seconds, plan.prediction.step_seconds
    compute = sum(seconds.get(kind, 0.0) for kind in COMPUTE)

    def part(value: float) -> str:
        return f"{seconds_text(value)} ({value / total:.0%})" if total else seconds_text(value)

    split = " and ".join(f"{kind.split()[0]} {seconds_text(seconds.get(kind, 0.0))}" for kind in COMPUTE)
    yield f"compute takes {part(compute)} of {seconds_text(total)}: {split}"
    if seconds.get(RECOMPUTATION):
        yield f"recomputation takes {part(seconds[RECOMPUTATION])}"
    if seconds.get(FIRST_PASS):
        yield f"a first pass of all forwards, for sums over the batch, takes {part(seconds[FIRST_PASS])}"
    if seconds.get(HOST):
        yield f"the device waits {part(seconds[HOST])} for its host to issue calls"
    waits = (HIDDEN, HOST, BUBBLE, SYNCHRONISATION)
    others = (*COMPUTE, RECOMPUTATION, FIRST_PASS, *waits, "optimizer", "local resharding")
    exposed = {kind: value for kind, value in seconds.items() if kind not in others and value > 0}
    if exposed:
        kinds = sorted(exposed.items(), key=lambda pair: -pair[1])
        names = ", ".join(f"{kind_words(kind)} {seconds_text(value)}" for kind, value in kinds)
        yield f"exposed communication and gradient accumulation take {part(sum(exposed.values()))}: {names}"
    synchronized, hidden = seconds.get(SYNCHRONISATION, 0.0), seconds.get(HIDDEN, 0.0)
    if synchronized or hidden:
        overlapped = f"{seconds_text(hidden)} of {seconds_text(synchronized + hidden)} overlap with the backward pass"
        overlapped = overlapped if hidden else "nothing overlaps with the backward pass"
        yield f"synchronizing gradients and parameters takes {part(synchronized)}; {overlapped}"
    if seconds.get(BUBBLE):
        yield f"the busiest pipeline rank waits {part(seconds[BUBBLE])} for others (fill, drain, messages)"
    if seconds.get("optimizer"):
        yield f"the optimizer takes {part(seconds['optimizer'])}"
