"""Statements for handmade bodies of linear layers."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.program import Call, Operand, Var

RESULT = (3, 4, 8)
"""Of what has no shape of its own."""


def call(shapes: Mapping[str, tuple[int, ...]], target: str, result: str, *args: object) -> Call:
    """`result = torch.ops.aten.target(*args)`; texts are names of fp32 tensors of these shapes."""
    named = tuple(Var(a) if isinstance(a, str) else a for a in args)
    held = tuple((a, Operand(shapes.get(a, RESULT), "float32")) for a in args if isinstance(a, str))
    return Call(f"aten.{target}", named, (), (result,), operands=held)
