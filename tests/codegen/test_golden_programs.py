"""What is emitted, line by line: the product's face. `--update-golden` rewrites the files; read the difference."""

from __future__ import annotations

import ast
from functools import cache
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


# The fast tests have each mesh once, and the one with everything for every model.
SLOW = {("gpt2", "dp4"), ("gpt2", "tp4"), ("llama", "dp4"), ("llama", "dp4_zero3")}
CASES = [
    pytest.param(model, mesh, marks=pytest.mark.slow if (model, mesh) in SLOW else ())
    for model in MODELS
    for mesh in MESHES
]


def compiled(model, **options):
    example = EXAMPLES[model](**MODELS[model])
    return autopar.compile(example.model, IDEAL, example_inputs=example.inputs, loss_fn=example.loss_fn, **options)


@cache
def on_mesh(model, mesh):
    return compiled(model, constraints=MESHES[mesh])


@pytest.mark.parametrize(("model", "mesh"), CASES)
def test_program(model, mesh, golden):
    source = on_mesh(model, mesh).source
    ast.parse(source)
    golden(f"programs/{model}_{mesh}.py.txt", source)


@pytest.mark.parametrize("mesh", ["dp2_tp2"])
@pytest.mark.parametrize("model", MODELS)
def test_plan_file(model, mesh, golden):
    program = on_mesh(model, mesh)
    text = program.plan.to_yaml()
    golden(f"plans/{model}_{mesh}.yaml", text)
    assert compiled(model, plan=autopar.Plan.from_yaml(text)).source == program.source


def test_same_input_same_plan_byte_for_byte():
    one, other = on_mesh("llama", "dp2_tp2"), compiled("llama", constraints=MESHES["dp2_tp2"])
    assert one.plan.to_yaml() == other.plan.to_yaml() and one.source == other.source
