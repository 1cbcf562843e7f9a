"""Certificates: what they prove of plans that are right, and that planted defects are found and named."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import autopar
from autopar.certify.edges import check_edges
from autopar.certify.miniature import axis_sets
from autopar.certify.operators import prove_operators
from autopar.certify.reshards import prove_reshards, ways_of
from autopar.certify.schedules import check_schedule
from autopar.cli import app
from autopar.compiled import CompiledProgram
from autopar.rules import register_rule
from autopar.rules.registry import default_registry
from codegen.program import PipelineProgram, Program, Reshard, Var
from examples.models import EXAMPLES


def compiled(name: str, cluster: str, factory: dict[str, Any] | None = None, **limits: Any) -> CompiledProgram:
    example = EXAMPLES[name](**(factory or {}))
    return autopar.compile(
        example.model, cluster, example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=limits
    )


@cache
def dense() -> CompiledProgram:
    """Grouped heads under every axis that a dense model has, as a pipeline."""
    return compiled("llama_gqa", "8 h100-sxm", {"layers": 4}, pp=2, dp=2, tp=2, micro_batches=2, schedule="1f1b")


@cache
def megatron() -> CompiledProgram:
    """Tensor parallelism as Megatron has it, which a model as small as this would not choose."""
    cut = {f"*.{name}.weight": {"tp": "S(0)"} for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")}
    cut |= {f"*.{name}.weight": {"tp": "S(1)"} for name in ("o_proj", "down_proj")}
    return compiled("llama", "2 h100-sxm", None, dp=1, tp=2, parameters=cut)


@cache
def mixture() -> CompiledProgram:
    return compiled("mixtral", "8 h100-sxm", None, dp=4, ep=2, tp=2, micro_batches=1)


@pytest.fixture
def rules() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = dict(default_registry().additions)
    yield
    default_registry().additions.clear()
    default_registry().additions.update(before)


def test_a_right_plan_is_proven_part_by_part() -> None:
    program = dense()
    operators, reshards = prove_operators(program.best), prove_reshards(program.program)
    edges, schedule = check_edges(program.program, program.best), check_schedule(pipeline(program))
    for part in (operators, reshards, edges, schedule):
        assert part.ok, part.failures
    assert operators.counts["calls of the plan"] == len(program.best.assignment.operators)
    assert operators.not_proven == ()
    assert operators.counts["runs, forward and backward"] >= 40
    assert operators.largest_error is not None and operators.largest_error < 1e-5
    ways = {str(way) for each in program.program.programs for way in ways_of(each)}
    assert ways and reshards.counts["ways of values from placements to others"] >= len(ways)
    assert reshards.largest_error is not None and 0 <= reshards.largest_error < 1e-12
    assert edges.counts["edges"] > 300
    assert schedule.counts["forwards"] == schedule.counts["whole backwards"] == 2 * 2
    assert schedule.counts["messages sent and taken"] == 4  # one activation and one gradient of each micro-batch


@pytest.mark.parametrize(
    ("name", "factory", "limits"),
    [
        ("mixtral", {}, {"dp": 4, "ep": 2, "tp": 2, "micro_batches": 1}),
        ("llama_gqa", {}, {"dp": 2, "cp": 2, "tp": 2, "context": "ring"}),
        pytest.param("llama", {}, {"dp": 1, "cp": 8, "context": "all_gather"}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"dropout": 0.1}, {"dp": 2, "ttp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("t5", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("bert", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("vit", {}, {"dp": 4, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_collective_operators_and_other_families(name: str, factory: dict[str, Any], limits: dict[str, Any]) -> None:
    program = compiled(name, "8 h100-sxm", factory, **limits)
    for part in (prove_operators(program.best), prove_reshards(program.program)):
        assert part.ok, part.failures
        assert part.counts["calls of the plan" if part.subject == "operators" else "kinds of collective"]
    edges = check_edges(program.program, program.best)
    assert edges.ok, edges.failures


def test_experts_and_ring_attention_are_among_what_is_run() -> None:
    lowerings = {o.lowering for option in mixture().best.assignment.operators.values() for o in option.axes}
    assert "routed" in lowerings
    assert not any("expert" in text for text in prove_operators(mixture().best).not_proven)


# --- planted defects --------------------------------------------------------------------------------------------------


def test_a_wrong_rule_is_caught(rules: None) -> None:
    """Registered as any user's rule is: SiLU is not linear, so SiLU of partial sums is no partial sum of SiLU."""
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    program = compiled("llama", "2 h100-sxm", None, dp=1, tp=2, activations={"*.act_fn": {"tp": "P"}})
    assert any(
        axis.label == "P" and program.best.operators[key].node.op == "aten.silu.default"
        for key, option in program.best.assignment.operators.items()
        for axis in option.axes
    ), "the plan uses the wrong option"
    found = prove_operators(program.best)
    assert not found.ok
    assert all("aten.silu.default under tp=P" in text and "differs" in text for text in found.failures)
    assert found.failures[0].startswith("LlamaDecoderLayer.silu")


def without_reshard(program: Program) -> Program:
    """The program with the first reshard of its layer class left out."""
    layer = program.layers[0]
    dropped = next(statement for statement in layer.body if isinstance(statement, Reshard))
    body = tuple(statement for statement in layer.body if statement is not dropped)
    return replace(program, layers=(replace(layer, body=body), *program.layers[1:]))


