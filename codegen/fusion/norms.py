"""Normalisations."""

from __future__ import annotations

from typing import Final

from codegen.fusion.template import Bindings, Either, Is, Leaf, Op, Pattern, Template, Value, fused, is_dtype
from codegen.program import Operand


def _normalised(x: Template) -> Op:
    """x / sqrt(mean(x ** 2) + eps)"""
    squares = (Op("aten.pow.Tensor_Scalar", (x, Is(2))), Op("aten.mul.Tensor", (x, x)), Op("aten.square.default", (x,)))
    mean = Op("aten.mean.dim", (Either(squares), Value("dims"), Is(True)))
    rsqrt = Op("aten.rsqrt.default", (Op("aten.add.Tensor", (mean, Value("eps")), commutes=True),))
    return Op("aten.mul.Tensor", (x, rsqrt), commutes=True)


def _rms_norm_template() -> Op:
    """In half precision models widen x first and round before the weight (Hugging Face's, and Meta's own with type_as).

    Models that do all in half precision match too; the kernel's arithmetic is fp32, so the result is a better one.
    """
    x = Leaf("x")
    wide = Op("aten.to.dtype", (x, Value("wide")))
    normalised = Either((_normalised(wide), _normalised(x)))
    narrowed = Op("aten.to.dtype", (normalised, Value("narrow"))), Op("aten.type_as.default", (normalised, x))
    return Op("aten.mul.Tensor", (Leaf("weight"), Either((*narrowed, _normalised(x)))), commutes=True)


def _rms_norm_fits(bound: Bindings) -> bool:
    """The last dim, a weight of its length, and a result in x's dtype, which is what the kernel returns."""
    x, weight, dims, eps = bound["x"].operand, bound["weight"].operand, bound["dims"].value, bound["eps"].value
    if x is None or weight is None or not isinstance(eps, float) or not isinstance(dims, tuple):
        return False
    is_last = dims in ((-1,), (len(x.shape) - 1,))
    widens = "wide" not in bound or is_dtype(bound["wide"], "float32")
    narrows = "narrow" not in bound or is_dtype(bound["narrow"], x.dtype)
    return is_last and widens and narrows and weight == Operand(x.shape[-1:], x.dtype)


PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        "RMSNorm",
        "kernels.rms_norm",
        ("x", "weight"),
        _rms_norm_template(),
        _rms_norm_fits,
        lambda bound, last, program: (fused("kernels.rms_norm", bound, ("x", "weight", "eps"), last),),
    ),
)
