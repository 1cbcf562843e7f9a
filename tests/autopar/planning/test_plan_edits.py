"""An edited plan is one that the search could have found, or is refused with its line and what is legal there."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.plan import Plan
from autopar.planning.user_plans import check_agreement
from autopar.settings.constraints import Constraints
from autopar.sharding.assignment import compress, expand
from autopar.sharding.call_options import options_of
from autopar.sharding.legal_placements import LegalPlacements
from autopar.sharding.validate_plan import check_scopes
from benchmarks.faults import plans
from tests.autopar.requests import BATCH, setting

BLOCK = "LlamaDecoderLayer"


@cache
def text_of(name: str, mesh: str) -> str:
    it = setting(name, mesh)
    scopes = compress(it.graph, it.operators, Mesh.parse(mesh), it.assignment(0)[1])
    return Plan(it.graph.name, "4 a100-80g", Mesh.parse(mesh), BATCH, 1, "fp32", scopes).to_yaml()


@cache
def offers_of(name: str, mesh: str) -> LegalPlacements:
    it, where = setting(name, mesh), Mesh.parse(mesh)
    return LegalPlacements(
        it.graph, {key: options_of(operator, where) for key, operator in it.operators.items()}, where
    )


def expanded(data: Any, name: str = "llama", mesh: str = "dp2 x tp2") -> None:
    plan = Plan.from_yaml(yaml.safe_dump(data, sort_keys=False), "my.yaml")
    check_scopes(setting(name, mesh).graph, offers_of(name, mesh), plan)


def refusal(data: Any, name: str = "llama", mesh: str = "dp2 x tp2") -> str:
    """The error's text, which has to name the file and the line of what it is about."""
    with pytest.raises(PlanError) as caught:
        expanded(data, name, mesh)
    message = str(caught.value)
    found = re.match(r"my\.yaml, line (\d+): ([^\s:]+)", message)
    assert found, message
    line = yaml.safe_dump(data, sort_keys=False).splitlines()[int(found.group(1)) - 1]
    last = found.group(2).rpartition(".")[2]
    assert last in line or last.isdigit() or found.group(1) == "1", (message, line)
    return message


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "dp2 x tp2"),
        pytest.param("gpt2", "tp4", marks=pytest.mark.slow),
        pytest.param("vit", "dp4", marks=pytest.mark.slow),
    ],
)
def test_no_parameter_buffer_or_input_may_be_a_partial_sum(name: str, mesh: str) -> None:
    """Every one of them, on every axis: each was accepted, and trained to something else."""
    data, tried = yaml.safe_load(text_of(name, mesh)), 0
    for scope, kind in itertools.product((data["top"], *data["layers"].values()), ("parameters", "inputs")):
        if kind == "inputs" and scope is not data["top"]:
            continue
        for key, text in scope[kind].items():
            for part in text.split():
                axis = part.partition("=")[0]
                if axis == "zero":
                    continue
                scope[kind][key] = re.sub(rf"{axis}=\S+", f"{axis}=P", text.partition(" zero")[0])
                message = refusal(data, name, mesh)
                assert f"{kind}.{key}" in message and "instead" in message, message
                tried += 1
                scope[kind][key] = text
    expanded(data, name, mesh)
    assert tried >= 18


def layer(data: Any) -> Any:
    return data["layers"][BLOCK]


EDITS = [
    (lambda d: d["top"].pop("inputs"), "leaves out input_ids, labels"),
    (lambda d: d["top"]["inputs"].update(input_ids="dp=Rp tp=R"), "is not a legal placement"),
    (lambda d: d["top"]["inputs"].update(input_ids="dp=S(1) tp=R"), "is not a legal placement"),
    (lambda d: d["top"]["inputs"].update(nothing="dp=R tp=R"), "no input named 'nothing'"),
    (lambda d: layer(d)["inputs"].pop("hidden"), "leaves out hidden"),
    (lambda d: layer(d)["inputs"].update(hidden="dp=S(0) tp=S(9)"), "does not divide into equal shards"),
    (lambda d: layer(d)["parameters"].update(hidden="dp=R tp=R"), "no parameter or buffer named 'hidden'"),
    (lambda d: layer(d)["parameters"].update({"mlp.up_proj.weight": "dp=S(0) tp=R"}), "is not a legal placement"),
    (lambda d: layer(d)["tensors"].update({"linear[7]": "dp=R tp=R"}), "linear"),
    (lambda d: layer(d)["tensors"].update({"linear_6": "dp=S(0) tp=S(0)"}), "no result with several uses"),
    (lambda d: d["layers"].update(Blocks=d["layers"].pop(BLOCK)), "no decisions for layer class"),
    (lambda d: d["layers"].update(Blocks=layer(d)), "no layer class 'Blocks'"),
    (lambda d: d["layers"].update({7: d["layers"].pop(BLOCK)}), "is not a name"),
    (lambda d: d.update(precision="fp17"), "is unknown"),
    (lambda d: d.update(precision=32), "is unknown"),
    (lambda d: d.update(micro_batches="1"), "not a count"),
    (lambda d: d.update(mesh=3), "not a line of text"),
    (lambda d: d.update(mesh="dp2 x sp2"), "unknown axis"),
    (lambda d: d.update(mesh="dp0 x tp4"), "one rank at least"),
    (lambda d: d.update(model="x\nimport os"), "not a line of text"),
    (lambda d: d.update(modle="x"), "did you mean 'model'"),
    (lambda d: d["top"].update(input={}), "did you mean 'inputs'"),
    (lambda d: d.update(predicted_seconds={"forward compute": "fast"}), "not a number"),
    (lambda d: d.update(predicted_bytes={"parameters": float("nan")}), "not a number"),
    (lambda d: d.update(predicted_bytes_by_position=True), "not a list"),
    (lambda d: d.update(runner_ups=[{"plan": "x"}]), "seconds, why is missing"),
    (lambda d: d.update(pipeline={"stages": True}), "not a list"),
    (lambda d: d.update(pipeline={"stages": [{"blocks": "0-²"}]}), "not a range"),
    (lambda d: d.update(pipeline={"stages": [{"blocks": "0-9", "recompute": {BLOCK: "full ²"}}]}), "cannot read"),
    (lambda d: d.update(pipeline={"stages": [{"blocks": "0-9"}], "schedule": "none"}), "is unknown"),
    (lambda d: d.update(pipeline={"stages": [{"blocks": "0-9"}], "offload": "nvme:x"}), "is unknown"),
    (lambda d: d.update(pipeline={"stages": [{"blocks": "0-9"}], "offload": 'nvme:/x"\nimport os'}), "line of text"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), EDITS, ids=range(len(EDITS)))
