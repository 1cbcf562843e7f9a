"""The data of an explanation."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan import Plan
from cost_models.certainty import Certainty


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One changed condition: more memory, a faster link, more devices, a larger batch.

    resource: the changed resource ("compute", "memory", ...); words: the change. rows: of one step under the change.
    same_plan_seconds: step time of the explained plan, None if it cannot run unchanged. seconds: step time of the best
    plan, None if there is none, for the reason in `problem`. plan: the best plan in words.
    """

    resource: str
    words: str
    rows: int
    same_plan_seconds: float | None
    seconds: float | None = None
    plan: str = ""
    problem: str = ""

    @property
    def best_seconds(self) -> float | None:
        """The step time of the faster plan: the explained one or the best one; None without either."""
        return min((s for s in (self.same_plan_seconds, self.seconds) if s is not None), default=None)


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan with one changed decision. seconds, peak_bytes: None if there is no plan."""

    dimension: str
    value: str
    plan: str
    seconds: float | None
    peak_bytes: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reasons for a plan, in numbers and sentences.

    capacity_bytes: the memory budget of a rank. certainty: the 90 % interval of the peak, and whether it fits.
    searched: the best plan for the same request, which differs from `plan` only if that was given. verdict: the
    bottlenecks. time: the split of the step, and what overlaps. tied: alternatives that predictions cannot tell from
    the plan. not_tried: questions left open at the time limit.
    """

    plan: Plan
    capacity_bytes: float
    certainty: Certainty
    searched: Plan
    verdict: tuple[str, ...]
    time: tuple[str, ...]
    what_ifs: tuple[WhatIf, ...]
    alternatives: tuple[Alternative, ...]
    tied: tuple[str, ...] = ()
    not_tried: tuple[str, ...] = ()
