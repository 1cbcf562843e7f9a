"""Variables and reshards for handmade programs."""

from __future__ import annotations

from typing import Any

from codegen.program import Reshard, TensorType, Var

SHAPE = (3, 4, 8)
"""Of what has no shape of its own."""


def var(name: str, shape: tuple[int, ...] = SHAPE, dtype: str = "float32", **placements: str) -> Var:
    return Var(name, TensorType(shape, dtype, tuple(placements.items())))


def variables(*names: str) -> tuple[Var, ...]:
    return tuple(map(var, names))


def reshard(
    method: str, source: str, result: str, target: str = "R", shape: tuple[int, ...] = SHAPE, **kwargs: Any
) -> Reshard:
    """`result = tp.method(source, **kwargs)`; target: the result's placement."""
    return Reshard("tp", method, var(source, shape), tuple(kwargs.items()), var(result, shape, tp=target))
