"""Linear layers joined with the sum over ranks that they start in backward: which ones, and how it is written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from codegen.passes.overlap import overlap
from codegen.program import Call, ModuleClass, Program, Reshard, Spec
from codegen.source.emit import emit_model
from tests.codegen import linear_statements
from tests.codegen.linear_statements import lines
from tests.codegen.typed import reshard, variables

SHAPES = {"x": (3, 4, 6), "flat": (12, 6), "self.q": (8, 6), "self.k": (8, 6), "self.b": (8,), "self.c": (6, 8)}
GATHER = reshard("all_gather", "x", "x", "Rp", dim=1)


call = partial(linear_statements.call, SHAPES)


def linear(result: str, weight: str, *bias: str, x: str = "x") -> Call:
    return call("linear.default", result, x, weight, *bias)


def program(*body: object, outputs: tuple[str, ...] = ("y",)) -> Program:
    stored = {
        name.removeprefix("self."): Spec(shape, "float32") for name, shape in SHAPES.items() if name.startswith("self.")
    }
    cls = ModuleClass("M", "", stored, {}, variables("x", "flat"), tuple(body), variables(*outputs))  # type: ignore[arg-type]
    return Program("M", ("dp", "tp"), (1, 2), "fp32", 8, 1, {}, (), cls, ())


def add(result: str, a: str, b: str) -> Call:
    return call("add.Tensor", result, a, b)


def test_layers_of_one_reshard_are_one_call_where_the_first_stood() -> None:
    silu = call("silu.default", "act", "q")
    found = overlap(program(GATHER, linear("q", "self.q", "self.b"), silu, linear("k", "self.k"), add("y", "act", "k")))
    assert lines(found) == [
        "tp = self.mesh.tp",
        "x = tp.all_gather(x, dim=1)",
        "q, k = overlapped.linears(x, (self.q, self.k), (self.b, None))",
        "act = F.silu(q)",
        "y = act + k",
    ]
    assert "from .runtime import overlapped\n" in emit_model(found)
    found = overlap(program(GATHER, linear("q", "self.q"), linear("k", "self.k"), add("y", "q", "k")))
    assert lines(found)[2] == "q, k = overlapped.linears(x, (self.q, self.k))"


@pytest.mark.parametrize(
    "reshard",
    [
        GATHER,
        reshard("for_use", "x", "x", "Rp"),
        reshard("all_reduce", "x", "x", "Rp", grad="partial"),
    ],
)
def test_every_reshard_that_sums_backward(reshard: Reshard) -> None:
    found = overlap(program(reshard, linear("y", "self.q", "self.b")))
    assert lines(found)[2] == "y = overlapped.linear(x, self.q, self.b)"


@pytest.mark.parametrize(
    "reshard",
    [
        reshard("all_gather", "x", "x", "R", dim=1, grad="full"),
        reshard("all_reduce", "x", "x", "R"),
        reshard("slice", "x", "x", "S(1)", dim=1, grad="partial"),
    ],
)
def test_no_other_reshard(reshard: Reshard) -> None:
    plain = program(reshard, linear("y", "self.q"))
    assert overlap(plain) == plain


@pytest.mark.parametrize("first", [True, False])
def test_addmm_takes_x_before_it_is_flattened(first: bool) -> None:
    view = call("view.default", "flat", "x", (-1, 6))
    gather = GATHER if first else reshard("all_gather", "flat", "flat", "Rp", dim=1)
    order = (gather, view) if first else (view, gather)
    found = overlap(program(*order, call("addmm.default", "y", "self.b", "flat", "self.c")))
    assert lines(found)[1:] == (
        ["x = tp.all_gather(x, dim=1)", "y = overlapped.addmm(self.b, x, self.c)"]
        if first
        else ["flat = x.view(-1, 6)", "flat = tp.all_gather(flat, dim=1)", "y = overlapped.addmm(self.b, flat, self.c)"]
    )


LAYERS = linear("q", "self.q"), linear("k", "self.k")
NOT_JOINED = {
    "another reader": program(GATHER, *LAYERS, add("z", "q", "k"), add("y", "z", "x")),
    "returned": program(GATHER, *LAYERS, add("y", "q", "k"), outputs=("y", "x")),
    "a weight that is computed": program(
        GATHER, call("add.Tensor", "w", "self.q", "self.k"), linear("y", "w"), outputs=("y",)
    ),
    "a name in use between": program(
        call("neg.default", "k", "self.b"), GATHER, linear("q", "self.q"), add("q", "q", "k"), linear("k", "self.k"),
        add("y", "q", "k"),
    ),
    "deferred": program(GATHER, replace(linear("y", "self.q"), target="deferred.linear")),
    "a view of other rows": program(
        GATHER, call("view.default", "flat", "x", (36, 2)), call("addmm.default", "y", "self.b", "flat", "self.c")
    ),
    "x as a weight": program(GATHER, linear("y", "x", x="self.q")),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_JOINED)
def test_what_stays_as_it_is(name: str) -> None:
    assert overlap(NOT_JOINED[name]) == NOT_JOINED[name]
