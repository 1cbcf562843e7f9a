"""What binds a plan, and where its time goes, in sentences with the numbers that they rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.block_costs import HIDDEN, RECOMPUTATION, SYNCHRONISATION
from autopar.explain.explanation import WhatIf
from autopar.plan import Plan
from autopar.report.costs import kind_words
from autopar.stage_costs import BUBBLE
from autopar.units import bytes_text, seconds_text

LEAST_GAIN = 0.01
"""Share of the step below which a change is said to buy nothing."""

COMPUTE = ("forward compute", "backward compute")


def verdict_words(plan: Plan, capacity_bytes: float, what_ifs: Sequence[WhatIf]) -> Iterator[str]:
    """What binds, that of which more helps most first; then what does not."""
    now = plan.prediction.step_seconds
    rates = [w for w in what_ifs if w.resource not in ("memory", "batch", "devices") and w.best_seconds is not None]
    ranked = sorted(((gain_of(w, now), w) for w in rates), key=lambda pair: -pair[0])
    helping = [(gain, w) for gain, w in ranked if gain >= LEAST_GAIN]
    memory_gain = max((gain_of(w, now) for w in what_ifs if w.resource == "memory"), default=0.0)
    bubble = plan.prediction.seconds.get(BUBBLE, 0.0)
    lines = [(gain, w.resource, f"with {w.words} {_moved(now, w.best_seconds)}") for gain, w in helping]
    slack = _memory_words(plan, capacity_bytes, what_ifs, now)
    if memory_gain >= LEAST_GAIN:
        lines.append((memory_gain, f"memory of {_fullest(plan)}", slack))
    if bubble:
        idle = f"the busiest position waits {seconds_text(bubble)}, {bubble / now:.0%} of the step"
        # Halving it is what compares with twice of something else.
        lines.append((bubble / 2 / now, "the pipeline's bubble", idle + _amortised(plan, what_ifs, now)))
    for index, (_, name, text) in enumerate(sorted(lines, key=lambda line: -line[0])):
        yield f"then {name}: {text}" if index else f"{name} binds: {text}"
    if memory_gain < LEAST_GAIN:
        yield slack
    idle_rates = [w.resource for gain, w in ranked if gain < LEAST_GAIN]
    if idle_rates:
        yield f"more of these buys less than {LEAST_GAIN:.0%}: {', '.join(idle_rates)}"


def gain_of(what_if: WhatIf, now: float) -> float:
    """Share of the step that a change saves."""
    after = what_if.best_seconds
    return 1.0 - after / now if after is not None and now else 0.0


def _moved(now: float, after: float | None) -> str:
    assert after is not None
    return f"a step takes {seconds_text(after)} instead of {seconds_text(now)} ({after / now - 1:+.0%})"


def _fullest(plan: Plan) -> str:
    positions = [sum(kinds.values()) for kinds in plan.prediction.positions]
    return f"position {positions.index(max(positions))}" if positions else "a rank"


def _memory_words(plan: Plan, capacity: float, what_ifs: Sequence[WhatIf], now: float) -> str:
    peak = plan.prediction.peak_bytes
    used = f"{bytes_text(peak)} of {bytes_text(capacity)} are taken ({peak / capacity:.0%})"
    asked = [w for w in what_ifs if w.resource == "memory" and w.seconds is not None]
    useful = sorted((w for w in asked if gain_of(w, now) >= LEAST_GAIN), key=lambda w: -(w.seconds or 0.0))
    if useful:
        least, most = useful[0], useful[-1]
        more = f", with {most.words} {seconds_text(most.seconds or 0.0)}" if most is not least else ""
        return f"{used}; with {least.words} {_moved(now, least.seconds)}{more}"
    if not asked:
        return f"memory of {_fullest(plan)}: {used}"
    return f"memory does not bind: {used} on {_fullest(plan)}, and {asked[0].words} buys nothing"


def _amortised(plan: Plan, what_ifs: Sequence[WhatIf], now: float) -> str:
    """What a larger batch makes of it."""
    batch = next((w for w in what_ifs if w.resource == "batch" and w.seconds is not None), None)
    if batch is None or batch.seconds is None:
        return ""
    before, after = now / plan.global_batch_size, batch.seconds / batch.rows
    return f"; with {batch.words} a row takes {seconds_text(after)} instead of {seconds_text(before)}"


def time_words(plan: Plan) -> Iterator[str]:
    """How the step splits, and what hides behind what."""
    seconds, total = plan.prediction.seconds, plan.prediction.step_seconds
    compute = sum(seconds.get(kind, 0.0) for kind in COMPUTE)

    def part(value: float) -> str:
        return f"{seconds_text(value)} ({value / total:.0%})" if total else seconds_text(value)

    split = " and ".join(f"{kind.split()[0]} {seconds_text(seconds.get(kind, 0.0))}" for kind in COMPUTE)
    yield f"computing takes {part(compute)} of {seconds_text(total)}: {split}"
    if seconds.get(RECOMPUTATION):
        yield f"recomputing what did not fit takes {part(seconds[RECOMPUTATION])}"
    others = (*COMPUTE, RECOMPUTATION, HIDDEN, BUBBLE, SYNCHRONISATION, "optimizer", "local resharding")
    sent = {kind: value for kind, value in seconds.items() if kind not in others and value > 0}
    if sent:
        kinds = sorted(sent.items(), key=lambda pair: -pair[1])
        names = ", ".join(f"{kind_words(kind)} {seconds_text(value)}" for kind, value in kinds)
        yield f"results sent between ranks, for which the computation waits, take {part(sum(sent.values()))}: {names}"
    synchronised, hidden = seconds.get(SYNCHRONISATION, 0.0), seconds.get(HIDDEN, 0.0)
    if synchronised or hidden:
        behind = f"{seconds_text(hidden)} of {seconds_text(synchronised + hidden)} run behind the backward pass"
        behind = behind if hidden else "nothing of it is hidden behind the backward pass"
        yield f"synchronising gradients and parameters takes {part(synchronised)}; {behind}"
    if seconds.get(BUBBLE):
        yield f"the busiest pipeline position waits {part(seconds[BUBBLE])} for others (fill, drain, messages)"
    if seconds.get("optimizer"):
        yield f"the optimiser takes {part(seconds['optimizer'])}"
