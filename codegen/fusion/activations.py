"""Activations between two linear layers."""

from __future__ import annotations

from typing import Final

from codegen.fusion.template import Bindings, Leaf, Op, Pattern, fused


def _swiglu_fits(bound: Bindings) -> bool:
    """No broadcasting and no promotion."""
    gate, up = bound["gate"].operand, bound["up"].operand
    return gate is not None and gate == up


PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        "SwiGLU",
        "kernels.swiglu",
        ("gate", "up"),
        Op("aten.mul.Tensor", (Op("aten.silu.default", (Leaf("gate"),)), Leaf("up")), commutes=True),
        _swiglu_fits,
        lambda bound, last, program: (fused("kernels.swiglu", bound, ("gate", "up"), last),),
    ),
)
