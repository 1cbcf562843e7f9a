"""Dropout and the addition to the residual stream."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from codegen.fusion.template import Bindings, Leaf, Op, Pattern, Value, fused
from codegen.program import Call, Raw
from codegen.source.expressions import literal

PLACE: Final = ("call", "layout", "batched")
"""What says which mask a dropout draws, and which part of it."""


def _fits(bound: Bindings) -> bool:
    """Whether nothing is broadcast or promoted, and something is dropped."""
    p = bound["p"].value
    return bound["x"].type.is_alike(bound["residual"].type) and isinstance(p, float) and 0.0 < p < 1.0


def _build(pattern: Pattern, bound: Bindings, last: Call) -> tuple[Call, ...]:
    place = ", ".join(f"{key}={literal(bound[key].value)}" for key in PLACE if key in bound)
    call = fused(pattern.target, bound, ("x", "residual", "p"), last)
    return (replace(call, args=(*call.args, Raw(f"**self.dropout_mask({place})"))),)


PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        name="dropout and sum",
        target="kernels.dropout_add",
        leaves=("x", "residual"),
        template=Op(
            "aten.add.Tensor",
            (Op("self.same_dropout", (Leaf("x"), Value("p")), keywords=PLACE), Leaf("residual")),
            commutes=True,
        ),
        fits=_fits,
        build=_build,
        is_linear=True,  # backward draws the mask again, in the same kernel
        no_gradient=("residual",),
    ),
)
