"""Predicted time and memory by kind, and the predicted costs of other plans."""

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
"""Two times are equal when they differ by less than this share of a step."""
TIED = 0.04
"""Predictions cannot tell two plans apart within this share of a step: runs that differ only in their ZeRO stage
scatter by as much (docs/accuracy.md, "Choosing")."""
NAMED_TIES = 3


@dataclass(frozen=True, slots=True)
class TimeRow:
    """The seconds of one kind in a step. exposed: not overlapped with compute; hidden: overlapped with compute."""

    kind: str
    exposed: float
    hidden: float = 0.0


def time_rows(seconds: Mapping[str, float]) -> list[TimeRow]:
    """Return compute, then communication in descending order, then the rest; kinds without time are left out."""
    first = [k for k in ("forward compute", "backward compute") if k in seconds]
    last = [k for k in ("local resharding", "optimizer") if k in seconds]
    middle = sorted((k for k in seconds if k not in (*first, *last, HIDDEN)), key=lambda k: (-seconds[k], k))
    rows = [
        TimeRow(kind_words(k), seconds[k], seconds.get(HIDDEN, 0.0) if k == SYNCHRONISATION else 0.0)
        for k in (*first, *middle, *last)
    ]
    return [row for row in rows if row.exposed or row.hidden]


def kind_words(kind: str) -> str:
    """Return a kind of seconds in words: `all_gather tp` -> `all_gather over tp`."""
    name, _, axis = kind.rpartition(" ")
    collectives = ("all_gather", "all_reduce", "reduce_scatter", *dispatches())
    return f"{name} over {axis}" if name in collectives else kind


@dataclass(frozen=True, slots=True)
class RunnerUp:
    """A plan that lost, its cost, and the reason.

    seconds: of its step, a lower bound if is_bound, None if the plan does not fit. peak_bytes: None where only a
    bound is known. is_tied: whether predictions cannot tell it from the chosen plan.
    """

    plan: str
    seconds: float | None
    why: str
    peak_bytes: float | None = None
    is_bound: bool = False
    is_tied: bool = False

    @property
    def seconds_text(self) -> str:
        """The seconds in words: `1.2 s`, `at least 1.2 s`, `-`."""
        if self.seconds is None:
            return "-"
        return f"{'at least ' if self.is_bound else ''}{seconds_text(self.seconds)}"


def runner_ups(result: SearchResult) -> list[RunnerUp]:
    """Return the slower plans, then the meshes with a lower bound above the best plan, then the plans that do not
    fit."""
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
        why = "its lower bound is slower"
        rows.append(RunnerUp(plan=layout, seconds=bound, why=why, is_bound=True))
    lost = "does not fit the memory of one rank"
    return rows + [RunnerUp(plan=text, seconds=None, why=lost) for text in result.infeasible]


def is_tied(first: float, second: float) -> bool:
    """Return whether two step times are too close for predictions to rank them."""
    return max(first, second) <= min(first, second) * (1 + TIED)


def tie_words(chosen: str, seconds: float, others: Sequence[RunnerUp]) -> str:
    """Return a sentence on plans that predictions cannot rank and on the choice among them, or ""."""
    tied = [(row.plan, row.seconds / seconds - 1) for row in others if row.is_tied and row.seconds is not None]
    bounds = [row.seconds for row in others if row.is_bound and row.seconds is not None]
    unknown = sum(is_tied(bound, seconds) for bound in bounds)
    unsolved = f"{unknown} unsolved plan{'' if unknown == 1 else 's'} may be as close" if unknown else ""
    if not tied:
        return unsolved and f"Predictions cannot rank plans within {TIED:.0%} of each other: {unsolved}"
    named = [f"{plan} ({more:+.1%})" for plan, more in tied[:NAMED_TIES]]
    named += [f"{len(tied) - NAMED_TIES} more"] if len(tied) > NAMED_TIES else []
    is_fastest = all(more > -10 * ROUND_OFF for _, more in tied)  # plans are ordered by nine digits
    reason = "predicted fastest" if is_fastest else "least device work while devices wait for their hosts"
    return (
        f"Predictions cannot rank these {len(tied) + 1} plans, within {TIED:.0%} of each other: {chosen} (chosen: "
        f"{reason}), {', '.join(named)}" + (f"; {unsolved}" if unsolved else "")
    )


def why_slower(plan: Plan, best: Plan) -> str:
    """Return the kinds of time that are larger than the best plan's, largest difference first."""
    own_seconds, best_seconds = plan.prediction.seconds, best.prediction.seconds
    more = {k: own_seconds[k] - best_seconds.get(k, 0.0) for k in own_seconds if k != HIDDEN}
    least = ROUND_OFF * best.prediction.step_seconds
    ranked = sorted(((d, k) for k, d in more.items() if d > least), key=lambda pair: (-pair[0], pair[1]))[:REASONS]
    return ", ".join(f"+{seconds_text(d)} {kind_words(k)}" for d, k in ranked) or "equal; the first by name is chosen"
