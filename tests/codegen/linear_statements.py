"""Statements for handmade bodies of linear layers."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.program import Call, Program
from codegen.source.emit import emit_model
from tests.codegen.typed import SHAPE, var


def call(shapes: Mapping[str, tuple[int, ...]], target: str, result: str, *args: object) -> Call:
    """`result = torch.ops.aten.target(*args)`; texts are names of fp32 tensors of these shapes."""
    named = tuple(var(a, shapes.get(a, SHAPE)) if isinstance(a, str) else a for a in args)
    return Call(f"aten.{target}", named, (), (var(result, shapes.get(result, SHAPE)),))


def lines(found: Program) -> list[str]:
    """The body of forward, without comments; its result is called y."""
    text = emit_model(found).split("def forward")[1]
    code = [line.split("  #")[0].strip() for line in text.splitlines()[1:] if line.strip()]
    *body, last = (line for line in code if not line.startswith("#"))
    return body if last.removeprefix("return ").split(",")[0] == "y" else [*body, last.replace("return ", "y = ", 1)]
