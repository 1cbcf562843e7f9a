"""What an explanation consists of."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan import Plan
from cost_models.certainty import Certainty


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One changed condition: more memory, a faster link, more devices, a larger batch.

    resource: what is changed ("compute", "memory", ...); words: how. rows: of one step under the change.
    same_plan_seconds: of a step of the explained plan, None where it cannot run as it is. seconds: of a step of the
    best plan, None where none was found, for the reason in `problem`. plan: that plan in words.
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
        """Step seconds of the faster of both plans: the same one kept, or the one planned anew; None without either."""
        return min((s for s in (self.same_plan_seconds, self.seconds) if s is not None), default=None)


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan with one decision made differently. seconds, peak_bytes: None where there is none."""

    dimension: str
    value: str
    plan: str
    seconds: float | None
    peak_bytes: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a plan was chosen, in numbers and sentences.

    capacity_bytes: what a rank may use. certainty: how sure the peak is, and so whether it fits. searched: the best
    plan that the search finds for the same request; another one where the explained plan was given. verdict: what
    binds, in sentences. time: where the time goes and what hides what, in sentences. tied: alternatives whose times
    predictions do not tell from the plan's, in words. not_tried: questions for which there was no time.
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
