"""The forms in which models write RMSNorm, alone and with the residual before and after: fused, with the same numbers.

Forms are the lines of transformers' modules, call by call, as traces have them. On a CPU the kernels' references run.
"""

from __future__ import annotations

import pytest
import torch

from codegen.fusion import fuse
from tests.codegen.bodies import Body, assert_same_numbers, is_left_alone, targets

HALF, WIDE = torch.bfloat16, torch.float32
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Rounding errors of gradients, which the reference and the traced calls sum in another order."""


def quotient(body: Body, x: str, widened: str, by_power: bool = False) -> Body:
    """x / sqrt(mean(x ** 2) + eps) in the variable `quotient`; the mean is of `widened`."""
    body.call("power", "aten.pow.Tensor_Scalar", widened, 2).call("mean", "aten.mean.dim", "power", (-1,), True)
    body.call("shifted", "aten.add.Tensor", "mean", 1e-6)
    if by_power:
        body.call("inverse", "aten.pow.Tensor_Scalar", "shifted", -0.5)
    else:
        body.call("inverse", "aten.rsqrt.default", "shifted")
    return body.call("quotient", "aten.mul.Tensor", x, "inverse")


def llama(body: Body, x: str, dtype: torch.dtype) -> None:
    quotient(body.call("wide", "aten.to.dtype", x, WIDE), "wide", "wide")
    body.call("narrow", "aten.to.dtype", "quotient", dtype).call("norm", "aten.mul.Tensor", "self.weight", "narrow")


def t5(body: Body, x: str, dtype: torch.dtype) -> None:
    """A norm that casts to the weight's dtype if that is a half. A trace leaves out casts to the present dtype."""
    if dtype == WIDE:
        quotient(body, x, x).call("norm", "aten.mul.Tensor", "self.weight", "quotient")
        return
    quotient(body.call("wide", "aten.to.dtype", x, WIDE), x, "wide").call("narrow", "aten.to.dtype", "quotient", dtype)
    body.call("norm", "aten.mul.Tensor", "self.weight", "narrow")


def gemma(body: Body, x: str, dtype: torch.dtype) -> None:
    quotient(body.call("wide", "aten.to.dtype", x, WIDE), "wide", "wide")
    body.call("wide_weight", "aten.to.dtype", "self.weight", WIDE)
    body.call("one_more", "aten.add.Tensor", "wide_weight", 1.0)
    body.call("product", "aten.mul.Tensor", "quotient", "one_more").call("norm", "aten.type_as.default", "product", x)


def gemma_3n(body: Body, x: str, dtype: torch.dtype) -> None:
    quotient(body.call("wide", "aten.to.dtype", x, WIDE), "wide", "wide", by_power=True)
    body.call("wide_weight", "aten.to.dtype", "self.weight", WIDE)
    body.call("product", "aten.mul.Tensor", "quotient", "wide_weight").call(
        "norm", "aten.type_as.default", "product", x
    )


def olmo_2(body: Body, x: str, dtype: torch.dtype) -> None:
    quotient(body.call("wide", "aten.to.dtype", x, WIDE), "wide", "wide")
    body.call("product", "aten.mul.Tensor", "self.weight", "quotient")
    body.call("norm", "aten.to.dtype", "product", dtype)


def without_casts(body: Body, x: str, dtype: torch.dtype) -> None:
    """Gemma's in fp32, as a trace has it where casts change nothing."""
    quotient(body, x, x).call("one_more", "aten.add.Tensor", 1.0, "self.weight")
    body.call("norm", "aten.mul.Tensor", "one_more", "quotient")


FORMS = {
    llama: (),
    t5: (),
    gemma: (("offset", 1.0), ("rounds_once", True)),
    gemma_3n: (("rounds_once", True),),
    olmo_2: (("rounds_once", True),),
    without_casts: (("offset", 1.0), ("rounds_once", True)),
}


