"""A plan file holds every decision: written, read, edited and expanded it gives the same choices or a clear error."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from autopar.errors import PlanError
from autopar.ir.mesh import Mesh
from autopar.ir.placement import P, R, Rp, S, Stored
from autopar.ir.plan_data import Prediction
from autopar.plan import Plan
from autopar.rules.rule import AxisOption
from autopar.sharding.assignment import compress, default_option, expand, labels_of
from autopar.sharding.call_options import Option, options_of
from tests.autopar.requests import BATCH, setting

SETTINGS = [
    ("llama", "dp2 x tp2"),
    ("gpt2", "dp2 x tp2"),
    ("bert", "tp4"),
    ("nanogpt", "dp4"),
    ("vit", "tp2"),
    ("opt", "single"),
]


def plan_of(name: str, mesh: str, seed: int) -> Plan:
    it = setting(name, mesh)
    _, assignment = it.assignment(seed)
    scopes = compress(it.graph, it.operators, Mesh.parse(mesh), assignment)
    prediction = Prediction({"forward compute": 0.25, "all_reduce tp": 1e-7}, {"activations": 1e9})
    return Plan(
        it.graph.name, "4 a100-80g", Mesh.parse(mesh), BATCH, 1, "fp32", scopes, prediction,
        (("dp4", 0.5, "slower"), ("tp4", 0.75, "slower still")),
    )  # fmt: skip


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("name", "mesh"), SETTINGS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_choices_survive_compression_and_yaml(name: str, mesh: str, seed: int) -> None:
    it = setting(name, mesh)
    _, assignment = it.assignment(seed)
    plan = plan_of(name, mesh, seed)
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert again.to_yaml() == plan.to_yaml()
    expanded = expand(it.graph, it.operators, again)
    assert expanded.operators == assignment.operators
    assert expanded.parameters == assignment.parameters
    assert expanded.tensors == assignment.tensors


def test_options_with_equal_labels_are_told_apart() -> None:
    """A product is linear in either factor, so it has two options P."""
    it = setting("llama", "tp2")
    plan = 0
    for key, operator in it.operators.items():
        options = options_of(operator, Mesh.parse("tp2"))
        written = [labels_of(options, index) for index in range(len(options))]
        assert len(set(written)) == len(options), key
        plan += any(label.endswith("#2") for labels in written for label in labels)
    assert plan


def test_the_best_plan_is_short() -> None:
    """Most calls follow their inputs: a person reads the ones that do not."""
    it = setting("llama", "dp2 x tp2")
    calls = sum(len(scope.calls) for scope in plan_of("llama", "dp2 x tp2", 0).scopes.values())
    assert calls < len(it.operators) / 3


def test_yaml_reads_like_the_decisions() -> None:
    data = yaml.safe_load(plan_of("llama", "dp2 x tp2", 0).to_yaml())
    assert data["mesh"] == "dp2 x tp2" and data["micro_batches"] == 1
    layer = data["layers"]["LlamaDecoderLayer"]
    assert {"self_attn.q_proj.weight", "mlp.down_proj.weight"} <= layer["parameters"].keys()
    assert all(re.fullmatch(r"dp=\S+ tp=\S+( zero=[123])?", text) for text in layer["parameters"].values())


# --- edits ----------------------------------------------------------------------------------------------------


def edited(change: Callable[[str], str]) -> tuple[str, int]:
    """The file with its first q_proj weight line changed, and that line's number."""
    lines = plan_of("llama", "dp2 x tp2", 0).to_yaml().splitlines()
    number = next(i for i, line in enumerate(lines) if "q_proj.weight" in line)
    lines[number] = change(lines[number])
    return "\n".join(lines), number + 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dp=Q tp=R", "S(dim)"),
        ("dp=R xp=R", "axis=value with axes dp, tp"),
        ("dp=Rp tp=R zero=7", "zero is 0, 1, 2 or 3"),
        ("dp", "axis=value"),
        ("dp=S(a) tp=R", "S(dim)"),
    ],
)
def test_unreadable_entries_name_line_and_alternatives(text: str, says: str) -> None:
    yaml_text, number = edited(lambda line: line.partition(": ")[0] + ": " + text)
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(yaml_text, "my.yaml")
    message = str(caught.value)
    assert f"my.yaml, line {number}: layers.LlamaDecoderLayer.parameters.self_attn.q_proj.weight" in message
    assert says in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.replace("mesh: dp2 x tp2", "mesh: 2 by 2"), "not a mesh"),
        (lambda t: t.replace("autopar_plan: 1", "autopar_plan: 9"), "format 9"),
        (lambda t: t.replace("micro_batches: 1\n", ""), "micro_batches"),
        (lambda t: t.replace("micro_batches: 1\n", "micro_batches: some\n"), "micro_batches"),
        (lambda t: t.replace("global_batch_size: 8\n", "global_batch_size: []\n"), "global_batch_size"),
        (lambda t: t + "\n  : : [", "not valid YAML"),
        (lambda t: "just text", "not a plan"),
        (lambda t: re.sub(r"(?s)top:.*?layers:", "top: none\nlayers:", t), "top"),
    ],
)
def test_broken_files_are_plan_errors(change: Callable[[str], str], says: str) -> None:
    text = plan_of("llama", "dp2 x tp2", 0).to_yaml()
    assert change(text) != text
    with pytest.raises(PlanError) as caught:
        Plan.from_yaml(change(text))
    assert says in str(caught.value)