def relabelled(program: Program) -> Program:
    """Worse: the reshard is left out, and what reads it reads its source, so that every name is there."""
    layer = program.layers[0]
    dropped = next(s for s in layer.body if isinstance(s, Reshard))

    def with_source(value: Any) -> Any:
        if isinstance(value, Var) and (value.name, value.type) == (dropped.result.name, dropped.result.type):
            return dropped.source
        return tuple(map(with_source, value)) if isinstance(value, tuple) else value

    body = []
    for statement in layer.body:
        if statement is dropped:
            continue
        if isinstance(statement, Reshard):
            body.append(replace(statement, source=with_source(statement.source)))
        else:
            members = tuple(replace(m, args=with_source(m.args)) for m in statement.members)
            body.append(replace(statement, args=with_source(statement.args), members=members))
    return replace(program, layers=(replace(layer, body=tuple(body)), *program.layers[1:]))


@pytest.mark.parametrize("defect", [without_reshard, relabelled])
def test_a_dropped_reshard_is_caught(defect: Callable[[Program], Program]) -> None:
    program = megatron()
    assert check_edges(program.program, program.best).ok
    found = check_edges(program.program.map(defect), program.best)
    assert not found.ok
    assert all("LlamaDecoderLayer" in text for text in found.failures), found.failures


def test_a_wrong_reshard_is_caught() -> None:
    """A sum over ranks whose gradient is not summed: forward right, backward wrong."""
    program = megatron()

    def forgetful(each: Program) -> Program:
        layer = each.layers[0]
        body = tuple(
            replace(s, method="first_rank_grad") if isinstance(s, Reshard) and s.method == "for_use" else s
            for s in layer.body
        )
        assert body != layer.body
        return replace(each, layers=(replace(layer, body=body), *each.layers[1:]))

    found = prove_reshards(program.program.map(forgetful))
    assert not found.ok and all("R -> Rp by tp.first_rank_grad" in text for text in found.failures)
    assert "the gradient differs" in found.failures[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda line: line.replace("B1.0 ", "", 1), "need F and B"),
        (lambda line: "B1.0 " + line.replace("B1.0 ", "", 1), "never"),
        (lambda line: line.replace("F1.1", "F1.0", 1), "F1.0 is there twice"),
    ],
)
def test_a_wrong_schedule_line_is_caught(wrong: Callable[[str], str], says: str) -> None:
    program = pipeline(dense())
    lines = (program.schedule[0], wrong(program.schedule[1]))
    assert lines != program.schedule
    found = check_schedule(replace(program, schedule=lines))
    assert not found.ok and says in found.failures[0] and "1f1b" in found.failures[0]


def pipeline(program: CompiledProgram) -> PipelineProgram:
    assert isinstance(program.program, PipelineProgram)
    return program.program


# --- certificates -----------------------------------------------------------------------------------------------------


def test_axes_are_paired_in_few_miniatures() -> None:
    assert axis_sets(dense()) == [("pp", "dp", "tp")]
    assert axis_sets(mixture()) == [("dp", "ep", "tp")]


def test_the_command_writes_the_certificate_beside_the_plan(tmp_path: Path) -> None:
    words = ["examples.models:llama", "--cluster", "4 h100-sxm", "--set", "tp=2", "--no-train", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 0, result.output
    data = yaml.safe_load((tmp_path / "certificate.yaml").read_text())
    lines = (tmp_path / "plan.yaml").read_text().splitlines(keepends=True)
    assert data["certificate"] == "passed" and data["ranks"] == 4
    assert data["plan_sha256"] == hashlib.sha256("".join(lines[:-1]).encode()).hexdigest()
    assert data["plan_sha256"] in lines[-1], "the plan file says so itself"
    assert data["proven"]["operators"]["wrong"] == 0 and data["versions"]["torch"] == torch.__version__
    assert any("no miniature was asked for" in text for text in data["not_proven"])


def test_a_failed_certificate_ends_with_1(tmp_path: Path, rules: None) -> None:
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    limits = tmp_path / "limits.yaml"
    limits.write_text('{dp: 1, tp: 2, activations: {"*.act_fn": {tp: P}}}')
    words = ["examples.models:llama", "--cluster", "2 h100-sxm", "--constraints", str(limits), "--no-train"]
    result = CliRunner().invoke(app, ["certify", *words])
    assert result.exit_code == 1, result.output
    assert "FAILED" in result.output and "aten.silu.default" in result.output


@pytest.mark.slow
@pytest.mark.distributed
def test_a_miniature_trains_with_the_plans_own_decisions(tmp_path: Path) -> None:
    found = dense().certify()
    assert found.ok, found.failures
    part = found.part("miniature")
    assert part.counts["miniatures trained"] == 1 and part.counts["processes of the largest"] == 8
    assert part.counts["calls with the plan's option"] == len(dense().best.operators)
    assert part.largest_error is not None and 0 < part.largest_error < 1e-5
    assert part.worst.startswith("pp2 x dp2 x tp2, 1f1b")
    assert yaml.safe_load(found.write(tmp_path).read_text())["proven"]["miniature"]["wrong"] == 0
    assert "Certificate of" in str(found)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_wrong_rule_fails_the_certificate_of_a_plan_that_uses_it(rules: None) -> None:
    register_rule("aten.silu.default", "b* -> b*", linear=("self",))
    program = compiled("llama", "2 h100-sxm", None, dp=1, tp=2, activations={"*.act_fn": {"tp": "P"}})
    found = program.certify()
    assert not found.ok and not found.part("operators").ok
    assert any("silu" in failure for failure in found.failures)
