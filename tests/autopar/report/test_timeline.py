"""The report of a pipeline and its trace: against the plan, the simulation and the prediction."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.ir.chain import chain
from autopar.ir.plan_data import StagePlan
from autopar.models.loading import load_model
from autopar.report.figures import capacity_bytes
from autopar.report.stages import picture, stage_rows, units_words
from autopar.report.timeline import simulation_of, write_timeline
from autopar.strategies.trace_file import trace_of

SIZES = {"layers": 5, "width": 512, "num_heads": 8, "seq_len": 64, "batch_size": 16, "vocab_size": 1024}
CASES = {
    "one": {"pp": 1, "dp": 2, "tp": 2, "micro_batches": 4, "recompute": "none", "offload": "none"},
    "1f1b": {"pp": 2, "dp": 2, "tp": 1, "micro_batches": 4, "schedule": "1f1b", "recompute": "full"},
    "zero-bubble": {"pp": 4, "dp": 1, "tp": 1, "micro_batches": 8, "schedule": "zero-bubble"},
    "interleaved": {"pp": 2, "dp": 2, "tp": 1, "micro_batches": 4, "schedule": "interleaved", "memory": "20GiB"},
}


@pytest.fixture(
    scope="module",
    params=["one", "1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zero-bubble", "interleaved"))],
)
def program(request: pytest.FixtureRequest) -> CompiledProgram:
    loaded = load_model("examples.models:gpt2", meta=True, **SIZES)
    return autopar.compile(
        loaded.model,
        "4 a100-80g",
        example_inputs=loaded.inputs,
        loss_fn=loaded.loss_fn,
        constraints=CASES[request.param],
    )


def by_pipeline_rank(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found.setdefault(event["tid"], []).append(event)
    return found


def test_trace_ends_with_the_predicted_step(program: CompiledProgram, tmp_path: Path) -> None:
    trace = json.loads(write_timeline(program, tmp_path / "out.json").read_text())
    lines = by_pipeline_rank(trace)
    assert sorted(lines) == list(range(program.plan.pipeline.num_pipeline_ranks))
    for events in lines.values():
        events.sort(key=lambda e: e["ts"])
        for one, other in pairwise(events):
            assert one["ts"] + one["dur"] <= other["ts"] * (1 + 1e-9) + 1e-6
    end = max(e["ts"] + e["dur"] for events in lines.values() for e in events)
    assert end == pytest.approx(program.plan.prediction.step_seconds * 1e6, rel=1e-9)
    assert {"optimizer"} <= {e["name"] for events in lines.values() for e in events}


def test_every_micro_batch_goes_forward_and_backward(program: CompiledProgram) -> None:
    trace = trace_of(simulation_of(program))
    names = [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"]
    stages = max(len(program.plan.pipeline.stages), 1)
    for stage in range(stages):
        for micro in range(program.plan.num_micro_batches):
            assert names.count(f"F{stage}.{micro}") == 1
            assert names.count(f"B{stage}.{micro}") + names.count(f"I{stage}.{micro}") == 1


def test_stages_are_told_in_words(program: CompiledProgram) -> None:
    plan, graph = program.plan, program.best.graph
    rows = list(stage_rows(plan, graph, simulation_of(program)))
    told = [number for row in rows for number in _layers(row.units)]
    assert told == list(range(5))
    assert "wte" in rows[0].units and "lm_head" in rows[-1].units and "loss" in rows[-1].units
    if len(rows) > 1:
        assert [row.stage for row in rows] == list(range(len(plan.pipeline.stages)))
        text = program.report()
        assert (
            f"Schedule: {plan.pipeline.schedule}" in text
            and f"pp = {plan.pipeline.num_pipeline_ranks} pipeline ranks" in text
        )
        assert all(row.units.split(",")[0] in text for row in rows)


def _layers(words: str) -> list[int]:
    found = []
    for first, last in re.findall(r"layers? (\d+)(?:-(\d+))?", words):
        found += range(int(first), int(last or first) + 1)
    return found


def test_words_of_any_cut(program: CompiledProgram) -> None:
    graph = program.best.graph
    count = len(chain(graph))
    whole = units_words(graph, StagePlan(0, count))
    for cut in range(1, count):
        parts = [units_words(graph, StagePlan(*ends)) for ends in ((0, cut), (cut, count))]
        assert [n for part in parts for n in _layers(part)] == _layers(whole)


def test_peak_of_each_pipeline_rank_is_the_prediction(program: CompiledProgram) -> None:
    simulated = simulation_of(program)
    peaks = [sum(kinds.values()) for kinds in simulated.memory]
    assert max(peaks) == pytest.approx(program.plan.prediction.peak_bytes, rel=1e-9)
    budget = program.request.constraints.memory_bytes
    assert capacity_bytes(program) == (budget or program.cluster.device.memory_bytes)
    assert budget in (None, 20 * 2**30)
    assert f"of {'20 GiB' if budget else '79 GiB'} per rank" in program.report()


def test_picture_shows_the_bubble(program: CompiledProgram) -> None:
    """The share of points of a line is the simulated share of idling, but for rounding to columns."""
    simulated = simulation_of(program)
    lines = picture(simulated, 400)
    if program.plan.pipeline.num_pipeline_ranks == 1:
        assert lines == []
        return
    assert len(lines) == program.plan.pipeline.num_pipeline_ranks
    for line, idle in zip(lines, simulated.timeline.bubble_fractions, strict=True):
        assert line.count("·") / len(line) == pytest.approx(idle, abs=0.08)


def test_other_plans_are_said_rightly(program: CompiledProgram) -> None:
    searched = program.report()
    given = autopar.compile(
        program.model,
        program.cluster,
        example_inputs=load_model("examples.models:gpt2", meta=True, **SIZES).inputs,
        plan=program.plan,
    )
    assert "Other plans: none; the plan was given" in given.report()
    assert "the plan was given" not in searched
    assert given.plan.prediction.step_seconds == pytest.approx(program.plan.prediction.step_seconds, rel=1e-9)


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    one, other, out = tmp_path / "one.yaml", tmp_path / "other.yaml", tmp_path / "out.json"
    words = ("examples.models:gpt2", "--cluster", "4 cpu", "--batch", "8")

    def run(*line: str) -> str:
        result = CliRunner().invoke(app, list(line))
        assert result.exit_code == 0, result.output
        return result.output

    run("plan", *words, "--set", "dp=4", "--set", "pp=1", "--out", str(one))
    run("plan", *words, "--set", "pp=2", "--set", "schedule=1f1b", "--set", "micro_batches=2", "--out", str(other))
    compared = run("compare", str(one), str(other))
    assert "pp2" in compared and "1f1b" in compared and "Predicted time of one step" in compared
    anew = run("compare", str(one), str(other), "--model", words[0], "--cluster", "4 cpu")
    pattern = r"one step +(\S+ \S+) +(\S+ \S+)"
    assert re.search(pattern, anew).groups() == re.search(pattern, compared).groups()
    run("report", str(other), "--model", words[0], "--timeline", str(out))
    assert len(by_pipeline_rank(json.loads(out.read_text()))) == 2
    text = run("explain", str(other), "--model", words[0], "--seconds", "1")
    assert "What binds" in text and "You gave this plan; the search finds a faster one" in text
    failed = CliRunner().invoke(app, ["explain", str(one)])
    assert failed.exit_code == 2 and "--model" in failed.output
