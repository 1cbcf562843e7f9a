"""Activations between two linear layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

from codegen.fusion.template import FLOATS, Bindings, Either, Is, Leaf, Op, Pattern, Template, argument_types, fused
from codegen.program import Call, TensorType

# --- GELU -------------------------------------------------------------------------------------------------------------


def _mul(*factors: Template) -> Op:
    product, *rest = factors
    for factor in rest:
        product = Op("aten.mul.Tensor", (product, factor), commutes=True)
    assert isinstance(product, Op)
    return product


def _written_gelu(x: Template) -> tuple[Op, Op]:
    """Return GELU as models write it, operation by operation (see kernels/gelu.py): with tanh, and exact."""
    cubed = Op("aten.pow.Tensor_Scalar", (x, Is(3)))
    inner = Op("aten.add.Tensor", (x, _mul(cubed, Is(0.044715))), commutes=True)
    tanh = Op("aten.tanh.default", (_mul(inner, Is(math.sqrt(2 / math.pi))),), name="tanh")
    erf = Op("aten.erf.default", (Op("aten.div.Tensor", (x, Is(math.sqrt(2)))),))
    return _gelu_of(x, tanh), _gelu_of(x, erf)


def _gelu_of(x: Template, share: Op) -> Op:
    """The template of x / 2 * (1 + share)."""
    return _mul(_mul(x, Is(0.5)), Op("aten.add.Tensor", (share, Is(1)), commutes=True))


def _gelu(x: Template) -> Either:
    """GELU as torch's call, or as models write it."""
    return Either((Op("aten.gelu.default", (x,), keywords=("approximate",)), *_written_gelu(x)))


def _approximate(bound: Bindings) -> tuple[tuple[str, Any], ...]:
    """The keyword of a call, if it is not the exact form."""
    approximation = bound["approximate"].value if "approximate" in bound else "tanh" if "tanh" in bound else "none"
    return () if approximation == "none" else (("approximate", approximation),)


def _gelu_fits(bound: Bindings) -> bool:
    return bound["x"].type.dtype in FLOATS


def _with_form(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    """The kernel on its leaves, with the form of its GELU."""
    return (fused(pattern.target, bound, pattern.leaves, last, _approximate(bound)),)


def _bias_gelu_fits(bound: Bindings) -> bool:
    """A bias of the last dim, in x's dtype."""
    x, bias = bound["x"].type, bound["bias"].type
    return len(x.shape) > 1 and x.dtype in FLOATS and (bias.shape, bias.dtype) == (x.shape[-1:], x.dtype)


_WITH_TANH, _WITH_ERF = _written_gelu(Leaf("x"))
_BIASED: Final = Op("aten.add.Tensor", (Leaf("x"), Leaf("bias")), commutes=True)


# --- gated ------------------------------------------------------------------------------------------------------------


def _gated_fits(bound: Bindings) -> bool:
    """Whether nothing is broadcast or promoted."""
    return bound["gate"].type.is_alike(bound["up"].type)


def _gated_result(call: Call) -> tuple[TensorType | None, ...]:
    """y has the shape of the gate; of half of its last dim where the other half is what it gates."""
    gate, *up = argument_types(call)
    if up or gate is None:
        return (gate,)
    return (replace(gate, shape=(*gate.shape[:-1], gate.shape[-1] // 2)),)


def _forms(template: Either) -> tuple[Op, ...]:
    return tuple(option for option in template.options if isinstance(option, Op))


SWIGLU: Final = Pattern(
    name="SwiGLU",
    target="kernels.swiglu",
    leaves=("gate", "up"),
    template=_mul(Op("aten.silu.default", (Leaf("gate"),)), Leaf("up")),
    fits=_gated_fits,
    result_types=_gated_result,
    saves=("gate", "up"),
)
GELU_WITH_TANH: Final = Pattern(
    name="GELU",
    target="aten.gelu.default",
    leaves=("x",),
    template=_WITH_TANH,
    fits=_gelu_fits,
    build=_with_form,
    on_cpu=True,  # torch's own call, which is one kernel, forward and backward
)

PATTERNS: Final[tuple[Pattern, ...]] = (
    SWIGLU,
    Pattern(
        name="GeGLU",
        target="kernels.geglu",
        leaves=("gate", "up"),
        template=_mul(_gelu(Leaf("gate")), Leaf("up")),
        fits=_gated_fits,
        result_types=_gated_result,
        build=_with_form,
        saves=("gate", "up"),
    ),
    *(
        Pattern(
            name="bias and GELU",
            target="kernels.bias_gelu",
            leaves=("x", "bias"),
            template=form,
            fits=_bias_gelu_fits,
            build=_with_form,
            saves=("x", "bias"),
            launches=(1, 2),
        )
        for form in _forms(_gelu(_BIASED))
    ),
    GELU_WITH_TANH,
    replace(GELU_WITH_TANH, template=_WITH_ERF),
)
"""One of a kind per form where the forms end in different calls."""
