"""One-line equations: parsing and binding to shapes."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.graph import TensorMeta
from autopar.ir.placement import P, Rp, S
from autopar.rules.equation import Equation
from autopar.rules.rule import axis_options


def meta(*shape: int) -> TensorMeta:
    return TensorMeta(shape, torch.float32, True)


def test_linear_expands_leading_dims() -> None:
    rule = Equation.parse("b* k, n k, [n] -> b* n").bind((meta(4, 6, 8), meta(10, 8), meta(10)), (meta(4, 6, 10),))
    assert rule.inputs == ((("b.0",), ("b.1",), ("k",)), (("n",), ("k",)), (("n",),))
    assert rule.outputs == ((("b.0",), ("b.1",), ("n",)),)
    assert rule.contracted == {"k"}
    assert rule.additive == {2}


def test_linear_options_are_those_of_megatron() -> None:
    """Column parallel: weight S(0), output S(last). Row parallel: input S(last), weight S(1), output partial."""
    inputs, outputs = (meta(4, 6, 8), meta(10, 8), meta(10)), (meta(4, 6, 10),)
    rule = Equation.parse("b* k, n k, [n] -> b* n").bind(inputs, outputs)
    options = {option.label: option for option in axis_options(rule, 2, inputs, outputs)}
    assert (options["n"].inputs, options["n"].outputs) == ((Rp, S(0), S(0)), (S(2),))
    assert (options["k"].inputs, options["k"].outputs) == ((S(2), S(1), P), (P,))
    assert (options["b.0"].inputs, options["b.0"].outputs) == ((S(0), Rp, Rp), (S(0),))


def test_an_absent_operand_at_the_end() -> None:
    rule = Equation.parse("b* k, n k, [n] -> b* n").bind((meta(4, 8), meta(10, 8)), (meta(4, 10),))
    assert len(rule.inputs) == 2
    assert rule.additive == frozenset()


def test_blocked_factors_are_not_offered() -> None:
    rule = Equation.parse("b !s d -> b !s d").bind((meta(4, 6, 8),), (meta(4, 6, 8),))
    assert rule.shardable == ("b", "d")
    rule = Equation.parse("b !h* -> b !h*").bind((meta(4, 6, 8),), (meta(4, 6, 8),))
    assert rule.shardable == ("b",)


def test_dims_of_size_one_have_no_factor() -> None:
    rule = Equation.parse("m k, k n -> m n").bind((meta(1, 8), meta(8, 4)), (meta(1, 4),))
    assert rule.inputs[0] == ((), ("k",))
    assert rule.shardable == ("n", "k")


def test_scalar_result() -> None:
    rule = Equation.parse("k, k ->").bind((meta(8), meta(8)), (meta(),))
    assert rule.outputs == ((),)
    assert rule.contracted == {"k"}


@pytest.mark.parametrize("text", ["a b, b c", "a a -> a", "a* b* -> a* b*"])
def test_malformed(text: str) -> None:
    with pytest.raises(ValueError, match="'->'|repeats a factor"):
        Equation.parse(text)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8), (10, 7)), "factor k is 8 and 7"),
        (((4, 8), (10,)), "does not describe"),
        (((4,),) * 4, "4 tensors"),
        (((4, 8),), "1 tensors"),
    ],
)
def test_shapes_that_contradict(shapes: tuple[tuple[int, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Equation.parse("b* k, n k, [n] -> b* n").bind(tuple(meta(*s) for s in shapes), (meta(4, 10),))
