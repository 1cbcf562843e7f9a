"""Pins and bans hold in the solved plan; a wrong one says what would be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import ConstraintError
from autopar.frontend.trace import trace
from autopar.ir.placement import R, Rp, S
from autopar.planning.planner import search_plans
from autopar.settings.constraints import Constraints, parse_bytes
from tests.autopar.requests import graph_of, request_for


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("20GiB", 20 * 2**30), ("512 MB", 512 * 10**6), ("1.5kib", 1536), (7, 7), (1e9, 10**9), ("42", 42)],
)
def test_bytes(text: Any, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "20 apples", -1, True, [1], "1.2.3GiB"])
def test_no_bytes(text: Any) -> None:
    with pytest.raises(ConstraintError, match="number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"zeroo": 2}, ["unknown constraint\n  got: 'zeroo'", "did you mean 'zero'?"]),
        ({"sp": 2}, ["unknown constraint\n  got: 'sp'"]),
        ({"dp": 0}, ["dp must be a whole number of at least 1"]),
        ({"tp": "two"}, ["tp must be a whole number", "'two'"]),
        ({"zero": 4}, ["ZeRO stage", "0, 1, 2 or 3"]),
        ({"micro_batches": 1.5}, ["micro_batches", "1.5"]),
        ({"parameters": {"*": {"tp": "S"}}}, ["parameters['*']", "S(dim)"]),
        ({"parameters": {"*": "S(0)"}}, ["parameters['*']", "must map axes to placements"]),
        ({"activations": {"*": {"xp": "R"}}}, ["unknown axis", "xp", "cp or ep or ttp or tp"]),
    ],
)
def test_unreadable_constraints(given: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraints.parse(given)
    assert all(part in str(caught.value) for part in says), str(caught.value)


def test_pattern_that_matches_nothing_names_the_nearest() -> None:
    with pytest.raises(ConstraintError) as caught:
        Constraints.parse({"parameters": {"*.q_projj.weight": {"tp": "R"}}}).check(graph_of("llama"))
    assert "q_proj.weight" in str(caught.value).partition("instead")[2]
    Constraints.parse({"parameters": {"model.layers.2.mlp.*": {"tp": "R"}}}).check(graph_of("llama"))
    Constraints.parse({"activations": {"*.mlp.down_proj": {"tp": "P"}}}).check(graph_of("llama"))


def chosen(**constraints: Any) -> Any:
    return search_plans(request_for("llama", dp=2, tp=2, **constraints)).best


def test_pinned_and_forbidden_parameters() -> None:
    pinned = chosen(parameters={"*.q_proj.weight": {"tp": "S(0)"}, "*.mlp.*": {"tp": "R"}}, zero=0)
    stored = {name: s.placements for (_, name), s in pinned.assignment.parameters.items()}
    assert stored["self_attn.q_proj.weight"][1] == S(0)
    assert all(stored[f"mlp.{n}_proj.weight"][1] in (R, Rp) for n in ("gate", "up", "down"))
    banned = chosen(forbid_parameters={"*.mlp.*": {"tp": "R"}})
    assert all(
        s.placements[1].is_shard for (_, name), s in banned.assignment.parameters.items() if name.startswith("mlp.")
    )


def test_pinned_activations() -> None:
    best = chosen(activations={"*.mlp.up_proj": {"tp": "S(2)"}})
    (output,) = [
        option.outputs[0]
        for key, option in best.assignment.operators.items()
        if best.operators[key].node.module == "mlp.up_proj"
    ]
    assert output[1] == S(2)


@pytest.mark.slow
def test_pins_never_make_a_plan_faster() -> None:
    free = chosen().plan.prediction.step_seconds
    ban = {"forbid_parameters": {"*proj*": {"tp": "S(0)"}}}
    for pins in ({"parameters": {"*.mlp.*": {"tp": "R"}}}, ban, {"zero": 3}):
        assert chosen(**pins).plan.prediction.step_seconds >= free * (1 - 1e-9)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 1, 3])
def test_pinned_zero_stage(zero: int) -> None:
    best = chosen(zero=zero)
    stages = {s.zero for s in best.assignment.parameters.values() if s.placements[0] == Rp}
    assert stages == {zero}


def test_impossible_pin_names_the_legal_ones() -> None:
    with pytest.raises(ConstraintError) as caught:
        chosen(parameters={"*.q_proj.weight": {"tp": "S(7)"}})
    assert "q_proj.weight" in str(caught.value) and "S(0)" in str(caught.value).partition("instead")[2]


def test_one_position_is_cut_by_no_degree() -> None:
    graph = trace(nn.Embedding(4, 2), {"input": torch.zeros(8, 1, dtype=torch.int64)}, lambda out: out.mean())
    with pytest.raises(ConstraintError, match="cp=2, 1 positions") as error:
        Constraints.parse({"cp": 2}).check(graph)
    assert "cp left out" in str(error.value)
