"""A dry run takes every program that runs, and catches what was planted in one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InternalError
from autopar.lowering import assembly
from autopar.lowering.assembly import files_of
from autopar.lowering.dry_run import dry_run
from codegen.schemas import EmissionError
from examples.models import EXAMPLES

IDEAL = str(Path(__file__).resolve().parents[3] / "examples" / "clusters" / "ideal.toml")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.proj, self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        heads = (part.view(rows, length, 4, 8).transpose(1, 2) for part in self.qkv(self.norm(x)).split(32, 2))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(48, 32), nn.Linear(32, 48)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@cache
def compiled(**pins: Any) -> Any:
    batch = {"ids": torch.zeros(8, 16, dtype=torch.long), "targets": torch.zeros(8, 16, dtype=torch.long)}
    return autopar.compile(Net(), IDEAL, example_inputs=batch, constraints=pins, kernels="off")


sharded = partial(compiled, dp=2, tp=2)


def dropped(text: str, word: str) -> str:
    """The text without its first line with `word`."""
    lines = text.splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if word in line)
    return "".join(lines[:at] + lines[at + 1 :])


def swapped(text: str, old: str, new: str) -> str:
    assert old in text, (old, text)
    return text.replace(old, new, 1)


def planted(old: str, new: str) -> Callable[[str], str]:
    return lambda text: swapped(text, old, new)


FAULTS = {
    "view of strides that do not fit": (
        planted(".reshape(BATCH, LOCAL_SEQUENCE, 32)", ".view(BATCH, LOCAL_SEQUENCE, 32)"),
        "view",
    ),
    "wrong sizes": (
        planted("query.view(BATCH, SEQUENCE, HEADS, HEAD_DIM)", "query.view(BATCH, SEQUENCE, HEADS, 7)"),
        "invalid",
    ),
    "a dim too many": (planted("HEAD_DIM).transpose(1, 2)", "HEAD_DIM).transpose(1, 4)"), "out of range"),
    "another dim": (planted("HEAD_DIM).transpose(1, 2)", "HEAD_DIM).transpose(2, 3)"), "attention"),
    "operands in another order": (
        planted("F.linear(gelu, self.down.weight", "F.linear(self.down.weight, gelu"),
        "linear",
    ),
    "a dtype": (planted("F.linear(gelu,", "F.linear(gelu.to(torch.float16),"), "dtype"),
    "a name": (planted("F.gelu(up)", "F.gelu(upper)"), "upper"),
    "an import of torch": (lambda text: dropped(text, "import torch.nn.functional as F"), "F"),
    "an import of the run time": (lambda text: dropped(text, "from .runtime.cross_entropy"), "count_valid"),
    "a reshard that is not there": (lambda text: dropped(text, "norm = tp.all_gather("), "invalid"),
    "a reshard of another dim": (planted("(norm, dim=1)", "(norm, dim=2)"), "linear"),
    "the wrong part of a parameter": (
        planted('(48, 32), dp="Rp", tp="S(0)"', '(48, 32), dp="Rp", tp="S(1)"'),
        "linear",
    ),
    "a parameter that does not divide": (planted('(48,), dp="Rp", tp="S(0)"', '(47,), dp="Rp", tp="S(0)"'), "divide"),
    "another device": (planted("F.gelu(up)", "F.gelu(up + torch.ones(1))"), "device"),
    "fewer results than there are": (planted("query, key, value = ", "query, key = "), "unpack"),
    "a call that backward cannot follow": (planted("F.gelu(up)", "F.gelu(up.exp().exp_().add_(1))"), "backward"),
}


def test_what_is_emitted_runs_dry() -> None:
    dry_run(sharded().program, sharded().files)
    with torch.inference_mode():
        dry_run(sharded().program, sharded().files)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_plans_of_all_examples_are_accepted(name: str) -> None:
    """`compile` runs each dry. Programs of dp2 x tp2 without kernels are those of test_verify.py."""
    for pins, options in (
        ({"dp": 2, "tp": 2, "zero": 3}, {"kernels": "on", "precision": "bf16"}),
        ({"pp": 2}, {"kernels": "off"}),
    ):
        example = EXAMPLES[name](dropout=0.1)
        inputs = {"example_inputs": example.inputs, "loss_fn": example.loss_fn}
        program = autopar.compile(example.model, IDEAL, **inputs, constraints=pins, **options)
        dry_run(program.program, program.files)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_emission_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, word = FAULTS[name]
    program, text = sharded().program, plant(sharded().files["model.py"])
    if "torch." in text and "\nimport torch\n" not in text:
        text = swapped(text, "\nfrom .", "\nimport torch\nfrom .")
    with pytest.raises(EmissionError) as raised:
        dry_run(program, {"model.py": text})
    assert word in str(raised.value)
    monkeypatch.setattr(assembly, "emit_model", lambda _: text)
    with pytest.raises(InternalError, match="autopar emitted a program that cannot run"):
        files_of(program)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_inputs_and_results_of_stages_have_their_own_dtypes() -> None:
    """In half precision an input stays fp32: without its cast the product is one of two dtypes."""
    batch = {"x": torch.zeros(8, 64)}
    options: dict[str, Any] = {"precision": "bf16", "kernels": "off"}
    program = autopar.compile(Wide(), IDEAL, example_inputs=batch, constraints={"tp": 4}, **options)
    cast = swapped(program.files["model.py"], "x.to(torch.bfloat16)", "x")
    with pytest.raises(EmissionError, match="dtype"):
        dry_run(program.program, {"model.py": cast})
    program = autopar.compile(Wide(), IDEAL, example_inputs=batch, constraints={"pp": 2}, **options)
    boundary = '"hidden": Param((8, 64), tp="S(1)", dtype="bfloat16")'
    files = {
        name: text.replace(boundary, boundary.replace("bfloat16", "float16")) for name, text in program.files.items()
    }
    assert files != program.files
    with pytest.raises(EmissionError, match="SENDS has"):
        dry_run(program.program, files)


def test_a_layer_is_given_what_it_returned_only_where_another_follows() -> None:
    batch = {"x": torch.zeros(8, 64)}
    layers = autopar.compile(Wide(), IDEAL, example_inputs=batch, constraints={"tp": 4}, kernels="off")
    text = swapped(layers.files["model.py"], "return F.relu(linear)", "return tp.all_gather(F.relu(linear), dim=1)")
    dry_run(layers.program, {"model.py": swapped(text, "for i in range(3)", "for i in range(1)")})
    for count in (2, 3):
        with pytest.raises(EmissionError, match="linear"):
            dry_run(layers.program, {"model.py": swapped(text, "for i in range(3)", f"for i in range({count})")})


def test_the_line_and_the_reason_are_named() -> None:
    text = swapped(sharded().files["model.py"], "F.linear(gelu,", "F.linear(gelu[:, :, :60],")
    number = next(n for n, line in enumerate(text.splitlines(), 1) if ":60]" in line)
    with pytest.raises(EmissionError) as raised:
        dry_run(sharded().program, {"model.py": text})
    assert raised.value.where == f"model.py, line {number}"
    assert "60" in raised.value.problem and raised.value.call.startswith("down = F.linear(gelu[:, :, :60]")


def test_the_line_of_a_failing_backward_is_named() -> None:
    text = swapped(sharded().files["model.py"], "F.gelu(up)", "F.gelu(up.exp().exp_().add_(1))")
    number = next(n for n, line in enumerate(text.splitlines(), 1) if "exp_()" in line)
    with pytest.raises(EmissionError, match=f"model.py, line {number}.*inplace operation.*in backward"):
        dry_run(sharded().program, {"model.py": text})


@pytest.mark.slow
def test_every_stage_of_a_pipeline_runs() -> None:
    program = compiled(pp=2, dp=2)
    holding = [file for file, text in program.files.items() if "F.linear(" in text]
    assert len(holding) > 1
    for file in holding:
        broken = program.files | {file: swapped(program.files[file], ".weight, ", ".weight[:, 1:], ")}
        with pytest.raises(EmissionError, match=file):
            dry_run(program.program, broken)
