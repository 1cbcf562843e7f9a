"""Nodes made by hand: an operator's name and its arguments, tensors written as `T(shape)`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from autopar.graph import Node, Ref, TensorMeta
from autopar.rules.call import find_op


@dataclass(frozen=True)
class T:
    """A tensor argument; floating ones are differentiated unless `grad` is False."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    grad: bool = True

    @property
    def meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.dtype, self.grad and self.dtype.is_floating_point)


def ints(*shape: int) -> T:
    return T(shape, torch.int64)


def bools(*shape: int) -> T:
    return T(shape, torch.bool)


def f(*shape: int) -> T:
    return T(shape)


def make_node(op: str, *args: Any, **kwargs: Any) -> tuple[Node, tuple[TensorMeta, ...]]:
    """The node and its inputs' metas; the output metas come from running the operator on zeros."""
    metas: list[TensorMeta] = []
    numbers = itertools.count()

    def ref(value: Any) -> Any:
        if isinstance(value, T):
            metas.append(value.meta)
            return Ref(f"x{next(numbers)}")
        return tuple(ref(item) for item in value) if isinstance(value, list | tuple) else value

    def real(value: Any) -> Any:
        if isinstance(value, T):
            return torch.zeros(value.shape, dtype=value.dtype)
        return [real(item) for item in value] if isinstance(value, list | tuple) else value

    overload = find_op(op)
    assert overload is not None, op
    result = overload(*(real(a) for a in args), **{k: real(v) for k, v in kwargs.items()})
    results = tuple(result) if isinstance(result, tuple | list) else (result,)
    node_args = tuple(ref(a) for a in args)
    node_kwargs = tuple((k, ref(v)) for k, v in kwargs.items())
    differentiable = any(meta.requires_grad for meta in metas)
    outputs = tuple(
        TensorMeta(tuple(r.shape), r.dtype, differentiable and r.dtype.is_floating_point) for r in results
    )
    return Node("call", op, node_args, node_kwargs, outputs), tuple(metas)
