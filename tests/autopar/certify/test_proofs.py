"""Each part of a certificate proves plans that are right."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.certify.certificate import Findings
from autopar.certify.decisions import check_decisions, pipeline_ranks
from autopar.certify.edges import check_edges
from autopar.certify.messages import prove_messages
from autopar.certify.operators import prove_operators
from autopar.certify.reshards import prove_reshards, ways_of
from autopar.certify.schedules import check_schedule
from autopar.compiled import CompiledProgram
from cost_models.schedule import placement
from tests.autopar.certify.programs import compiled, dense, mixture, pipeline


def test_a_right_plan_is_proven_part_by_part() -> None:
    program = dense()
    operators, reshards = prove_operators(program.best), prove_reshards(program.program)
    edges, schedule = check_edges(program.program, program.best), check_schedule(pipeline(program))
    decisions, messages = check_decisions(program), prove_messages(pipeline(program))
    for part in (operators, reshards, edges, schedule, decisions, messages):
        assert part.ok, part.failures
    assert operators.counts["calls of the plan"] == len(program.best.assignment.operators)
    assert operators.gaps == ()
    assert operators.counts["runs, forward and backward"] >= 40
    assert operators.largest_error is not None and operators.largest_error < 1e-5
    ways = {str(way) for stage_program in program.program.programs for way in ways_of(stage_program)}
    assert ways and reshards.counts["ways of values from placements to others"] >= len(ways)
    assert reshards.largest_error is not None and 0 <= reshards.largest_error < 1e-12
    assert edges.counts["edges"] > 300
    assert schedule.counts["forwards"] == schedule.counts["whole backwards"] == 2 * 2
    assert schedule.counts["messages sent and taken"] == 4  # one activation and one gradient of each micro-batch
    assert decisions.counts["layers, each in its stage"] == 4
    assert messages.counts["boxes moved"] == 2 * 4  # to and from each of four ranks


def check(program: CompiledProgram) -> Findings:
    """Calls, reshards and edges of a plan are right; what is found of its calls."""
    operators, reshards = prove_operators(program.best), prove_reshards(program.program)
    for part in (operators, reshards, check_edges(program.program, program.best)):
        assert part.ok, part.failures
    assert operators.counts["calls of the plan"] and reshards.counts["kinds of collective"]
    return operators


@pytest.mark.parametrize(
    ("name", "factory", "limits"),
    [
        ("llama_gqa", {}, {"dp": 2, "cp": 2, "tp": 2, "context": "ring"}),
        pytest.param("llama", {}, {"dp": 1, "cp": 8, "context": "all_gather"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"dropout": 0.1}, {"dp": 2, "ttp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("t5", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("bert", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("vit", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_collective_operators_and_other_families(name: str, factory: dict[str, Any], limits: dict[str, Any]) -> None:
    check(compiled(name, "8 h100-sxm", factory, **limits))


def test_experts_are_among_what_is_run() -> None:
    lowerings = {o.lowering for option in mixture().best.assignment.operators.values() for o in option.axes}
    assert "routed" in lowerings
    assert not any("expert" in text for text in check(mixture()).gaps)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 3), ("zero-bubble-v", None)])
def test_stages_run_where_the_schedule_has_them(schedule: str, chunks: int | None) -> None:
    wanted = placement(schedule, 4, chunks)
    assert pipeline_ranks(schedule, len(wanted), 4) == wanted
