"""Statements for handmade bodies of linear layers."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.program import Call
from tests.codegen.typed import SHAPE, var


def call(shapes: Mapping[str, tuple[int, ...]], target: str, result: str, *args: object) -> Call:
    """`result = torch.ops.aten.target(*args)`; texts are names of fp32 tensors of these shapes."""
    named = tuple(var(a, shapes.get(a, SHAPE)) if isinstance(a, str) else a for a in args)
    return Call(f"aten.{target}", named, (), (var(result, shapes.get(result, SHAPE)),))
