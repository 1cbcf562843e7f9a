"""Explanations: their numbers against searches and prices made by hand, their sentences against their numbers."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from autopar.errors import AutoparError, InfeasibleError
from autopar.explain import Explanation, compare, explain, render_comparison, render_explanation
from autopar.explain.conditions import conditions, faster_link
from autopar.explain.decisions import has_decision, other_decisions, pins_of, without
from autopar.explain.rescue import advised, plan_for
from autopar.ir.chain import chain
from autopar.plan import Plan
from autopar.planning import pipelines, solved_layers
from autopar.planning.planner import Planned, SearchResult, search_plans
from autopar.planning.predict import one_stage_costs
from autopar.planning.request import Request, pricer_for
from autopar.planning.solved_layers import SolvedLayers
from autopar.report.plan_words import full_words, recompute_modes
from autopar.units import bytes_text
from tests.autopar.requests import request_for

PINS = {"zero": 0, "tp": 1, "pp": 1, "recompute": "none", "offload": "none"}


@cache
def request(name: str = "llama", cluster: str = "4 a100-80g", **constraints: object) -> Request:
    return request_for(name, cluster, **constraints)


@cache
def searched(name: str = "llama", cluster: str = "4 a100-80g", **constraints: object) -> SearchResult:
    return search_plans(request(name, cluster, **constraints))


@cache
def explained(name: str = "llama", cluster: str = "4 a100-80g", **constraints: object) -> Explanation:
    return explain(request(name, cluster, **constraints), seconds=600.0)


def tight(share: float, name: str = "llama", cluster: str = "4 a100-80g", **constraints: object) -> int:
    """A budget of the workspace and a share of what the best plan without one keeps beside it."""
    free = searched(name, cluster, **constraints).best.plan.prediction
    workspace = free.num_bytes["workspace"]
    return int(workspace + share * (free.peak_bytes - workspace))


def what_if(explanation: Explanation, resource: str) -> list[float]:
    """Step times of the best plan by condition."""
    return [w.seconds for w in explanation.what_ifs if w.resource == resource and w.seconds is not None]


@pytest.mark.slow
def test_the_same_plan_is_priced_under_each_condition() -> None:
    """`same_plan_seconds` against the plan priced by hand on the changed cluster."""
    asked, found = request(), explained()
    best = search_plans(asked, exact_devices=0).best
    assert found.plan == best.plan
    link = faster_link(asked.cluster.intra_node)
    faster = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, intra_node=link))
    pricer = pricer_for(faster, best.plan.mesh, best.plan.num_micro_batches)
    expected = one_stage_costs(best.graph, best.operators, pricer, best.assignment).simulated().prediction.step_seconds
    inside = next(w for w in found.what_ifs if w.resource == "bandwidth inside a node")
    assert inside.same_plan_seconds == pytest.approx(expected, rel=1e-12)
    assert expected < found.plan.prediction.step_seconds


@pytest.mark.slow
def test_more_of_anything_is_never_slower() -> None:
    found = explained()
    now = found.plan.prediction.step_seconds
    comparable = [w for w in found.what_ifs if w.resource not in ("batch", "devices")]
    assert {w.resource for w in comparable} >= {"compute", "memory bandwidth", "bandwidth inside a node", "memory"}
    for each in comparable:
        assert each.best_seconds is not None and each.best_seconds <= now * (1 + 1e-9), each
    seconds = what_if(found, "memory")
    assert seconds == sorted(seconds), "twice, 25% and 10% more memory"


def test_conditions_change_one_thing() -> None:
    asked = request(cluster="2x2 v100-16g")
    changed = {c.words: c.request for c in conditions(asked)}
    assert len(changed) == 10
    for words, other in changed.items():
        differ = [f.name for f in dataclasses.fields(Request) if getattr(other, f.name) != getattr(asked, f.name)]
        assert len(differ) == 1, words
    assert changed["twice the batch"].global_batch_size == 2 * asked.global_batch_size
    between = changed["twice the bandwidth between nodes"].cluster
    assert between.inter_node.bytes_per_second == 2 * asked.cluster.inter_node.bytes_per_second
    assert between.intra_node == asked.cluster.intra_node


@pytest.mark.slow
def test_memory_binds_where_a_budget_is_tight() -> None:
    roomy, free = explained(memory=tight(0.6)), searched().best.plan.prediction
    assert roomy.plan.prediction.peak_bytes <= roomy.capacity_bytes < free.peak_bytes
    assert roomy.plan.prediction.step_seconds > free.step_seconds
    text = " ".join(roomy.verdict)
    assert "memory of" in text and "does not bind" not in text
    twice = next(w for w in roomy.what_ifs if w.words == "twice the memory")
    best = search_plans(request(memory=2 * int(roomy.capacity_bytes)), exact_devices=0).best.plan
    assert twice.seconds == pytest.approx(best.prediction.step_seconds, rel=1e-9)
    assert "memory does not bind" in " ".join(explained().verdict)


@pytest.mark.slow
def test_the_verdict_names_what_helps_most() -> None:
    """A link a thousand times slower makes the bandwidth what binds; it does not bind before."""
    asked = request(dp=4)
    link = asked.cluster.intra_node
    slow = dataclasses.replace(link, bytes_per_second=link.bytes_per_second / 1000)
    crippled = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, intra_node=slow))
    found = explain(crippled, seconds=600.0)
    assert found.verdict[0].startswith("bandwidth inside a node binds")
    assert not explained().verdict[0].startswith("bandwidth")


@pytest.mark.slow
def test_alternatives_are_what_the_search_finds_with_the_pin() -> None:
    found = explained()
    plan = found.plan
    by_name = {(a.dimension, a.value): a for a in found.alternatives}
    tp = next(a for a in found.alternatives if a.dimension == "tp")
    pinned = search_plans(request(tp=int(tp.value)), exact_devices=0).best.plan.prediction
    assert tp.seconds == pytest.approx(pinned.step_seconds, rel=1e-9)
    assert tp.peak_bytes == pytest.approx(pinned.peak_bytes, rel=1e-9)
    for each in found.alternatives:
        assert each.seconds is None or each.seconds >= plan.prediction.step_seconds * (1 - 1e-9), each
    tied = {a.plan for a in found.alternatives if a.seconds and a.seconds <= 1.04 * plan.prediction.step_seconds}
    assert {words.rsplit(" (", 1)[0] for words in found.tied} == tied - {full_words(plan)}
    low, high = found.certainty.low_bytes, found.certainty.high_bytes
    assert low < plan.prediction.peak_bytes < high <= found.capacity_bytes and found.certainty.fit == "yes"
    assert found.verdict[-1].startswith("fits the memory: yes (90% interval")
    assert ("recompute", "full") in by_name and ("offload", "optimizer") in by_name
    assert "recomputation" in by_name["recompute", "full"].why


@pytest.mark.slow
def test_schedules_that_defer_weight_gradients_have_layers_of_their_own() -> None:
    """No sum runs beside weight gradients then, so other decisions may be best: those that the search makes. The plan's
    own schedule is no alternative."""
    pinned = {"pp": 2, "tp": 4, "dp": 2}  # layers that schedules share are 3 % slower here
    found = explained("llama", "4x4 a100-80g", **pinned)
    by_schedule = {a.value: a.seconds for a in found.alternatives if a.dimension == "schedule"}
    others = {"zero-bubble", "zero-bubble-v"} - {found.plan.pipeline.schedule}
    assert others and others <= by_schedule.keys()
    for schedule in others:
        alone = search_plans(request("llama", "4x4 a100-80g", **pinned, schedule=schedule), exact_devices=0).best.plan
        assert by_schedule[schedule] == pytest.approx(alone.prediction.step_seconds, rel=1e-9)
    deferred = search_plans(request("llama", "4x4 a100-80g", **pinned, schedule="zero-bubble"), exact_devices=0).best
    assert found.plan.prediction.step_seconds <= deferred.plan.prediction.step_seconds


@pytest.mark.slow
def test_an_alternative_that_does_not_fit_says_by_how_much() -> None:
    """ZeRO-0 under a budget below what it needs: the bytes named are those that it lacks."""
    budget = tight(0.85, "gpt2", **PINS)
    found = explained("gpt2", **{k: v for k, v in PINS.items() if k != "zero"}, memory=budget)
    refused = next(a for a in found.alternatives if (a.dimension, a.value) == ("zero", "0"))
    assert refused.seconds is None
    match = re.search(r"does not fit: needs (.*) per rank, (.*) too much", refused.why)
    assert match is not None, refused.why
    with pytest.raises(InfeasibleError) as caught:
        search_plans(request("gpt2", **PINS, memory=budget))
    assert caught.value.needed_bytes is not None
    assert match.groups() == (bytes_text(caught.value.needed_bytes), bytes_text(caught.value.needed_bytes - budget))


@pytest.mark.slow
def test_decisions_pin_what_they_say() -> None:
    asked = request("gpt2", "4 a100-80g", pp=2)
    best = search_plans(asked, exact_devices=0).best
    decisions = list(other_decisions(asked, best.plan, len(chain(best.graph))))
    assert {"pp", "tp", "dp", "recompute", "schedule", "micro_batches", "offload"} <= {d.dimension for d in decisions}
    for decision in decisions:
        if decision.dimension == "schedule":
            plan = search_plans(dataclasses.replace(asked, constraints=decision.constraints), exact_devices=0).best.plan
            assert plan.pipeline.schedule == decision.value and has_decision(plan, decision)
    dropped = next(d for d in decisions if d.dimension == "pp")
    assert dropped.value == "" and not pins_of(dropped.constraints)


@pytest.mark.slow
def test_recompute_alternatives_are_those_the_plan_lacks() -> None:
    plan = search_plans(request(recompute="full", pp=1), exact_devices=0).best.plan
    assert recompute_modes(plan)["full"] == 3
    asked = request(pp=1)
    modes = [d.value for d in other_decisions(asked, plan, 5) if d.dimension == "recompute"]
    assert modes == ["none", "offload", "selective"]


@pytest.mark.slow
def test_no_time_leaves_questions_and_says_so() -> None:
    asked: list[str] = []
    found = explain(request(), seconds=0.0, tell=asked.append)
    assert not found.alternatives and len(found.not_tried) > 5
    decisions = [
        any(f", {d.dimension} {d.value}" in words for d in other_decisions(request(), found.plan, 5)) for words in asked
    ]
    assert any(decisions) and decisions == sorted(decisions, reverse=True)  # before conditions, which are solved anew
    assert all(w.seconds is None and w.same_plan_seconds is not None for w in found.what_ifs)
    assert "Not tried before the time limit" in render_explanation(found)


@pytest.mark.slow
@pytest.mark.parametrize("is_tight", [False, True])
def test_rendered_explanation_holds_every_row(is_tight: bool) -> None:
    found = explained(memory=tight(0.6)) if is_tight else explained()
    text = render_explanation(found)
    assert max(map(len, text.splitlines())) <= 110 and "\x1b" not in text
    flat = " ".join(text.split())
    for each in found.what_ifs:
        assert each.words.split()[0] in flat
    for title in ("What binds", "Where the time goes", "with more resources", "one changed decision"):
        assert title in text


# --- what would make an infeasible request feasible ---------------------------------------------------------------


@cache
def infeasible() -> tuple[Request, InfeasibleError]:
    """A budget below what the pins need."""
    asked = request("gpt2", "2 a100-80g", **PINS, memory=tight(0.7, "gpt2", "2 a100-80g", **PINS))
    with pytest.raises(InfeasibleError) as caught:
        search_plans(asked)
    return asked, advised(asked, caught.value, seconds=120.0)


@pytest.mark.slow
def test_the_cheapest_pin_and_the_smallest_cluster_are_named_and_do() -> None:
    """Both remedies of the message are feasible, and one node less than the smallest cluster is not."""
    asked, error = infeasible()
    message = str(error)
    assert "no plan fits the memory of one rank" in message and f"memory={error.needed_bytes}" in message
    seconds = {}
    for name in pins_of(asked.constraints):
        plan = plan_for(dataclasses.replace(asked, constraints=without(asked.constraints, (name,))), None)
        if plan is not None:
            seconds[name] = plan.prediction.step_seconds
    assert seconds, "one pin less is enough"
    assert f"without {min(seconds, key=lambda n: seconds[n])}=" in message
    smallest = next((n for n in (2, 3, 4) if _fits(asked, n)), None)
    assert (smallest is None) == ("devices)" not in message)
    assert smallest is None or f"{smallest}x2 a100-80g ({2 * smallest} devices)" in message


def _fits(asked: Request, num_nodes: int) -> bool:
    cluster = dataclasses.replace(asked.cluster, num_nodes=num_nodes)
    return plan_for(dataclasses.replace(asked, cluster=cluster), None) is not None


def test_advice_crosses_processes() -> None:
    _, error = infeasible()
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.needed_bytes == error.needed_bytes


def test_errors_without_a_budget_are_left_as_they_are() -> None:
    error = InfeasibleError("no mesh of 7 devices divides the global batch")
    assert advised(request(), error) is error


# --- two plans ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two() -> tuple[Plan, Plan]:
    return searched(pp=1, dp=4, recompute="none").best.plan, searched(pp=2).best.plan


def test_compared_times_and_bytes_are_the_plans(two: tuple[Plan, Plan]) -> None:
    found = compare(*two)
    for rows, tables in (
        (found.seconds, [p.prediction.seconds for p in two]),
        (found.num_bytes, [p.prediction.num_bytes for p in two]),
    ):
        for row in rows:
            assert (row.first, row.second) == tuple(table.get(row.kind, 0.0) for table in tables)
        assert {row.kind for row in rows} == {k for table in tables for k, v in table.items() if v}
    assert [row.second for row in found.pipeline_ranks] == [sum(p.values()) for p in two[1].prediction.pipeline_ranks]


def test_compared_placements_are_those_that_differ(two: tuple[Plan, Plan]) -> None:
    same = compare(two[0], two[0])
    assert not same.placements and all(d.first == d.second for d in same.decisions)
    assert "Placements that differ: none" in render_comparison(same)
    changed = compare(two[0], Plan.from_yaml(_with_zero_3(two[0])))
    assert changed.placements
    for row in changed.placements:
        assert "zero=3" in row.second and "zero=3" not in row.first


def _with_zero_3(plan: Plan) -> str:
    return re.sub(r"(: dp=Rp[^\n]*?)(?: zero=\d)?\n", r"\1 zero=3\n", plan.to_yaml())


def test_rendered_comparison(two: tuple[Plan, Plan]) -> None:
    text = render_comparison(compare(*two), ("one.yaml", "other.yaml"))
    assert max(map(len, text.splitlines())) <= 110
    for part in ("one.yaml", "other.yaml", "Stages", "pp2", "pipeline bubble", "Peak of each pipeline rank"):
        assert part in text


SIXTEEN = ("llama", "2x8 a100-80g")
"""More devices than the exact search is made for, so that explanations ask for nothing but what was searched."""


@pytest.mark.slow
def test_what_was_solved_for_the_plan_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, result = request(*SIXTEEN), searched(*SIXTEEN)
    counted = Counter[str]()

    def counting(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
        def count(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return called(*args, **kwargs)

        return count

    monkeypatch.setattr(solved_layers, "solve", counting("layers", solved_layers.solve))
    monkeypatch.setattr(pipelines.StageProblem, "solve", counting("stages", pipelines.StageProblem.solve))
    found = explain(Planned(asked, result.best, result), seconds=0.0)
    assert not counted and found.searched is found.plan is result.best.plan
    assert explain(asked, seconds=0.0).plan == found.plan
    assert counted["layers"] and counted["stages"]  # a request alone is searched, which the counters see
    first = Counter(counted)
    search_plans(asked, result.solved, 0)
    assert counted == first


@pytest.mark.slow
def test_questions_that_share_their_costs_have_the_answers_of_questions_alone() -> None:
    asked, result = request(*SIXTEEN), searched(*SIXTEEN)
    assert isinstance(result.solved, SolvedLayers)
    decisions = [d.constraints for d in other_decisions(asked, result.best.plan, len(chain(result.best.graph)))]
    more = [c.request for c in conditions(asked) if c.has_same_prices]
    for changed in (*(dataclasses.replace(asked, constraints=each) for each in decisions), *more):
        together, alone = (_best(changed, s) for s in (result.solved, SolvedLayers(asked, result.solved.typical_rows)))
        assert together == alone


def _best(asked: Request, solved: SolvedLayers) -> Plan | str:
    try:
        return search_plans(asked, solved, 0).best.plan
    except AutoparError as error:
        return str(error)
