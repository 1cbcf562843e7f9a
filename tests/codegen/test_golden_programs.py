"""What is emitted, line by line: the product's face. `--update-golden` rewrites the files; read the difference."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import autopar
from examples.models import EXAMPLES

IDEAL = str(Path(__file__).resolve().parents[2] / "examples" / "clusters" / "ideal.toml")
MESHES = {
    "dp4": {"dp": 4, "zero": 0},
    "dp4_zero3": {"dp": 4, "zero": 3},
    "tp4": {"tp": 4},
    "dp2_tp2": {"dp": 2, "tp": 2, "zero": 2},
}
MODELS = {"mlp": {}, "gpt2": {"dropout": 0.1}, "llama": {"layers": 3}}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_program(model, mesh, golden):
    example = EXAMPLES[model](**MODELS[model])
    compiled = autopar.compile(
        example.model, IDEAL, example_inputs=example.inputs, loss_fn=example.loss_fn, constraints=MESHES[mesh]
    )
    ast.parse(compiled.source)
    golden(f"programs/{model}_{mesh}.py.txt", compiled.source)


@pytest.mark.parametrize("mesh", ["dp2_tp2"])
@pytest.mark.parametrize("model", MODELS)
def test_plan_file(model, mesh, golden):
    example = EXAMPLES[model](**MODELS[model])
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
    compiled = autopar.compile(example.model, IDEAL, constraints=MESHES[mesh], **options)
    text = compiled.plan.to_yaml()
    golden(f"plans/{model}_{mesh}.yaml", text)
    again = autopar.compile(example.model, IDEAL, plan=autopar.Plan.from_yaml(text), **options)
    assert again.source == compiled.source


def test_same_input_same_plan_byte_for_byte():
    def text() -> str:
        example = EXAMPLES["llama"]()
        compiled = autopar.compile(example.model, IDEAL, example_inputs=example.inputs, constraints={"dp": 2, "tp": 2})
        return compiled.plan.to_yaml() + compiled.source

    assert text() == text()
