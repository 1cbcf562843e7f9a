"""Special functions (exponentials, error functions, powers, ...) that a call evaluates per element on a CPU.

The unit is an error function with its product (a GELU), or two passes with a root per row (a norm): `autopar
profile` measures it as Device.special_seconds. The others are relative to it, from torch 2.13 on one core with AVX2
(an EPYC; nanoseconds per element less 0.3 for memory): exp 0.8, sigmoid 0.9, SiLU 1.1, GELU 1.3 and with tanh 3.8,
tanh 3.1, erf 1.7, log 2.1, sin and cos 1.7, sqrt 0.8, rsqrt 0.4, softmax 1.2, powers 7.6.
"""

from __future__ import annotations

from autopar.ir.graph import Node, base_name
from autopar.operators.traits import SPECIALS

Counts = tuple[float, float]
"""Special functions per element, in forward and in backward."""

GELU_TANH: Counts = (3.0, 3.0)
"""GELU's approximation by tanh."""
PRODUCTS = (0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 3.0)
"""Exponents of powers that torch computes by products and roots."""


def specials(node: Node) -> Counts:
    """Return the special functions per element of one call of `node`; (0, 0) for calls that only add and multiply."""
    name = base_name(node.op)
    if name == "gelu" and "tanh" in (*node.args, *dict(node.kwargs).values()):
        return GELU_TANH
    if name == "pow" and any(argument in PRODUCTS for argument in node.args if isinstance(argument, (int, float))):
        return 0.0, 0.0
    return SPECIALS.get(name, (0.0, 0.0))