def test_edits_that_mean_nothing(change: Any, says: str) -> None:
    data = yaml.safe_load(text_of("llama", "dp2 x tp2"))
    change(data)
    assert says in refusal(data)


def test_a_parameter_that_is_not_trained_has_no_zero_stage() -> None:
    it = setting("gpt2", "dp4")
    frozen = {p.name for scope in it.graph.body if hasattr(scope, "layer") for p in scope.layer.parameters} - {
        p.name for scope in it.graph.body if hasattr(scope, "layer") for p in scope.layer.parameters
        if p.meta.requires_grad
    }  # fmt: skip
    data = yaml.safe_load(text_of("gpt2", "dp4"))
    for scope in data["layers"].values():
        for name in frozen & scope["parameters"].keys():
            scope["parameters"][name] = "dp=Rp zero=2"
            assert "not trained" in refusal(data, "gpt2", "dp4") or "is not a legal placement" in refusal(
                data, "gpt2", "dp4"
            )
    weight = next(iter(data["top"]["parameters"]))
    data["top"]["parameters"][weight] = "dp=R zero=2"
    assert "instead" in refusal(data, "gpt2", "dp4")


@pytest.mark.parametrize("mesh", ["dp2 x tp2", "tp4", "dp4"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_the_search_can_find_is_accepted(mesh: str, seed: int) -> None:
    it = setting("gpt2", mesh)
    assignment = it.assignment(seed)[1]
    scopes = compress(it.graph, it.operators, Mesh.parse(mesh), assignment)
    plan = Plan(it.graph.name, "4 a100-80g", Mesh.parse(mesh), BATCH, 1, "fp32", scopes)
    assert expand(it.graph, it.operators, Plan.from_yaml(plan.to_yaml())).operators == assignment.operators


# --- what is asked for beside a plan ----------------------------------------------------------------------------------


def linear_plan() -> Plan:
    inputs = {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)}
    program = autopar.compile(
        nn.Linear(4, 4), "2 a100-80g", example_inputs=inputs, loss_fn=nn.functional.mse_loss, constraints={"dp": 2}
    )
    return program.plan


def test_contradictions_of_a_plan_and_what_is_asked_for_beside_it() -> None:
    plan = linear_plan()
    check_agreement(plan, Constraints.parse({"dp": 2, "tp": 1, "micro_batches": 1, "recompute": "none"}), 4)
    for pins, rows, says in (
        ({"tp": 2}, None, "tp=2, and the plan has 1"),
        ({"micro_batches": 2}, None, "micro_batches=2, and the plan has 1"),
        ({"offload": "optimizer"}, None, "offload=optimizer, and the plan has none"),
        ({}, 8, "global_batch_size=8, and the plan has 4"),
    ):
        with pytest.raises(PlanError, match=says):
            check_agreement(plan, Constraints.parse(pins), rows)


def test_a_plan_of_another_precision_is_refused() -> None:
    plan = replace(linear_plan(), precision="bf16")
    inputs = {"input": torch.ones(4, 4), "target": torch.zeros(4, 4)}
    with pytest.raises(PlanError, match="another precision"):
        autopar.compile(nn.Linear(4, 4), "2 a100-80g", example_inputs=inputs, loss_fn=nn.functional.mse_loss, plan=plan)


# --- the campaign -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed
def test_mutants_of_plans_are_refused_or_right() -> None:
    """A part of `python -m benchmarks.faults plans`: what is accepted is run beside the eager model."""
    for case in plans.cases(28, seed=5):
        result = case.run()
        assert result.outcome in ("right", "refused"), (case.name, result)