def with_layer(**changes: dict[str, Any]) -> Plan:
    plan = plan_of("llama", "dp2 x tp2", 0)
    name = "LlamaDecoderLayer"
    merged = {key: {**getattr(plan.scopes[name], key), **value} for key, value in changes.items()}
    return replace(plan, scopes={**plan.scopes, name: replace(plan.scopes[name], **merged)})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"calls": {"linear": ("nonsense", "R")}}, ["linear", "dp=nonsense", "instead"]),
        ({"calls": {"lineal": ("R", "R")}}, ["no call named 'lineal'", "linear"]),
        ({"tensors": {"nothing": (R, R)}}, ["no call named 'nothing'"]),
        (
            {"parameters": {"self_attn.q_proj.weight": Stored((R, S(2)))}},
            ["does not divide", "q_proj", "tp=S(2)", "(512, 512)"],
        ),
        (
            {"parameters": {"self_attn.q_proj.weight": Stored((R, S(0)), 3)}},
            ["q_proj", "is not a legal placement", "dp=R tp=S(0)", "dp=Rp tp=S(0)"],
        ),
        ({"parameters": {"self_attn.r_proj.weight": Stored((R, R))}}, ["r_proj", "not in the model"]),
    ],
)
def test_decisions_that_do_not_fit_the_model(changes: dict[str, Any], says: list[str]) -> None:
    it = setting("llama", "dp2 x tp2")
    with pytest.raises(PlanError) as caught:
        expand(it.graph, it.operators, with_layer(**changes))
    assert all(part in str(caught.value) for part in says), str(caught.value)


def test_missing_decisions_are_named() -> None:
    it = setting("llama", "dp2 x tp2")
    plan = with_layer()
    layer = plan.scopes["LlamaDecoderLayer"]
    fewer = {n: s for n, s in layer.parameters.items() if "up_proj" not in n}
    short = replace(plan, scopes={**plan.scopes, "LlamaDecoderLayer": replace(layer, parameters=fewer)})
    with pytest.raises(PlanError, match="leaves out mlp.up_proj.weight"):
        expand(it.graph, it.operators, short)
    with pytest.raises(PlanError, match="no decisions for layer class 'LlamaDecoderLayer'"):
        expand(it.graph, it.operators, replace(plan, scopes={"": plan.scopes[""]}))


def test_an_edit_is_followed_by_the_calls_after_it() -> None:
    """A weight replicated by hand: its call's default follows, and the plan is still whole."""
    it = setting("llama", "dp2 x tp2")
    plan = with_layer(parameters={f"mlp.{n}_proj.weight": Stored((Rp, R)) for n in ("gate", "up", "down")})
    layer = plan.scopes["LlamaDecoderLayer"]
    bare = replace(layer, calls={}, tensors={})
    assignment = expand(it.graph, it.operators, replace(plan, scopes={**plan.scopes, "LlamaDecoderLayer": bare}))
    for (scope, name), option in assignment.operators.items():
        node = it.operators[scope, name].node
        if node.module.startswith("mlp.") and node.op == "aten.linear.default":
            assert not option.inputs[1][1].is_shard, name


def test_default_option_moves_the_least() -> None:
    """From S(0): staying is free, a gather moves all of it, and an unreachable option is never taken."""
    stay = Option((AxisOption("m", (S(0),), (S(0),)),), ((S(0),),), ((S(0),),))
    gather = Option((AxisOption("R", (R,), (R,)),), ((R,),), ((R,),))
    partial = Option((AxisOption("P", (P,), (P,)),), ((P,),), ((P,),))
    assert default_option((gather, stay, partial), ((S(0),),), (4,), (1.0,)) == 1
    assert default_option((stay, gather, partial), ((R,),), (4,), (1.0,)) == 1
    assert default_option((gather, partial, stay), ((P,),), (4,), (1.0,)) == 1
