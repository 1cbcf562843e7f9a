"""The explanation of a plan: what-ifs and alternatives, each planned again on the traces and solved layers of the
first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.costs.layer_costs import defers_weights
from autopar.errors import AutoparError, InfeasibleError, PlanError
from autopar.explain.conditions import Condition, conditions
from autopar.explain.decisions import Decision, is_made, other_decisions, pin_text
from autopar.explain.explanation import Alternative, Explanation, WhatIf
from autopar.explain.processes import answers
from autopar.explain.verdict import TIE, time_words, verdict_words
from autopar.ir.chain import most_stages
from autopar.options.assignment import Candidate
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
from autopar.units import bytes_text, fit_text, seconds_text


def explain(
    source: GeneratedProgram | Planned | Request,
    *,
    seconds: float = 60.0,
    tell: Callable[[str], None] = lambda _: None,
    processes: int = 1,
) -> Explanation:
    """Why the plan of a compiled program, or the one that was or would be chosen for a request.

    seconds: after which no further question is asked; what is left is named in `not_tried`. A question that has begun
    is answered. tell: gets each question that this process asks, with its number, when it begins. processes: in so
    many questions are answered, with the same answers; more than one are forked, which is safe where no other thread
    holds what they need.
    Raises ConstraintError for numbers that are not in their range, PlanError on a program without its request, and
    AutoparError where nothing can be planned.
    """
    check_numbers({"seconds": seconds, "processes": processes})
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
    return questions.answer(explained, processes)


@dataclass(frozen=True, slots=True)
class _Answer:
    """To one question. found: None where there is nothing to tell. not_tried: the question where the time was up."""

    found: Alternative | WhatIf | None = None
    not_tried: str = ""


@dataclass
class _Questions:
    """What is asked of one request. searched: its best plan; solved_layers: solved for it, and shared by all
    questions."""

    request: Request
    solved_layers: Solved
    searched: Candidate
    limit: float
    tell: Callable[[str], None]
    _deferring: Solved | None = None

    def answer(self, best: Candidate, processes: int) -> Explanation:
        plan = best.plan
        # First what is solved already: other decisions have the prices of the plan, other conditions few of them.
        asked: list[Decision | Condition] = [*other_decisions(self.request, plan, most_stages(best.graph))]
        asked += conditions(self.request)

        # What shares layers that are solved for it is asked by one process, and first, as it takes longest.
        deferring = [i for i, each in enumerate(asked) if isinstance(each, Decision) and self._defers(each.constraints)]
        units = [deferring] if deferring else []
        units += [[i] for i in range(len(asked)) if i not in deferring]

        def ask(number: int) -> dict[int, _Answer]:
            return {i: self._ask(best, asked[i]) for i in units[number]}

        def tell(number: int) -> None:
            for i in units[number]:
                question = asked[i]
                made = f"{question.dimension} {question.value}" if isinstance(question, Decision) else question.words
                self.tell(f"question {i + 1} of {len(asked)}, {made}")

        found = {i: each for part in answers(ask, len(units), processes, tell) for i, each in part.items()}
        answered = [found[i] for i in range(len(asked))]
        alternatives = [each.found for each in answered if isinstance(each.found, Alternative)]
        what_ifs = [each.found for each in answered if isinstance(each.found, WhatIf)]
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
            not_tried=tuple(each.not_tried for each in answered if each.not_tried),
        )

    def _ask(self, best: Candidate, question: Decision | Condition) -> _Answer:
        return self.alternative(best.plan, question) if isinstance(question, Decision) else self.what_if(best, question)

    def what_if(self, best: Candidate, condition: Condition) -> _Answer:
        """The explained plan, and the best one, under a changed condition."""
        same = _same_plan_seconds(best, condition)
        asked = WhatIf(
            resource=condition.resource,
            words=condition.words,
            rows=condition.request.global_batch_size,
            same_plan_seconds=same,
        )
        if time.monotonic() > self.limit:
            found = None if same is None else replace(asked, problem="not planned anew")
            return _Answer(found, condition.words)
        solved_layers = (
            self.solved_layers if condition.has_same_prices else self.solved_layers.priced_for(condition.request)
        )
        try:
            plan = search_plans(condition.request, solved_layers, POLISH_ONLY).best.plan
        except AutoparError as error:
            return _Answer(replace(asked, problem=error.constraint))
        return _Answer(replace(asked, seconds=plan.prediction.step_seconds, plan=full_words(plan)))

    def alternative(self, plan: Plan, decision: Decision) -> _Answer:
        """The best plan with one decision made differently; nothing where no plan has it."""
        name = decision.dimension
        value = decision.value or f"without {pin_text(self.request.constraints, name)}"
        if time.monotonic() > self.limit:
            return _Answer(not_tried=f"{name} {value}")
        request = replace(self.request, constraints=decision.constraints)
        nothing = Alternative(dimension=name, value=value, plan="", seconds=None, peak_bytes=None, why="")
        try:
            found = search_plans(request, self._solved_for(request), POLISH_ONLY).best.plan
        except AutoparError as error:
            return _Answer(replace(nothing, why=self._refusal(error)))
        if not is_made(found, decision):
            return _Answer()
        prediction = found.prediction
        seconds, peak_bytes = prediction.step_seconds, prediction.peak_bytes
        why = _difference(found, plan)
        return _Answer(replace(nothing, plan=full_words(found), seconds=seconds, peak_bytes=peak_bytes, why=why))

    def _solved_for(self, request: Request) -> Solved:
        """The layers for a request with another decision: without weight gradients that sums could run beside, they are
        solved for other prices."""
        if not self._defers(request.constraints):
            return self.solved_layers
        if self._deferring is None:
            limits = replace(self.request.constraints, schedule=request.constraints.schedule)
            self._deferring = self.solved_layers.decided_for(replace(self.request, constraints=limits))
        return self._deferring

    def _defers(self, limits: Constraints) -> bool:
        """Whether a request with these constraints defers weight gradients where the one explained does not, or the
        other way round."""
        schedules = (limits.schedule or "", self.request.constraints.schedule or "")
        return self.request.overlaps and len({*map(defers_weights, schedules)}) == 2

    def _refusal(self, error: AutoparError) -> str:
        capacity = min(map(self.request.capacity_bytes, range(len(self.request.whole.groups))))
        if isinstance(error, InfeasibleError) and error.needed_bytes is not None:
            excess = bytes_text(max(error.needed_bytes - capacity, 0))
            return f"does not fit: it needs {bytes_text(error.needed_bytes)} per rank, {excess} more than there is"
        return error.constraint


def _tied(plan: Plan, alternatives: Sequence[Alternative]) -> Iterator[str]:
    """Other plans among the alternatives whose times predictions do not tell from the plan's, each once."""
    least, own = plan.prediction.step_seconds, full_words(plan)
    found = {each.plan: each.seconds for each in alternatives if each.seconds is not None and each.plan != own}
    for words, seconds in sorted(found.items(), key=lambda pair: pair[1]):
        if is_tied(seconds, least):
            yield f"{words} ({seconds / least - 1:+.1%})"


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
