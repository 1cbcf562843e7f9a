"""The explanation of a plan: what-ifs and alternatives, each planned again on the traces and solved layers of the
first."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.explain.conditions import Condition, conditions
from autopar.explain.decisions import Decision, is_made, other_decisions, pin_text
from autopar.explain.explanation import Alternative, Explanation, WhatIf
from autopar.explain.verdict import TIE, time_words, verdict_words
from autopar.ir.chain import chain
from autopar.options.assignment import Candidate
from autopar.plan import Plan
from autopar.planning.config_costs import Solved
from autopar.planning.pipelines import EqualSearch, UnequalSearch
from autopar.planning.planner import Planned, is_only_polished, search_plans
from autopar.planning.predict import predicted
from autopar.planning.request import Request
from autopar.program import GeneratedProgram
from autopar.report.costs import why_slower
from autopar.report.plan_words import full_words
from autopar.units import bytes_text, seconds_text

POLISH_ONLY = 0
"""Devices up to which one stage is searched exactly on every mesh: here on the best one only, which takes a tenth of
the time."""


def explain(
    source: GeneratedProgram | Planned | Request, *, seconds: float = 60.0, tell: Callable[[str], None] = lambda _: None
) -> Explanation:
    """Why the plan of a compiled program, or the one that was or would be chosen for a request.

    seconds: after which no further question is asked; what is left is named in `not_tried`. A question that has begun
    is answered. tell: gets each question, with its number, when it begins.
    Raises PlanError on a program without its request, and AutoparError where nothing can be planned.
    """
    if isinstance(source, GeneratedProgram) and source.request is None:
        raise PlanError("the program came from another process, without what it was planned for")
    request = source if isinstance(source, Request) else source.request
    assert request is not None
    limit = time.monotonic() + seconds
    result = None if isinstance(source, Request) else source.result
    if result is not None and result.solved is not None and is_only_polished(request):
        solved_layers, searched = result.solved, result.best
    else:
        before = result.solved if result is not None else None
        solved_layers = before or (EqualSearch if request.mixed is None else UnequalSearch)(request).solved
        # What was solved for the plan is known; only the search of many meshes for one stage is left out.
        searched = search_plans(request, solved_layers, POLISH_ONLY).best
    explained = searched if isinstance(source, Request) else source.best
    questions = _Questions(request=request, solved_layers=solved_layers, searched=searched, limit=limit, tell=tell)
    return questions.answer(explained)


@dataclass
class _Questions:
    """What is asked of one request. searched: its best plan; solved_layers: solved for it, and shared by all
    questions."""

    request: Request
    solved_layers: Solved
    searched: Candidate
    limit: float
    tell: Callable[[str], None]
    not_tried: list[str] = field(default_factory=list)

    def answer(self, best: Candidate) -> Explanation:
        plan = best.plan
        num_units = len(chain(best.graph))
        asked, changed = list(other_decisions(self.request, plan, num_units)), list(conditions(self.request))
        count = len(asked) + len(changed)
        # First what is solved already: other decisions have the prices of the plan, other conditions few of them.
        alternatives: list[Alternative] = []
        what_ifs: list[WhatIf] = []
        for number, decision in enumerate(asked, 1):
            self.tell(f"question {number} of {count}, {decision.dimension} {decision.value}")
            alternatives += filter(None, [self.alternative(plan, decision)])
        for number, condition in enumerate(changed, 1 + len(asked)):
            self.tell(f"question {number} of {count}, {condition.words}")
            what_ifs += filter(None, [self.what_if(best, condition)])
        capacity = float(self.request.capacity_bytes(plan.fullest_group))
        return Explanation(
            plan=plan,
            capacity_bytes=capacity,
            searched=self.searched.plan,
            verdict=tuple(verdict_words(plan, self.searched.plan, capacity, what_ifs)),
            time=tuple(time_words(plan)),
            what_ifs=tuple(what_ifs),
            alternatives=tuple(alternatives),
            not_tried=tuple(self.not_tried),
        )

    def what_if(self, best: Candidate, condition: Condition) -> WhatIf | None:
        """The explained plan, and the best one, under a changed condition."""
        same = _same_plan_seconds(best, condition)
        asked = WhatIf(
            resource=condition.resource,
            words=condition.words,
            rows=condition.request.global_batch_size,
            same_plan_seconds=same,
        )
        if time.monotonic() > self.limit:
            self.not_tried.append(condition.words)
            return None if same is None else replace(asked, problem="not planned anew")
        solved_layers = (
            self.solved_layers if condition.has_same_prices else self.solved_layers.priced_for(condition.request)
        )
        try:
            plan = search_plans(condition.request, solved_layers, POLISH_ONLY).best.plan
        except AutoparError as error:
            return replace(asked, problem=error.constraint)
        return replace(asked, seconds=plan.prediction.step_seconds, plan=full_words(plan))

    def alternative(self, plan: Plan, decision: Decision) -> Alternative | None:
        """The best plan with one decision made differently; None where no plan has it."""
        name = decision.dimension
        value = decision.value or f"without {pin_text(self.request.constraints, name)}"
        if time.monotonic() > self.limit:
            self.not_tried.append(f"{name} {value}")
            return None
        request = replace(self.request, constraints=decision.constraints)
        try:
            found = search_plans(request, self.solved_layers, POLISH_ONLY).best.plan
        except AutoparError as error:
            return Alternative(
                dimension=name, value=value, plan="", seconds=None, peak_bytes=None, why=self._refusal(error)
            )
        if not is_made(found, decision):
            return None
        prediction = found.prediction
        words = full_words(found)
        return Alternative(
            dimension=name,
            value=value,
            plan=words,
            seconds=prediction.step_seconds,
            peak_bytes=prediction.peak_bytes,
            why=_difference(found, plan),
        )

    def _refusal(self, error: AutoparError) -> str:
        capacity = min(map(self.request.capacity_bytes, range(len(self.request.whole.groups))))
        if isinstance(error, InfeasibleError) and error.needed_bytes is not None:
            excess = bytes_text(max(error.needed_bytes - capacity, 0))
            return f"does not fit: it needs {bytes_text(error.needed_bytes)} per rank, {excess} more than there is"
        return error.constraint


def _same_plan_seconds(best: Candidate, condition: Condition) -> float | None:
    """A step of the plan as it is, priced under the condition; None where it cannot run as it is."""
    if not condition.is_comparable:
        return None
    return predicted(condition.request, best).plan.prediction.step_seconds


def _difference(plan: Plan, best: Plan) -> str:
    """Why a plan is slower than the explained one, in the kinds of time that are larger."""
    mine, its = plan.prediction.step_seconds, best.prediction.step_seconds
    if abs(mine - its) <= TIE * its:
        less = best.prediction.peak_bytes - plan.prediction.peak_bytes
        return "as fast" + (f", and {bytes_text(-less)} more memory" if less < 0 else "")
    if mine < its:
        return f"faster by {seconds_text(its - mine)}"
    return f"+{seconds_text(mine - its)}: {why_slower(plan, best)}"
