"""The explanation of a plan. What-ifs and alternatives are planned again with the traces and solved layers of the
plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costs.layer_costs import defers_weights
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.explain.conditions import Condition, conditions
from autopar.explain.decisions import Decision, has_decision, other_decisions, pin_text
from autopar.explain.explanation import Alternative, Explanation, WhatIf
from autopar.explain.processes import answers
from autopar.explain.verdict import TIE, time_words, verdict_words
from autopar.ir.chain import most_stages
from autopar.plan import Plan
from autopar.planning.config_costs import Solved
from autopar.planning.pipelines import EqualSearch, UnequalSearch
from autopar.planning.planner import POLISH_ONLY, Planned, is_only_polished, search_plans
from autopar.planning.predict import predicted
from autopar.planning.request import Request
from autopar.program import GeneratedProgram
from autopar.report.costs import is_tied, why_slower
from autopar.report.plan_words import full_words
from autopar.settings.arguments import check_numbers
from autopar.settings.constraints import Constraints
from autopar.sharding.assignment import Candidate
from autopar.units import bytes_text, fit_text, seconds_text


def explain(
    source: GeneratedProgram | Planned | Request,
    *,
    seconds: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
    processes: int = 1,
) -> Explanation:
    """Explain the plan of a compiled program, or the plan for a request.

    seconds: the time limit; `not_tried` names the questions left open. A question that has begun is answered. tell:
    gets each question that this process asks, with its number, when it begins. processes: processes that answer, with
    the same results; more than one are forked, which is safe if no other thread holds locks that they need.
    Raises ConstraintError for numbers out of range, PlanError for a program without its request, and AutoparError if
    nothing can be planned.
    """
    check_numbers({"seconds": seconds, "processes": processes})
    if isinstance(source, GeneratedProgram) and source.request is None:
        raise PlanError(
            "a program of another process cannot be explained",
            alternatives="call explain in the process that called autopar.compile",
        )
    request = source if isinstance(source, Request) else source.request
    assert request is not None
    limit = time.monotonic() + seconds
    result = None if isinstance(source, Request) else source.result
    if result is not None and result.solved is not None and is_only_polished(request):
        solved_layers, searched = result.solved, result.best
    else:
        before = result.solved if result is not None else None
        solved_layers = before or (EqualSearch if request.mixed is None else UnequalSearch)(request).solved
        # The plan's layers are solved already. POLISH_ONLY omits only the search over many meshes for one stage.
        searched = search_plans(request, solved_layers, POLISH_ONLY).best
    explained = searched if isinstance(source, Request) else source.best
    questions = _Questions(request=request, solved_layers=solved_layers, searched=searched, limit=limit, tell=tell)
    return questions.answer(explained, processes)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to one question. content: None if there is nothing to report. not_tried: the question, if the time
    limit left it open."""

    content: Alternative | WhatIf | None = None
    not_tried: str = ""


