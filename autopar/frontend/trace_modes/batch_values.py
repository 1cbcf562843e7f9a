"""Expressions of the batch: values that forward asks for, as `int(lengths.max())`, in Python that a program runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from codegen.guards import Guard

MOST_NUMBERS = 16
"""The most elements in a list of numbers that forward may get."""
_LONGEST = 500
_SYMBOLS = {
    **{"__add__": "+", "__sub__": "-", "__mul__": "*", "__truediv__": "/", "__floordiv__": "//", "__mod__": "%"},
    **{"__eq__": "==", "__ne__": "!=", "__lt__": "<", "__le__": "<=", "__gt__": ">", "__ge__": ">="},
    **{"__and__": "&", "__or__": "|", "__xor__": "^"},
    **{"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "add": "+", "sub": "-", "mul": "*"},
}
_MOVES = ("to", "cpu", "cuda")
_NUMBERS = {"__bool__": "bool({})", "__int__": "int({})", "__index__": "int({})", "item": "{}.item()"}
_COUNTS = re.compile(r"\.(sum|nansum|count_nonzero|mean|nanmean|nonzero|cumsum|prod|norm|bincount|std|var)\(")


@dataclass(slots=True)
class Specialization:
    """The values of the example batch on which a trace depends.

    guards: the values that forward asked for, by their code, with inputs of `shapes`. is_on: forward gets values, since
    it cannot be traced without them. is_traced: a trace succeeded.
    """

    guards: dict[str, Guard] = field(default_factory=dict)
    shapes: Any = None
    is_on: bool = False
    is_traced: bool = False

    def copy(self) -> Specialization:
        """Return a copy with its own table."""
        return replace(self, guards=dict(self.guards))


class NoExpressionError(Exception):
    """A call has no expression of the batch."""


def code_of_input(name: str) -> str:
    """Return the expression for an input."""
    return f'batch["{name}"]'


def expression(func: Any, name: str, args: Any, kwargs: Mapping[str, Any], codes: Mapping[int, str]) -> str | None:
    """Return the code of a call, or None. codes: of the tensors among its arguments, by their ids."""
    try:
        code = _call(func, name, list(args), dict(kwargs), codes)
    except NoExpressionError:
        return None
    return code if len(code) <= _LONGEST else None


def question(func: Any, name: str, args: Any, kwargs: Mapping[str, Any], codes: Mapping[int, str]) -> str | None:
    """Return the code of a call that asks for a value, or None."""
    if name in _NUMBERS and len(args) == 1 and id(args[0]) in codes:
        return _NUMBERS[name].format(codes[id(args[0])])
    if name == "__contains__" and len(args) == 2 and id(args[0]) in codes:
        return f"({args[1]!r} in {codes[id(args[0])]})" if type(args[1]) is int else None
    return expression(func, name, args, kwargs, codes)


def is_of_one_row(name: str, args: Sequence[Any], rows: int) -> bool:
    """Return whether a call takes single rows out of a tensor of all rows, which differ in every batch."""
    if not args or not isinstance(args[0], Tensor) or args[0].shape[:1] != (rows,):
        return False
    index = args[1] if len(args) > 1 else None
    return name in ("unbind", "tolist", "__iter__") or (name in ("__getitem__", "select") and type(index) is int)


def may_decide(code: str, value: Any) -> bool:
    """Return whether forward may get a value: one that is likely to be the same in other batches."""
    if isinstance(value, bool):
        return True
    if _COUNTS.search(code):
        return False
    if isinstance(value, list):
        numbers = list(_flat(value))
        return len(numbers) <= MOST_NUMBERS and all(isinstance(number, int) for number in numbers)
    return isinstance(value, int)


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for item in values:
        yield from _flat(item) if isinstance(item, list) else (item,)


def _call(func: Any, name: str, args: list[Any], kwargs: dict[str, Any], codes: Mapping[int, str]) -> str:
    kwargs.pop("device", None)  # batches are checked on the CPU
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return f"{_text(args[0], codes)}.{_plain(attribute)}"
    if name == "__getitem__" and len(args) == 2:
        return f"{_text(args[0], codes)}[{_index(args[1], codes)}]"
    if name in _SYMBOLS and len(args) == 2 and not kwargs:
        return f"({_text(args[0], codes)} {_SYMBOLS[name]} {_text(args[1], codes)})"
    if name in ("__invert__", "__neg__") and len(args) == 1:
        return f"({'~' if name == '__invert__' else '-'}{_text(args[0], codes)})"
    is_method = getattr(Tensor, name, None) == func and args and isinstance(args[0], Tensor)
    if is_method and name in _MOVES:
        args = [args[0], *(operand for operand in args[1:] if not isinstance(operand, (str, torch.device)))]
        if name != "to" or len(args) == 1 and "dtype" not in kwargs:
            return _text(args[0], codes)
        kwargs.pop("non_blocking", None)
    writes = name.endswith("_") or "out" in kwargs or "inplace" in kwargs
    if writes or not (is_method or getattr(torch, name, None) is func):
        raise NoExpressionError(name)
    named = [f"{_plain(key)}={_text(value, codes)}" for key, value in kwargs.items()]
    if is_method:
        first, *others = args
        return f"{_text(first, codes)}.{_plain(name)}({', '.join([*(_text(e, codes) for e in others), *named])})"
    return f"torch.{_plain(name)}({', '.join([*(_text(operand, codes) for operand in args), *named])})"


def _plain(name: str) -> str:
    if not name.isidentifier():
        raise NoExpressionError(name)
    return name


def _index(value: Any, codes: Mapping[int, str]) -> str:
    if isinstance(value, tuple):
        return ", ".join(_index(part, codes) for part in value) + ("," if len(value) == 1 else "")
    if isinstance(value, slice):
        parts = ["" if part is None else _text(part, codes) for part in (value.start, value.stop, value.step)]
        return ":".join(parts if parts[2] else parts[:2])
    return _text(value, codes)


def _text(value: Any, codes: Mapping[int, str]) -> str:
    if isinstance(value, Tensor):
        if id(value) not in codes:
            raise NoExpressionError("a tensor from outside the batch")
        return codes[id(value)]
    if value is None or value is Ellipsis or type(value) in (bool, str, int):
        return "..." if value is Ellipsis else repr(value)
    if type(value) is float and math.isfinite(value):
        return repr(value)
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, slice):
        return f"slice({', '.join(_text(part, codes) for part in (value.start, value.stop, value.step))})"
    if isinstance(value, (list, tuple)):
        return _sequence(value, codes)
    raise NoExpressionError(type(value).__name__)


def _sequence(values: Sequence[Any], codes: Mapping[int, str]) -> str:
    inside = ", ".join(_text(item, codes) for item in values)
    if isinstance(values, list):
        return f"[{inside}]"
    return f"({inside}{',' if len(values) == 1 else ''})"


def parts_of(code: str, result: Any) -> Iterator[tuple[Tensor, str]]:
    """Yield (tensor, code) for the result of a call, or for the tensors of a flat tuple or list."""
    if isinstance(result, Tensor):
        yield result, code
    elif isinstance(result, (tuple, list)):
        yield from ((part, f"{code}[{i}]") for i, part in enumerate(result) if isinstance(part, Tensor))
