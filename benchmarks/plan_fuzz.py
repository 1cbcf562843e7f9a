"""Random requests to the planner, and what must hold of every answer.

    python -m benchmarks.plan_fuzz [--first 0] [--count 200] [--seconds 600] [--csv] [--seed N ...]

A request (models of 0.1B to 405B with odd heads, layers and vocabularies; 1 to 4,096 devices, 3, 6 and 7 nodes and
mixed clusters among them; batches of 1 to 4,096; pins of every kind, budgets, precisions, kernels) follows from its
seed. Checked are

    crash       the answer is a plan or an AutoparError, of explanations and advice too
    fits        a plan's prediction is within the budget
    read back   plan.yaml, written, read and priced, predicts the same seconds and bytes to the digit
    budget      of an infeasible request: the named budget gives a plan, and 0.95 of it does not
    more        memory, bandwidth, arithmetic or nodes: the best plan is no slower, to TOLERANCE

Every seed has the first three, every answer that names a budget the fourth; the last, and explanations, are asked of
some, in turn. `--csv` appends rows to benchmarks/results/plan_fuzz.csv (seed, request, outcome, CPU seconds, what was
asked beside, violations). Exits with 1 where any does not hold.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.conditions import Condition, conditions
from autopar.explain.questions import explain
from autopar.explain.rescue import advised
from autopar.plan import Plan
from autopar.planning.planner import search_plans
from autopar.planning.request import Request
from autopar.planning.user_plans import reprice
from autopar.sharding.assignment import Candidate
from benchmarks.fuzz_requests import Draw, draw, request_of

RESULTS = Path(__file__).resolve().parent / "results" / "plan_fuzz.csv"

TOLERANCE = 0.02
"""Share of the step by which more of something may be predicted slower: layouts are chosen by a closed form, and among
pipeline ranks of unlike meshes by a bound of 1 to 3 %, while plans predict a simulation."""

LESS = 0.95
"""Of the smallest budget, which has no plan."""

MORE_OF_EVERY, EXPLAINED_OF_EVERY, ADVISED_OF_EVERY = 2, 40, 8
"""Every so many seeds more of one thing is asked for, a plan explained, a refused one advised."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """kind: plan, infeasible, refused (another AutoparError) or crash. text: the plan or the error. asked: the checks
    that not every seed has, and of what."""

    kind: str
    text: str
    violations: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


def examine(drawn: Draw) -> Outcome:
    """One request, and all that is checked of its answer."""
    asked: list[str] = []
    try:
        request = request_of(drawn)
        found = search_plans(request).best
    except InfeasibleError as error:
        answer = error
    except AutoparError as error:
        return Outcome("refused", f"{type(error).__name__}: {error.constraint}")
    except Exception:
        return Outcome("crash", traceback.format_exc(), ("crash",))
    else:
        violations = tuple(_guarded(lambda: _after_plan(drawn, request, found, asked)))
        return Outcome("plan", _words(found.plan), violations, tuple(asked))
    needed = f"; {answer.needed_bytes} bytes do" if answer.needed_bytes else ""
    violations = tuple(_guarded(lambda: _after_refusal(drawn, request, answer, asked)))
    return Outcome("infeasible", answer.constraint + needed, violations, tuple(asked))


def _guarded(check: Callable[[], Iterator[str]]) -> Iterator[str]:
    """What a check finds; another exception than ours is a violation too."""
    try:
        yield from check()
    except Exception:
        yield "crash: " + traceback.format_exc()


def _words(plan: Plan) -> str:
    prediction = plan.prediction
    step, peak = prediction.step_seconds, prediction.peak_bytes / 2**30
    return f"{plan.mesh_text}, {plan.num_micro_batches} micro-batches: {step:.6g} s, {peak:.3f} GiB"


def _after_plan(drawn: Draw, request: Request, found: Candidate, asked: list[str]) -> Iterator[str]:
    plan = found.plan
    capacity = request.capacity_bytes(plan.fullest_group)
    if plan.prediction.peak_bytes > capacity:
        yield f"fits: {plan.prediction.peak_bytes / capacity:.4f} of the memory"
    yield from read_back(request, plan)
    if drawn.seed % MORE_OF_EVERY == 0:
        condition = _condition(request, drawn.seed // MORE_OF_EVERY)
        asked.append(f"more: {condition.words}")
        yield from more(plan, condition)
    if drawn.seed % EXPLAINED_OF_EVERY == 1:
        asked.append("explained")
        explain(request, seconds=1.0)


def read_back(request: Request, plan: Plan) -> Iterator[str]:
    """The plan's file, read and priced."""
    again = reprice(request, Plan.from_yaml(plan.to_yaml(), "plan.yaml")).best.plan
    for what in ("seconds", "num_bytes", "pipeline_ranks"):
        mine, its = getattr(plan.prediction, what), getattr(again.prediction, what)
        if mine != its:
            yield f"read back: {what} {mine} and {its}"


