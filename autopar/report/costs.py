"""Predicted time and memory by kind, and what the other plans would have cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.costs.layer_costs import HIDDEN, SYNCHRONISATION
from autopar.plan import Plan
from autopar.planning.planner import SearchResult
from autopar.report.plan_words import plan_words
from autopar.units import seconds_text
from cost_models.dispatch import dispatches

REASONS = 3
ROUND_OFF = 1e-9
"""Share of a step below which two times are equal."""


TIED = 0.04
"""Share of a step by which predictions do not tell plans apart: by as much runs that differ in their ZeRO stage only
scatter (docs/accuracy.md, "Choosing")."""
NAMED_TIES = 3


@dataclass(frozen=True, slots=True)
class TimeRow:
    """exposed, hidden: seconds per step in which nothing else runs, and behind compute."""

    kind: str
    exposed: float
    hidden: float = 0.0


def time_rows(seconds: Mapping[str, float]) -> list[TimeRow]:
    """Compute, then communication from most to least, then the rest; kinds without time are left out."""
    first = [k for k in ("forward compute", "backward compute") if k in seconds]
    last = [k for k in ("local resharding", "optimizer") if k in seconds]
    middle = sorted((k for k in seconds if k not in (*first, *last, HIDDEN)), key=lambda k: (-seconds[k], k))
    rows = [
        TimeRow(kind_words(k), seconds[k], seconds.get(HIDDEN, 0.0) if k == SYNCHRONISATION else 0.0)
        for k in (*first, *middle, *last)
    ]
    return [row for row in rows if row.exposed or row.hidden]


def kind_words(kind: str) -> str:
    """A kind of seconds in words: `all_gather tp` -> `all_gather over tp`."""
    name, _, axis = kind.rpartition(" ")
    collectives = ("all_gather", "all_reduce", "reduce_scatter", *dispatches())
    return f"{name} over {axis}" if name in collectives else kind


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that lost: what it is, what it would cost, and why it lost.

    seconds: of its step; is_bound: it takes at least so many; None for what does not fit. peak_bytes: None where only
    a bound is known. is_tied: whether predictions do not tell it from the chosen plan.
    """

    plan: str
    seconds: float | None
    why: str
    peak_bytes: float | None = None
    is_bound: bool = False
    is_tied: bool = False

    @property
    def seconds_text(self) -> str:
        """Its seconds in words: `1.2 s`, `> 1.2 s`, `-`."""
        if self.seconds is None:
            return "-"
        return f"{'> ' if self.is_bound else ''}{seconds_text(self.seconds)}"


def runner_ups(result: SearchResult) -> list[RunnerUp]:
    """Slower plans, meshes whose lower bound was already too slow, and what did not fit."""
    best = result.best.plan
    rows = [
        RunnerUp(
            plan=plan_words(c.plan),
            seconds=c.plan.prediction.step_seconds,
            why=why_slower(c.plan, best),
            peak_bytes=c.plan.prediction.peak_bytes,
            is_tied=is_tied(c.plan.prediction.step_seconds, best.prediction.step_seconds),
        )
        for c in result.candidates[1:]
    ]
    for bound, layout in result.skipped:
        why = "even with memory to spare it would be slower"
        rows.append(RunnerUp(plan=layout, seconds=bound, why=why, is_bound=True))
    lost = "does not fit the memory of one rank"
    return rows + [RunnerUp(plan=text, seconds=None, why=lost) for text in result.infeasible]


def is_tied(one: float, other: float) -> bool:
    """Whether predictions do not tell two step times apart."""
    return max(one, other) <= min(one, other) * (1 + TIED)


def tie_words(chosen: str, seconds: float, others: Sequence[RunnerUp]) -> str:
    """The plans that predictions do not tell apart, and which was taken; "" where no other can be one."""
    tied = [(row.plan, row.seconds / seconds - 1) for row in others if row.is_tied and row.seconds is not None]
    bounds = [row.seconds for row in others if row.is_bound and row.seconds is not None]
    unknown = sum(is_tied(bound, seconds) for bound in bounds)
    may = f"{unknown} not solved may be" if unknown else ""
    if not tied:
        return may and f"Of the plans {may} within {TIED:.0%}, which predictions do not tell apart"
    named = [f"{plan} ({more:+.1%})" for plan, more in tied[:NAMED_TIES]]
    named += [f"{len(tied) - NAMED_TIES} more"] if len(tied) > NAMED_TIES else []
    is_fastest = all(more > -10 * ROUND_OFF for _, more in tied)  # plans are ordered by nine digits
    reason = "is predicted fastest" if is_fastest else "works its devices less while they wait for their hosts"
    return (
        f"{len(tied) + 1} plans are within {TIED:.0%}, which predictions do not tell apart: {chosen} (chosen, as it "
        f"{reason}), {', '.join(named)}" + (f"; {may}" if may else "")
    )


def why_slower(plan: Plan, best: Plan) -> str:
    """The kinds of time that are larger than the best plan's, largest difference first."""
    mine, its = plan.prediction.seconds, best.prediction.seconds
    more = {k: mine.get(k, 0.0) - its.get(k, 0.0) for k in mine if k != HIDDEN}
    least = ROUND_OFF * best.prediction.step_seconds
    ranked = sorted(((d, k) for k, d in more.items() if d > least), key=lambda pair: (-pair[0], pair[1]))[:REASONS]
    return ", ".join(f"+{seconds_text(d)} {kind_words(k)}" for d, k in ranked) or "equal; the first by name was taken"
