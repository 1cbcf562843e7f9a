"""Linear layers joined with the collective before or after them: which ones, and how it is written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from codegen.passes.async_tp import has_async_tp, with_async_tp
from codegen.passes.overlap import overlap
from codegen.program import Call, ModuleClass, Program, Spec
from codegen.source.emit import emit_model
from tests.codegen import linear_statements
from tests.codegen.linear_statements import lines
from tests.codegen.typed import reshard, var, variables

SHAPES = {
    "x": (3, 4, 6), "flat": (12, 6), "h": (3, 4, 8), "rows": (12, 8), "product": (12, 6), "self.q": (8, 6),
    "self.k": (4, 6), "self.b": (8,), "self.o": (6, 8), "self.c": (6, 8), "self.d": (8, 6), "self.e": (6,),
}  # fmt: skip
GATHER = reshard("all_gather", "x", "x", "Rp", dim=1)
SCATTER = reshard("reduce_scatter", "y", "y", "S(1)", dim=1)
MASK = reshard("first_rank_only", "self.e", "masked", "P")


call = partial(linear_statements.call, SHAPES)


def linear(result: str, weight: str, *bias: str, x: str = "x") -> Call:
    return call("linear.default", result, x, weight, *bias)


def add(result: str, a: str, b: str) -> Call:
    return call("add.Tensor", result, a, b)


ROW = linear("y", "self.o", x="h")
ADDMM = call("addmm.default", "product", "masked", "rows", "self.d")
VIEW = call("view.default", "y", "product", (3, 4, 6))


def program(*body: object, outputs: tuple[str, ...] = ("y",)) -> Program:
    stored = {
        name.removeprefix("self."): Spec(shape, "float32") for name, shape in SHAPES.items() if name.startswith("self.")
    }
    cls = ModuleClass("M", "", stored, {}, variables("x", "h", "rows"), tuple(body), variables(*outputs))  # type: ignore[arg-type]
    return Program("M", ("dp", "tp"), (1, 2), "fp32", 8, 1, {}, (), cls, ())


def test_a_gather_goes_to_where_its_first_layer_stood() -> None:
    between, silu = call("neg.default", "n", "h"), call("silu.default", "act", "q")
    body = (GATHER, between, linear("q", "self.q", "self.b"), silu, linear("k", "self.k"), add("y", "act", "k"))
    found = with_async_tp(program(*body))
    assert lines(found) == [
        "tp = self.mesh.tp",
        "n = -h",
        "q, k = async_tp.all_gather_linears(x, (self.q, self.k), (self.b, None), axis=tp, dim=1)",
        "act = F.silu(q)",
        "y = act + k",
    ]
    assert "from .runtime import async_tp\n" in emit_model(found) and has_async_tp(found)
    assert overlap(found) == found


def test_one_layer_and_a_source_with_another_name() -> None:
    found = with_async_tp(program(replace(GATHER, source=var("h")), linear("y", "self.q", "self.b")))
    assert lines(found)[1:] == ["y = async_tp.all_gather_linear(h, self.q, self.b, axis=tp, dim=1)"]


def test_addmm_takes_x_before_it_is_flattened() -> None:
    view = call("view.default", "flat", "x", (-1, 6))
    found = with_async_tp(program(GATHER, view, call("addmm.default", "y", "self.b", "flat", "self.c")))
    assert lines(found)[1:] == ["y = async_tp.all_gather_addmm(self.b, x, self.c, axis=tp, dim=1)"]


def test_rows_of_a_matrix() -> None:
    gather = reshard("all_gather", "flat", "flat", "Rp", shape=(12, 6), dim=0)
    found = with_async_tp(program(gather, call("addmm.default", "y", "self.b", "flat", "self.c")))
    assert lines(found)[1:] == ["y = async_tp.all_gather_addmm(self.b, flat, self.c, axis=tp, dim=0)"]
    scatter = reshard("reduce_scatter", "product", "y", "S(0)", shape=(12, 6), dim=0)
    found = with_async_tp(program(MASK, ADDMM, scatter))
    assert lines(found)[1:] == ["y = async_tp.addmm_reduce_scatter(self.e, rows, self.d, axis=tp, dim=0)"]


def test_a_scatter_takes_the_layer_before_it() -> None:
    between = call("neg.default", "n", "x")
    found = with_async_tp(program(ROW, between, SCATTER))
    assert lines(found)[1:] == ["n = -x", "y = async_tp.linear_reduce_scatter(h, self.o, axis=tp, dim=1)"]


def test_a_scatter_takes_the_bias_of_the_first_rank_and_the_view() -> None:
    found = with_async_tp(program(MASK, linear("y", "self.o", "masked", x="h"), SCATTER))
    assert lines(found)[1:] == ["y = async_tp.linear_reduce_scatter(h, self.o, self.e, axis=tp, dim=1)"]
    found = with_async_tp(program(MASK, ADDMM, VIEW, SCATTER))
    wanted = "y = async_tp.addmm_reduce_scatter(self.e, rows, self.d, shape=(3, 4, 6), axis=tp, dim=1)"
    assert lines(found)[1:] == [wanted]


def test_one_call_does_not_change_what_the_next_one_reads() -> None:
    """The second layer of the first gather is named like what the second gather reads; once it has moved up, that one
    can no longer go to where its layer is."""
    other = reshard("all_gather", "k", "z", "Rp", dim=1)
    body = (GATHER, other, linear("q", "self.q"), linear("p", "self.q", x="z"), linear("k", "self.k"))
    found = with_async_tp(program(*body, add("y", "p", "k"), outputs=("y", "q")))
    assert lines(found)[1:] == [
        "z = tp.all_gather(k, dim=1)",
        "q, k = async_tp.all_gather_linears(x, (self.q, self.k), axis=tp, dim=1)",
        "p = F.linear(z, self.q)",
        "y = p + k",
    ]


LAYERS = linear("q", "self.q"), linear("k", "self.k")
UNTOUCHED = {
    "another reader of x": program(GATHER, *LAYERS, add("z", "q", "k"), add("y", "z", "x")),
    "x returned": program(GATHER, linear("y", "self.q"), outputs=("y", "x")),
    "gathered features": program(replace(GATHER, kwargs=(("dim", 2),)), linear("y", "self.q")),
    "gathered in sections": program(replace(GATHER, kwargs=(("dim", 1), ("sections", 2))), linear("y", "self.q")),
    "a gradient that is not summed": program(replace(GATHER, kwargs=(("dim", 1), ("grad", "full"))), LAYERS[0]),
    "another axis": program(replace(GATHER, axis="dp"), linear("y", "self.q")),
    "another collective": program(reshard("for_use", "x", "x", "Rp"), linear("y", "self.q")),
    "what is gathered is gone": program(
        replace(GATHER, result=var("z")), call("neg.default", "x", "h"), linear("p", "self.q", x="z"),
        add("y", "p", "x"),
    ),
    "a computed weight": program(GATHER, call("neg.default", "w", "self.q"), linear("y", "w")),
    "deferred": program(
        GATHER, replace(linear("q", "self.q"), target="deferred.linear"),
        replace(ROW, target="deferred.linear"), SCATTER, outputs=("y", "q"),
    ),
    "in fp8": program(replace(ROW, target="fp8.linear"), SCATTER),
    "scattered features": program(ROW, replace(SCATTER, kwargs=(("dim", 2),))),
    "scattered in sections": program(ROW, replace(SCATTER, kwargs=(("dim", 1), ("sections", 2)))),
    "another reader of the partial sum": program(ROW, replace(SCATTER, result=var("z")), add("w", "y", "z")),
    "another reader of the product": program(MASK, ADDMM, VIEW, SCATTER, outputs=("y", "product")),
    "a bias that is partial by itself": program(linear("y", "self.o", "self.e", x="h"), SCATTER),
    "a bias whose gradient is partial": program(
        replace(MASK, kwargs=(("grad", "partial"),)), linear("y", "self.o", "masked", x="h"), SCATTER
    ),
    "a bias of another axis": program(replace(MASK, axis="dp"), linear("y", "self.o", "masked", x="h"), SCATTER),
    "a bias with another reader": program(
        MASK, linear("y", "self.o", "masked", x="h"), SCATTER, outputs=("y", "masked")
    ),
    "a view that cuts features": program(MASK, ADDMM, call("view.default", "y", "product", (3, 8, 3)), SCATTER),
    "what is multiplied is gone": program(ROW, call("neg.default", "h", "x"), SCATTER, outputs=("y", "h")),
}  # fmt: skip


@pytest.mark.parametrize("name", UNTOUCHED)
def test_what_stays_as_it_is(name: str) -> None:
    assert with_async_tp(UNTOUCHED[name]) == UNTOUCHED[name]
    assert not has_async_tp(UNTOUCHED[name])


def test_classes_that_recompute_selectively_stay() -> None:
    plain = program(ROW, SCATTER)
    layers = replace(plain, layers=(replace(plain.root, name="L"),), root=replace(plain.root, body=()))
    for modes, is_joined in (((("full", 2),), True), ((("full", 1), ("selective", 1)), False)):
        assert has_async_tp(with_async_tp(replace(layers, recompute={"L": modes}))) == is_joined