def norm_body(form, place: str, dtype: torch.dtype, **dtypes: torch.dtype) -> Body:
    """place: "alone", "before" or "after" the addition of b."""
    torch.manual_seed(0)
    body = Body(dict.fromkeys(("x", "b", "self.weight"), dtype) | {"self.weight": dtypes.get("weight", dtype)})
    x = "x"
    if place == "after":
        body.call("sum", "aten.add.Tensor", "x", "b")
        x = "sum"
    form(body, x, dtype)
    if place == "before":
        return body.call("y", "aten.add.Tensor", "b", "norm")
    return body.call("y", "aten.mul.Tensor", "norm", 2.0)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("place", "kernel"), [("alone", "rms_norm"), ("after", "add_rms_norm"), ("before", "rms_norm_add")]
)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_forms_are_one_kernel_with_the_same_numbers(form, place, kernel, dtype):
    if form is without_casts and dtype != WIDE:
        pytest.skip("in half precision casts are calls")
    body = norm_body(form, place, dtype)
    fused = fuse(body.program("y", "sum") if place == "after" else body.program())
    assert targets(fused) == [f"kernels.{kernel}"] + ["aten.mul.Tensor"] * (place != "before")
    assert fused.root.body[0].kwargs == FORMS[form]
    assert_same_numbers(body, fused, TOLERANCES[dtype])


@pytest.mark.parametrize("form", [gemma, gemma_3n, olmo_2], ids=lambda form: form.__name__)
def test_weights_of_another_dtype_where_the_result_is_rounded_to_xs(form):
    body = norm_body(form, "alone", HALF, weight=WIDE)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.rms_norm", "aten.mul.Tensor"]
    assert_same_numbers(body, fused, TOLERANCES[HALF])


def test_a_norm_between_two_sums_goes_with_the_later():
    """Its sum may be what the next layer normalizes, and is then read once."""
    body = Body(dict.fromkeys(("x", "a", "b", "self.weight"), HALF)).call("sum", "aten.add.Tensor", "x", "b")
    olmo_2(body, "sum", HALF)
    body.call("y", "aten.add.Tensor", "norm", "a")
    fused = fuse(body.program())
    assert targets(fused) == ["aten.add.Tensor", "kernels.rms_norm_add"]
    assert_same_numbers(body, fused, TOLERANCES[HALF])


@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_and_sum(has_bias):
    body = Body({"b": WIDE})
    body.call("norm", "aten.layer_norm.default", "x", (6,), "self.weight", "row" if has_bias else None, 1e-5, True)
    body.call("y", "aten.add.Tensor", "norm", "b")
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.layer_norm_add"]
    assert_same_numbers(body, fused)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("place", "kernel"), [("alone", "layer_norm"), ("before", "layer_norm_add")])
