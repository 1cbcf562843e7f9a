"""Which linear layers in e4m3 are one call, and how it is written."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen.passes.fp8 import in_fp8
from codegen.program import Call, ModuleClass, Program, Spec, TensorType, Var
from codegen.source.expressions import expression

SHAPES = {"x": (4, 16), "self.q": (32, 16), "self.k": (32, 16), "self.v": (32, 16), "self.b": (32,), "self.c": (16, 32)}
SHAPES |= {"self.narrow": (24, 16)}


def call(target: str, result: str, *args: object) -> Call:
    return Call(f"aten.{target}", tuple(_var(a) if isinstance(a, str) else a for a in args), (), (_var(result),))


def _var(name: str) -> Var:
    """What is stored stands for the parameter of its name."""
    return Var(name, TensorType(SHAPES.get(name, (4, 32)), "float32", tensor=(name.removeprefix("self."), 0)))


def linear(result: str, weight: str, *bias: str) -> Call:
    return call("linear.default", result, "x", weight, *bias)


def add(result: str, a: str, b: str) -> Call:
    return call("add.Tensor", result, a, b)


def lines(*body: Call, outputs: tuple[str, ...] = ("y",)) -> list[str]:
    """A layer's body in fp8, as it is written."""
    stored = {
        name.removeprefix("self."): Spec(shape, "float32") for name, shape in SHAPES.items() if name.startswith("self.")
    }
    layer = ModuleClass("Layer", "", stored, {}, (_var("x"),), body, tuple(map(_var, outputs)))
    root = ModuleClass("M", "", {}, {}, (_var("x"),), (), (_var("x"),))
    (found,) = in_fp8(Program("M", ("dp",), (1,), "fp32", 4, 1, {}, (layer,), root, ())).layers
    calls = [statement for statement in found.body if isinstance(statement, Call)]
    return [f"{', '.join(result.name for result in call.results)} = {expression(call)}" for call in calls]


def test_layers_of_one_x_are_one_call_where_the_first_stood() -> None:
    silu = call("silu.default", "act", "q")
    assert lines(linear("q", "self.q", "self.b"), silu, linear("k", "self.k"), add("y", "act", "k")) == [
        "q, k = fp8.linears(x, (self.q, self.k), (self.b, None))",
        "act = F.silu(q)",
        "y = act + k",
    ]
    three = (linear("q", "self.q"), linear("k", "self.k"), linear("v", "self.v"))
    assert lines(*three, outputs=("q", "k", "v")) == ["q, k, v = fp8.linears(x, (self.q, self.k, self.v))"]


def test_other_readers_before_and_after_change_nothing() -> None:
    before, after = call("neg.default", "n", "x"), add("y", "x", "q")
    found = lines(before, linear("q", "self.q"), linear("k", "self.k"), after, outputs=("n", "k", "y", "x"))
    assert found[1:] == ["q, k = fp8.linears(x, (self.q, self.k))", "y = x + q"]


def test_a_reader_between_parts_them() -> None:
    """Autograd adds up what readers give from the last to the first: k, n, q. Joined, q and k would be added first."""
    between = call("neg.default", "n", "x")
    alone = lines(linear("q", "self.q"), between, linear("k", "self.k"), outputs=("q", "n", "k"))
    assert alone[0] == "q = fp8.linear(x, self.q)" and alone[2] == "k = fp8.linear(x, self.k)"
    layers = linear("q", "self.q"), linear("k", "self.k"), between, linear("v", "self.v"), linear("z", "self.q")
    parted = lines(*layers, outputs=("q", "n", "k", "v", "z"))
    assert parted[0] == "q, k = fp8.linears(x, (self.q, self.k))"
    assert parted[2] == "v, z = fp8.linears(x, (self.v, self.q))"


NOT_JOINED = {
    "a size that the units do not take": (linear("q", "self.q"), linear("k", "self.narrow")),
    "a bias that is computed": (
        call("neg.default", "n", "self.b"), linear("q", "self.q"), linear("k", "self.k", "n"),
    ),
    "a name in use between": (
        call("neg.default", "k", "self.b"), linear("q", "self.q"), add("z", "q", "k"), linear("k", "self.k"),
    ),
    "x assigned between": (linear("q", "self.q"), call("neg.default", "x", "self.b"), linear("k", "self.k")),
    "a result that is divided": (linear("q", "self.q"), replace(linear("k", "self.k"), divisor=2)),
    "torch.addmm": (
        call("addmm.default", "q", "self.b", "x", "self.c"), call("addmm.default", "k", "self.b", "x", "self.c"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_stays_apart(name: str) -> None:
    found = lines(*NOT_JOINED[name], outputs=("q", "k"))
    assert len(found) == len(NOT_JOINED[name]) and not any("linears" in line for line in found)
    assert any("fp8." in line for line in found)