def _condition(request: Request, number: int) -> Condition:
    """The request with more of one thing, which `number` chooses."""
    known = [c for c in conditions(request) if _is_more(request, c)]
    return known[number % len(known)]


def more(plan: Plan, condition: Condition) -> Iterator[str]:
    """The best plan with more of one thing may not be slower."""
    before = plan.prediction.step_seconds
    try:
        after = search_plans(condition.request).best.plan
    except AutoparError as error:
        yield f"more: with {condition.words} no plan: {error.constraint}"
        return
    if after.prediction.step_seconds > before * (1 + TOLERANCE):
        ratio = after.prediction.step_seconds / before
        yield f"more: with {condition.words} {ratio:.4f} of the time: {_words(plan)}; {_words(after)}"


def _is_more(request: Request, condition: Condition) -> bool:
    """Twice the nodes are more only where the batch and the pins leave work for them."""
    if condition.resource == "batch":
        return False
    is_free = not request.constraints.degrees and request.mixed is None
    return condition.resource != "devices" or (
        is_free and request.global_batch_size % condition.request.whole.num_devices == 0
    )


def _after_refusal(drawn: Draw, request: Request, error: InfeasibleError, asked: list[str]) -> Iterator[str]:
    if drawn.seed % ADVISED_OF_EVERY == 0:
        asked.append("advised")
        advised(request, error, seconds=1.0)
    if error.needed_bytes is not None:
        asked.append("budget")
        yield from smallest_budget(request, error.needed_bytes)


def smallest_budget(request: Request, num_bytes: int) -> Iterator[str]:
    """`num_bytes` per rank give a plan, and LESS of them do not."""
    if not has_plan(request, num_bytes):
        yield f"budget: {num_bytes} give no plan"
    if has_plan(request, int(LESS * num_bytes)):
        yield f"budget: {LESS} of {num_bytes} give a plan"


def has_plan(request: Request, num_bytes: int) -> bool:
    """Whether there is a plan within a budget."""
    limits = replace(request.constraints, memory_bytes=num_bytes)
    try:
        search_plans(replace(request, constraints=limits))
    except InfeasibleError:
        return False
    return True


# --- the campaign -----------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=200, help="how many seeds")
    parser.add_argument("--seed", type=int, nargs="*", help="these seeds instead")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which no further seed is begun")
    parser.add_argument("--csv", action="store_true", help=f"append rows to {RESULTS.name}")
    options = parser.parse_args()
    seeds = options.seed or range(options.first, options.first + options.count)
    limit = time.monotonic() + options.seconds
    kinds: Counter[str] = Counter()
    for seed in seeds:
        if time.monotonic() > limit:
            break
        drawn, started = draw(seed), time.process_time()
        outcome = examine(drawn)
        seconds = time.process_time() - started
        kinds[outcome.kind] += 1
        kinds.update(f"asked: {each.partition(':')[0]}" for each in outcome.asked)
        kinds.update(f"violation: {each.partition(':')[0]}" for each in outcome.violations)
        _tell(drawn, outcome, seconds)
        if options.csv:
            _write(drawn, outcome, seconds)
    print(
        f"{sum(kinds[k] for k in kinds if ':' not in k)} requests: " + ", ".join(f"{n} {k}" for k, n in kinds.items())
    )
    return 1 if any(kind.startswith("violation") for kind in kinds) else 0


def _request_text(drawn: Draw) -> str:
    given = asdict(drawn)
    del given["seed"]
    shape = given.pop("shape")
    return json.dumps({"model": "/".join(map(str, shape.values())), **{k: v for k, v in given.items() if v}})


def _tell(drawn: Draw, outcome: Outcome, seconds: float) -> None:
    line = outcome.text.splitlines()[0] if outcome.kind != "crash" else outcome.text.splitlines()[-1]
    print(f"{drawn.seed} {outcome.kind} {seconds:.2f} CPU-s: {line[:160]}", flush=True)
    if outcome.violations:
        print(f"    {_request_text(drawn)}", flush=True)
        for violation in outcome.violations:
            text = outcome.text if violation == "crash" else violation
            print("    " + text.replace("\n", "\n    "), flush=True)


def _write(drawn: Draw, outcome: Outcome, seconds: float) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    is_new = not RESULTS.exists()
    with RESULTS.open("a", newline="") as file:
        writer = csv.writer(file)
        if is_new:
            writer.writerow(["seed", "request", "outcome", "answer", "cpu_seconds", "asked", "violations"])
        answer = outcome.text.splitlines()[-1 if outcome.kind == "crash" else 0]
        violations = "; ".join(v.splitlines()[-1] for v in outcome.violations)
        asked, cpu_seconds = "; ".join(outcome.asked), f"{seconds:.2f}"
        writer.writerow([drawn.seed, _request_text(drawn), outcome.kind, answer, cpu_seconds, asked, violations])


if __name__ == "__main__":
    sys.exit(main())
