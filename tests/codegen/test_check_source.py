"""What is emitted is verified at once: text that would fail when a rank runs it never leaves the compiler."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InternalError
from autopar.lowering.assembly import files_of
from codegen.check_source import check_files
from codegen.program import Call, Raw
from codegen.schemas import EmissionError
from codegen.source.emit import emit_model
from tests.codegen.bodies import Body
from tests.codegen.typed import var, variables

HEAD = """import torch
import torch.nn.functional as F

from .runtime.cross_entropy import cross_entropy
from .runtime.parameters import Module, Param


class Block(Module):
    def forward(self, hidden, mask):
        return hidden


class Model(Module):
    def forward(self, x, y):
        dp, tp = self.mesh.dp, self.mesh.tp
"""


def checked(*lines: str) -> None:
    check_files({"model.py": HEAD + "".join(f"        {line}\n" for line in (*lines, "return x"))})


@pytest.mark.parametrize(
    "line",
    [
        "x = F.linear(x, self.a.weight, self.a.bias)",
        "x = F.group_norm(x, 4, self.a.weight, self.a.bias, 1e-05)",
        "x = F.conv2d(x, self.a.weight, padding=(1, 1))",
        "x = torch.cat([x, y], dim=1)",
        "x = torch.ops.aten.softplus.default(x, 2.0, 10.0)",
        "x = x.view(4, -1).transpose(0, 1).sum(-1, keepdim=True)",
        "x = tp.all_gather(x, dim=1)",
        'x = tp.all_gather(x, dim=1, grad="full")',
        "x = cross_entropy(x, y, 3.0, vocab_axis=tp)",
        "x = self.same_dropout(x, 0.1, call=0, layout=None)",
        "a, _, c = x.split(4, -1)",
        'x = tuple(f"layers.{i}" for i in range(3))',
    ],
)
def test_what_runs_passes(line):
    checked(line)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x = F.group_norm(x, 4, self.a.weight, self.a.bias, 1e-05, True)", "too many positional"),
        ("x = F.group_norms(x, 4)", "no such function"),
        ("x = F.linear(x, weights=y)", "takes no such arguments"),
        ("x = F.softplus(x, 2.0, 10.0, 3.0)", "takes no such arguments"),
        ("x = torch.add(x)", "takes no such arguments"),
        ("x = torch.ops.aten.softplus.other(x)", "no such operator"),
        ('x = torch.ops.aten.cat.default(x, "dim")', "takes no such arguments"),
        ("x = x.transpose(0)", "takes no such arguments"),
        ("x = x.transposed(0, 1)", "no such method"),
        ("x = tp.all_gather(x, axis=1)", "axis"),
        ("x = tp.gather_all(x)", "no such function"),
        ("x = self.same_dropout(x)", "missing"),
        ("x = cross_entropy(x, y)", "missing"),
        ("x = hidden_2 + x", "'hidden_2' is not defined"),
        ("for layer in self.layers_of(Block):\n            x = layer(x)", "Block takes 2 arguments"),
        ("    x = x + 1", "not Python"),
    ],
)
def test_what_fails_when_it_runs_is_refused(line, said):
    with pytest.raises(EmissionError, match=said.replace("(", "\\(")):
        checked(line)


def test_an_operator_that_was_written_wrongly_is_named():
    program = Body().call("y", "aten.mul.Tensor", "x", "a").program("y")
    bad = replace(program.root.body[0], target="runtime.cross_entropy", args=(var("x"),), section="mlp.gate")
    program = replace(program, root=replace(program.root, body=(bad,)))
    with pytest.raises(InternalError, match="runtime.cross_entropy of M.mlp.gate") as error:
        files_of(program)
    assert "a bug in autopar" in str(error.value)


def test_an_operator_that_torch_lacks_is_named():
    program = Body().call("y", "aten.mul.Tensor", "x", "a").program("y")
    bad = replace(program.root.body[0], target="aten.muls.Tensor")
    with pytest.raises(InternalError, match="aten.muls.Tensor"):
        files_of(replace(program, root=replace(program.root, body=(bad,))))


@pytest.mark.parametrize("names", [("x", "self.weight"), ("x", "long_name" * 14)])
def test_long_lines_without_brackets_stay_python(names):
    """An index or a sum that is too long for a line was cut in the middle."""
    left, right = variables(*names)
    index = Call("aten.index.Tensor", (left, tuple([right] * (120 // len(right.name) + 2))), (), (var("y"),))
    total = Call("aten.add.Tensor", (Raw("x[" + ":, " * 40 + "1:]"), left), (), (var("z"),))
    program = Body().call("y", "aten.mul.Tensor", "x", "a").program("y")
    text = emit_model(replace(program, root=replace(program.root, body=(index, total))))
    refused = pytest.raises(EmissionError, match="not defined") if right.name[0] == "l" else contextlib.nullcontext()
    with refused:
        check_files({"model.py": text})


@torch.library.custom_op("autopar_tests::scaled_square", mutates_args=())
def scaled_square(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * x * factor


@scaled_square.register_fake
def _(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.factor = inputs[1]


def _backward(ctx, grad):
    return 2 * ctx.saved_tensors[0] * grad * ctx.factor, None


scaled_square.register_autograd(_backward, setup_context=_setup)


class WithCustomOperator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(scaled_square(self.up(x), 0.5))


def test_a_program_says_which_library_it_needs():
    text = emit_model(Body().call("y", "aten.mul.Tensor", "x", "a").program("y"))
    assert "it needs torch only." in text
    call = Call("autopar_tests.scaled_square.default", (var("x"), 0.5), (), (var("y"),))
    program = Body().call("y", "aten.mul.Tensor", "x", "a").program("y")
    text = emit_model(replace(program, root=replace(program.root, body=(call,))))
    assert "it needs torch and whatever registers autopar_tests.scaled_square: import it before this." in " ".join(
        text.split()
    )


@pytest.mark.distributed
def test_a_custom_operator_with_register_autograd_trains_as_it_does_alone():
    """The error for a custom autograd.Function advises it, so it is carried over with its backward."""
    torch.manual_seed(0)
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    options = {"example_inputs": batch, "loss_fn": nn.functional.mse_loss, "constraints": {"dp": 2}, "steps": 2}
    report = autopar.verify(WithCustomOperator(), "2 cpu", **options)
    assert report.ok(), str(report)
    assert report.losses[0][0] > 0 and len(report.gradients) == 4
