"""Defects that are planted in a program are found, and their places named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autopar.certify.decisions import check_decisions
from autopar.certify.edges import check_edges
from autopar.certify.messages import prove_messages
from autopar.certify.reshards import prove_reshards
from autopar.certify.schedules import check_schedule
from codegen.program import Call, Program, Raw, Reshard, Var
from codegen.runtime import transfer
from tests.autopar.certify.programs import dense, megatron, mixture, pipeline, unlike


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
    findings = check_edges(program.program.map(defect), program.best)
    assert not findings.ok
    assert all("LlamaDecoderLayer" in text for text in findings.failures), findings.failures


def test_a_wrong_reshard_is_caught() -> None:
    """A sum over ranks whose gradient is not summed: forward right, backward wrong."""
    program = megatron()

    def forgetful(stage_program: Program) -> Program:
        layer = stage_program.layers[0]
        body = tuple(
            replace(s, method="first_rank_grad") if isinstance(s, Reshard) and s.method == "for_use" else s
            for s in layer.body
        )
        assert body != layer.body
        return replace(stage_program, layers=(replace(layer, body=body), *stage_program.layers[1:]))

    findings = prove_reshards(program.program.map(forgetful))
    assert not findings.ok and all("R -> Rp by tp.first_rank_grad" in text for text in findings.failures)
    assert "the gradient differs" in findings.failures[0]


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
    findings = check_schedule(replace(program, schedule=lines))
    assert not findings.ok and says in findings.failures[0] and "1f1b" in findings.failures[0]


def changed(program: Program, **fields: Any) -> Program:
    return replace(program, **fields)


def without_sum(program: Program) -> Program:
    """The gradient of the first parameter is not summed over dp."""
    layer = program.layers[0]
    name, spec = next(iter(layer.parameters.items()))
    kept = tuple(pair for pair in spec.placements if pair != ("dp", "Rp"))
    assert kept != spec.placements
    parameters = {**layer.parameters, name: replace(spec, placements=kept)}
    return replace(program, layers=(replace(layer, parameters=parameters), *program.layers[1:]))


def without_layer(program: Program) -> Program:
    """The last layer of a stage is left out, and does not belong to it."""
    (run,) = program.runs
    body = tuple(replace(s, count=s.count - 1) if hasattr(s, "count") else s for s in program.root.body)
    assert body != program.root.body
    return replace(program, runs=(replace(run, paths=run.paths[:-1]),), root=replace(program.root, body=body))


@pytest.mark.parametrize(
    ("defect", "says"),
    [
        (without_sum, "q_proj.weight: the program has"),
        (without_layer, "layers LlamaDecoderLayer that are run: the program has 1, the plan says 2"),
        (lambda p: changed(p, num_micro_batches=1), "num_micro_batches: the program has 1, the plan says 2"),
        (lambda p: changed(p, recompute={"LlamaDecoderLayer": (("full", 2),)}), "recomputation of LlamaDecoderLayer"),
        (lambda p: changed(p, offload_optimizer="host"), "offload_optimizer: the program has host"),
    ],
)
def test_what_is_not_as_the_plan_decided_is_caught(defect: Callable[[Program], Program], says: str) -> None:
    program = dense()
    findings = check_decisions(replace(program, program=program.program.map(defect)))
    assert any(says in text for text in findings.failures), findings.failures


def test_a_stage_on_the_wrong_pipeline_rank_is_caught() -> None:
    program = pipeline(dense())
    stages = tuple(replace(stage, pipeline_rank=1 - stage.pipeline_rank) for stage in program.stages)
    findings = check_decisions(replace(dense(), program=replace(program, stages=stages)))
    assert any("pipeline ranks of stages: the program has (1, 0)" in text for text in findings.failures)


@pytest.mark.parametrize("axis", [Raw("dp"), Raw("self.mesh.joint(('ep', 'tp'))", joint=("ep", "tp")), None])
def test_rows_of_experts_over_the_wrong_ranks_are_caught(axis: Raw | None) -> None:
    program = mixture()

    def elsewhere(stage_program: Program) -> Program:
        layer = stage_program.layers[0]
        body = tuple(
            replace(s, args=(*s.args[:2], *(() if axis is None else (axis,))))
            if isinstance(s, Call) and s.target == "grouped.Routes"
            else s
            for s in layer.body
        )
        assert body != layer.body
        return replace(stage_program, layers=(replace(layer, body=body),))

    assert check_edges(program.program, program.best).ok
    findings = check_edges(program.program.map(elsewhere), program.best)
    assert [text for text in findings.failures if "routes = grouped.Routes: goes over" in text and "over ep" in text]


def test_a_message_to_the_wrong_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    program = pipeline(unlike())
    right = prove_messages(program)
    assert right.ok and right.counts["boxes moved"] > right.counts["distinct ways, there and back"]
    monkeypatch.setattr(transfer, "_choose", lambda rank, holders, source, target, load: source.first_rank)
    findings = prove_messages(program)
    assert findings.failures and all("not get exactly the elements of its part" in text for text in findings.failures)
