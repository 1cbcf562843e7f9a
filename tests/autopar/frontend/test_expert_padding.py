"""Padded experts: no row goes to padding, which has no gradient, and plans with them are those of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import autopar
from autopar.frontend.padding.experts import with_whole_shares
from autopar.frontend.trace import trace
from autopar.plan import Plan
from examples.zoo import ZOO

IDEAL = str(Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ideal.toml")


def of_six_experts() -> nn.Module:
    """A tiny Qwen3-MoE, whose layers are one class."""
    torch.manual_seed(0)
    config = ZOO["qwen3_moe"].build().model.config
    config.num_experts = 6
    return transformers.Qwen3MoeForCausalLM(config)


def test_every_weight_of_experts_gets_as_many_more() -> None:
    example = ZOO["qwen3_moe"].build()
    graph = trace(of_six_experts(), example.inputs, example.loss_fn)
    longer = with_whole_shares(graph, 4)
    paddings = {p.name: p.padding for p in longer.parameters if p.padding}
    assert longer.experts_padded_to == 4
    assert set(paddings) == {p.name for p in graph.parameters if ".experts." in p.name} and set(paddings.values()) == {
        2
    }
    for multiple in (1, 2, 3, 6, 8):  # divides them, or is more than there are
        assert with_whole_shares(graph, multiple) is graph


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"ep": 4}, {"ep": 2, "tp": 2, "etp": 1, "zero": 1}], ids=str)
def test_programs_with_padded_experts_train_as_one_process_does(pins: dict[str, int]) -> None:
    example = ZOO["qwen3_moe"].build()
    given = {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
    report = autopar.verify(of_six_experts(), IDEAL, constraints=pins, **given)
    assert report.ok(1e-5), report
    compiled = autopar.compile(of_six_experts(), IDEAL, constraints=pins, **given)
    assert "padding=2" in compiled.source and "Param((6, " in compiled.source
    again = autopar.compile(of_six_experts(), IDEAL, plan=Plan.from_yaml(compiled.plan.to_yaml()), **given)
    assert again.source == compiled.source
