"""Torch's own answer to how a call's results lie in memory, on meta tensors, kept for equal calls."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from codegen.program import Call, Var

Strides = tuple[int, ...]

_asked: dict[tuple[str, ...], tuple[Strides, ...] | None] = {}
"""What torch said, by call and layouts of the operands."""
_MOST_ASKED = 20_000


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor as torch is asked about it."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: str

    def tensor(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device="meta")


def contiguous(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor."""
    steps = itertools.accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1)
    return tuple(steps)[::-1] if shape else ()


def evened(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Strides with those of dims of one element as of a contiguous tensor: they say nothing."""
    if 0 in shape:
        return contiguous(shape)
    even_strides, step = list(strides), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            even_strides[dim] = step
        step = even_strides[dim] * shape[dim]
    packed = contiguous(shape)
    is_packed = all(size == 1 or a == b for size, a, b in zip(shape, even_strides, packed, strict=True))
    return packed if is_packed else tuple(even_strides)


def ordered_like(shape: tuple[int, ...], like: Strides) -> Strides:
    """Strides of a tensor without gaps whose dims are in the order of those of `like`."""
    if len(like) != len(shape):
        return contiguous(shape)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def answer(call: Call, operands: Mapping[str, Operand]) -> tuple[Strides, ...] | None:
    """The strides of the results for these operands; None where torch does not take them."""
    args, kwargs = _filled(call.args, operands), {name: _filled(value, operands) for name, value in call.kwargs}
    key = call.target, repr(args), repr(kwargs)
    if key not in _asked:
        if len(_asked) >= _MOST_ASKED:
            _asked.clear()
        _asked[key] = _ask(call.target, args, kwargs)
    return _asked[key]


def _filled(value: Any, operands: Mapping[str, Operand]) -> Any:
    if isinstance(value, Var):
        return operands[value.name]
    return [_filled(item, operands) for item in value] if isinstance(value, tuple) else value


def _ask(target: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Strides, ...] | None:
    operator: Any = torch.ops
    try:
        for part in target.split("."):
            operator = getattr(operator, part)
        with torch.no_grad():
            result = operator(*_made(args), **{name: _made(value) for name, value in kwargs.items()})
    except Exception:  # of whatever class: torch does not take these operands, or has no such operator for meta tensors
        return None
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(evened(tuple(tensor.shape), tensor.stride()) for tensor in results if isinstance(tensor, torch.Tensor))


def _made(value: Any) -> Any:
    if isinstance(value, Operand):
        return value.tensor()
    return [_made(item) for item in value] if isinstance(value, list) else value


def follows_operands(target: str) -> bool:
    """Whether an operator's result lies as its operands say on every device: a view, or elementwise."""
    operator: Any = torch.ops
    for part in target.split("."):
        operator = getattr(operator, part, None)
    is_alias = any(value.alias_info is not None for value in operator._schema.returns)
    return is_alias or torch.Tag.pointwise in operator.tags