@dataclass
class _Questions:
    """The questions about one request. searched: its best plan; solved_layers: the layers solved for that plan, which
    all questions share."""

    request: Request
    solved_layers: Solved
    searched: Candidate
    limit: float
    tell: Callable[[str], None]
    _deferring: Solved | None = None

    def answer(self, best: Candidate, processes: int) -> Explanation:
        plan = best.plan
        # Solved questions come first: other decisions keep the prices of the plan, most other conditions do not.
        questions: list[Decision | Condition] = [*other_decisions(self.request, plan, most_stages(best.graph))]
        questions += conditions(self.request)

        # One process answers the questions that share another set of solved layers. They take longest, so they go
        # first.
        deferring = [i for i, q in enumerate(questions) if isinstance(q, Decision) and self._defers(q.constraints)]
        units = [deferring] if deferring else []
        units += [[i] for i in range(len(questions)) if i not in deferring]

        def ask(number: int) -> dict[int, _Answer]:
            return {i: self._ask(best, questions[i]) for i in units[number]}

        def tell(number: int) -> None:
            for i in units[number]:
                question = questions[i]
                words = f"{question.dimension} {question.value}" if isinstance(question, Decision) else question.words
                self.tell(f"question {i + 1} of {len(questions)}, {words}")

        by_number = {i: answer for part in answers(ask, len(units), processes, tell) for i, answer in part.items()}
        answered = [by_number[i] for i in range(len(questions))]
        alternatives = [answer.content for answer in answered if isinstance(answer.content, Alternative)]
        what_ifs = [answer.content for answer in answered if isinstance(answer.content, WhatIf)]
        capacity = float(self.request.capacity_bytes(plan.fullest_group))
        certainty = self.request.certainty(plan.prediction.num_bytes, plan.fullest_group)
        binding = verdict_words(plan, self.searched.plan, capacity, what_ifs)
        return Explanation(
            plan=plan,
            capacity_bytes=capacity,
            certainty=certainty,
            searched=self.searched.plan,
            verdict=(*binding, f"fits the memory: {fit_text(certainty)}"),
            time=tuple(time_words(plan)),
            what_ifs=tuple(what_ifs),
            alternatives=tuple(alternatives),
            tied=tuple(_tied(plan, alternatives)),
            not_tried=tuple(answer.not_tried for answer in answered if answer.not_tried),
        )

    def _ask(self, best: Candidate, question: Decision | Condition) -> _Answer:
        return self.alternative(best.plan, question) if isinstance(question, Decision) else self.what_if(best, question)

    def what_if(self, best: Candidate, condition: Condition) -> _Answer:
        """Answer for the explained plan and the best plan under a changed condition."""
        same = _same_plan_seconds(best, condition)
        what_if = WhatIf(
            resource=condition.resource,
            words=condition.words,
            rows=condition.request.global_batch_size,
            same_plan_seconds=same,
        )
        if time.monotonic() > self.limit:
            answer = None if same is None else replace(what_if, problem="not planned again")
            return _Answer(answer, condition.words)
        solved_layers = (
            self.solved_layers if condition.has_same_prices else self.solved_layers.priced_for(condition.request)
        )
        try:
            plan = search_plans(condition.request, solved_layers, POLISH_ONLY).best.plan
        except AutoparError as error:
            return _Answer(replace(what_if, problem=error.constraint))
        return _Answer(replace(what_if, seconds=plan.prediction.step_seconds, plan=full_words(plan)))

    def alternative(self, plan: Plan, decision: Decision) -> _Answer:
        """Find the best plan with one changed decision; the answer is empty if no plan has it."""
        name = decision.dimension
        value = decision.value or f"without {pin_text(self.request.constraints, name)}"
        if time.monotonic() > self.limit:
            return _Answer(not_tried=f"{name} {value}")
        request = replace(self.request, constraints=decision.constraints)
        nothing = Alternative(dimension=name, value=value, plan="", seconds=None, peak_bytes=None, why="")
        try:
            other = search_plans(request, self._solved_for(request), POLISH_ONLY).best.plan
        except AutoparError as error:
            return _Answer(replace(nothing, why=self._refusal(error)))
        if not has_decision(other, decision):
            return _Answer()
        prediction = other.prediction
        seconds, peak_bytes = prediction.step_seconds, prediction.peak_bytes
        why = _difference(other, plan)
        return _Answer(replace(nothing, plan=full_words(other), seconds=seconds, peak_bytes=peak_bytes, why=why))

    def _solved_for(self, request: Request) -> Solved:
        """Return the layers for a request with another decision. Layers are solved again if weight gradients, which can
        overlap with sums, are deferred or no longer deferred."""
        if not self._defers(request.constraints):
            return self.solved_layers
        if self._deferring is None:
            limits = replace(self.request.constraints, schedule=request.constraints.schedule)
            self._deferring = self.solved_layers.decided_for(replace(self.request, constraints=limits))
        return self._deferring

    def _defers(self, limits: Constraints) -> bool:
        """Return whether these constraints change whether weight gradients are deferred."""
        schedules = (limits.schedule or "", self.request.constraints.schedule or "")
        return self.request.overlaps and len({*map(defers_weights, schedules)}) == 2

    def _refusal(self, error: AutoparError) -> str:
        capacity = min(map(self.request.capacity_bytes, range(len(self.request.whole.groups))))
        if isinstance(error, InfeasibleError) and error.needed_bytes is not None:
            excess = bytes_text(max(error.needed_bytes - capacity, 0))
            return f"does not fit: needs {bytes_text(error.needed_bytes)} per rank, {excess} too much"
        return error.constraint


def _tied(plan: Plan, alternatives: Sequence[Alternative]) -> Iterator[str]:
    """Yield every alternative once that predictions cannot distinguish from the plan."""
    least, chosen = plan.prediction.step_seconds, full_words(plan)
    seconds_by_plan = {a.plan: a.seconds for a in alternatives if a.seconds is not None and a.plan != chosen}
    for words, seconds in sorted(seconds_by_plan.items(), key=lambda pair: pair[1]):
        if is_tied(seconds, least):
            yield f"{words} ({seconds / least - 1:+.1%})"


def _same_plan_seconds(best: Candidate, condition: Condition) -> float | None:
    """Return the step time of the unchanged plan under the condition; None if it cannot run unchanged."""
    if not condition.is_comparable:
        return None
    return predicted(condition.request, best).plan.prediction.step_seconds


def _difference(plan: Plan, best: Plan) -> str:
    """Return why a plan is slower than the explained one: the kinds of time that are larger."""
    seconds, best_seconds = plan.prediction.step_seconds, best.prediction.step_seconds
    if abs(seconds - best_seconds) <= TIE * best_seconds:
        more = plan.prediction.peak_bytes - best.prediction.peak_bytes
        return "as fast" + (f", with {bytes_text(more)} more memory" if more > 0 else "")
    if seconds < best_seconds:
        return f"faster by {seconds_text(best_seconds - seconds)}"
    return f"+{seconds_text(seconds - best_seconds)}: {why_slower(plan, best)}"