def test_layer_norm_call_by_call(place, kernel, dtype):
    def cohere(body: Body, x: str, dtype: torch.dtype) -> None:
        wide = x
        if dtype != WIDE:
            body.call("wide", "aten.to.dtype", x, WIDE).call("wide_weight", "aten.to.dtype", "self.weight", WIDE)
            wide = "wide"
        body.call("center", "aten.mean.dim", wide, (-1,), True).call("difference", "aten.sub.Tensor", wide, "center")
        quotient(body.call("centered", "aten.sub.Tensor", wide, "center"), "centered", "difference")
        if dtype == WIDE:
            body.call("norm", "aten.mul.Tensor", "self.weight", "quotient")
        else:
            body.call("product", "aten.mul.Tensor", "wide_weight", "quotient")
            body.call("norm", "aten.to.dtype", "product", dtype)

    body = norm_body(cohere, place, dtype)
    fused = fuse(body.program())
    assert targets(fused)[0] == f"kernels.{kernel}" and len(targets(fused)) == 1 + (place == "alone")
    assert_same_numbers(body, fused, TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(
    ("place", "kernel"), [("alone", "rms_norm"), ("after", "add_rms_norm"), ("before", "rms_norm_add")]
)
def test_without_a_weight(place, kernel, dtype):
    body = Body(dict.fromkeys(("x", "b"), dtype))
    x = "sum" if place == "after" else "x"
    if place == "after":
        body.call("sum", "aten.add.Tensor", "x", "b")
    if dtype == WIDE:
        quotient(body, x, x)
    else:
        quotient(body.call("wide", "aten.to.dtype", x, WIDE), "wide", "wide")
        body.call("quotient", "aten.type_as.default", "quotient", x)
    if place == "before":
        body.call("y", "aten.add.Tensor", "b", "quotient")
    else:
        body.call("y", "aten.mul.Tensor", "quotient", 2.0)
    fused = fuse(body.program("y", "sum") if place == "after" else body.program())
    assert targets(fused)[0] == f"kernels.{kernel}" and len(targets(fused)) == 1 + (place != "before")
    assert_same_numbers(body, fused, TOLERANCES[dtype])


def test_layer_norm_without_a_weight():
    body = Body().call("y", "aten.layer_norm.default", "x", (6,), None, None, 1e-5, True)
    fused = fuse(body.program())
    assert targets(fused) == ["kernels.layer_norm"]
    assert_same_numbers(body, fused)


def offset_of_halves(body: Body) -> Body:
    """1 + weight is rounded to bf16 before it is widened."""
    body.call("one_more", "aten.add.Tensor", "self.weight", 1.0).call("wide_weight", "aten.to.dtype", "one_more", WIDE)
    quotient(body.call("wide", "aten.to.dtype", "x", WIDE), "wide", "wide")
    body.call("product", "aten.mul.Tensor", "quotient", "wide_weight")
    return body.call("y", "aten.type_as.default", "product", "x")


def wide_result(body: Body) -> Body:
    quotient(body.call("wide", "aten.to.dtype", "x", WIDE), "x", "wide")
    return body.call("y", "aten.mul.Tensor", "self.weight", "quotient")


@pytest.mark.parametrize("make", [offset_of_halves, wide_result])
def test_what_rounds_otherwise_has_no_offset_and_xs_dtype(make):
    """The kernels add an offset in fp32, and their result has x's dtype."""
    body = make(Body({"x": HALF, "self.weight": HALF}))
    called = [call for call in fuse(body.program()).root.body if call.target == "kernels.rms_norm"]
    assert all("offset" not in dict(call.kwargs) for call in called)
    assert not called or make is offset_of_halves


def test_a_sum_after_that_broadcasts_stays():
    body = norm_body(gemma, "alone", HALF)
    body.statements.pop()
    body.call("y", "aten.add.Tensor", "norm", "self.weight")
    assert targets(fuse(body.program())) == ["kernels.rms_norm", "aten.add.Tensor"]


def test_a_norm_that_is_read_elsewhere_is_not_part_of_the_sum():
    body = norm_body(gemma, "before", HALF).call("other", "aten.exp.default", "norm")
    assert targets(fuse(body.program("y", "other"))) == ["kernels.rms_norm", "aten.add.Tensor", "aten.exp.default"]


def test_a_sharded_mean_stays():
    body = Body(dict.fromkeys(("x", "self.weight"), HALF))
    body.call("wide", "aten.to.dtype", "x", WIDE).call("power", "aten.pow.Tensor_Scalar", "wide", 2)
    body.call("mean", "aten.mean.dim", "power", (-1,), True, divisor=2).call("shifted", "aten.add.Tensor", "mean", 1e-6)
    body.call("inverse", "aten.rsqrt.default", "shifted").call("quotient", "aten.mul.Tensor", "wide", "inverse")
    body.call("product", "aten.mul.Tensor", "self.weight", "quotient").call("y", "aten.to.dtype", "product", HALF)
    assert is_left_alone(body)
