"""Calls with names compute what the calls that they stand for did: the same bits, forward and backward."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.frontend.inputs import name_inputs
from autopar.running.weights import ValueSource
from codegen.check_program import check_types
from codegen.saved_folder.modules import imported_modules
from codegen.source.emit import Words, emit_classes, emit_model
from codegen.source.idioms import with_idioms
from codegen.source.program_source import emit_program
from examples.models import EXAMPLES

CASES: list[tuple[str, str, set[str]]] = [
    ("llama", "fp32", {"rms_norm", "rotary", "swiglu", "next_tokens"}),
    ("llama", "bf16", {"rms_norm", "rotary", "swiglu", "next_tokens"}),
    ("gpt2", "fp32", {"gelu_tanh", "next_tokens"}),
    pytest.param("qwen3", "bf16", {"rms_norm", "rotary", "swiglu", "next_tokens"}, marks=pytest.mark.slow),
]


def gradients_of(source: str, compiled: autopar.CompiledProgram, folder: Path) -> dict[str, torch.Tensor]:
    """The loss and all gradients of one step of the program whose model.py is `source`."""
    texts = {"model.py": source, "program.py": emit_program(compiled.program)}
    for name, text in {"__init__.py": "", **texts, **imported_modules(texts)}.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(text)
    sys.path.insert(0, str(folder.parent))
    try:
        program: Any = importlib.import_module(f"{folder.name}.program")
    finally:
        sys.path.remove(str(folder.parent))
    step = program.create_step(program.create_mesh("cpu"), torch.optim.SGD)
    step.load(ValueSource(compiled.model, None, None))
    inputs = EXAMPLES[folder.name.split("_")[0]]().inputs
    loss = step.forward_backward(step.local_batch(name_inputs(compiled.model, inputs, None)))
    return {"loss": loss, **step.gradients()}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize(("name", "precision", "used"), CASES)
def test_the_same_bits_as_written_out(name: str, precision: str, used: set[str], tmp_path: Path) -> None:
    example = EXAMPLES[name]()
    compiled = autopar.compile(
        example.model, "1 cpu", example_inputs=example.inputs, kernels="off", precision=precision
    )
    program: Any = compiled.program
    check_types(with_idioms(program))
    short, long = emit_model(program), emit_classes(program, Words("written out"))
    (line,) = (each for each in short.splitlines() if each.startswith("from .runtime.idioms import "))
    assert set(line.removeprefix("from .runtime.idioms import ").split(", ")) == used and "idioms" not in long
    expected = gradients_of(long, compiled, tmp_path / f"{name}_{precision}_long")
    found = gradients_of(short, compiled, tmp_path / f"{name}_{precision}_short")
    assert found.keys() == expected.keys() and len(found) > 5
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def test_what_would_round_otherwise_is_left_written_out() -> None:
    """Squares as a product, and half precision that is not widened."""

    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            once = self.weight * (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))
            return (self.weight * (once * torch.rsqrt(once.pow(2).mean(-1, keepdim=True) + 1e-6))).sum()

    counts = []
    for precision in ("fp32", "bf16"):
        compiled = autopar.compile(
            Norm(), "1 cpu", example_inputs={"x": torch.randn(4, 8)}, kernels="off", precision=precision
        )
        counts.append(compiled.source.count("rms_norm("))
    assert counts == [1, 0]
