"""Schemas of torch's functions: the one module that knows where torch keeps them.

Overloads have a schema each (`torch.ops.aten.add.Tensor`). Functions and methods written in C++ (`torch.add`,
`F.linear`, `x.sum`) take whatever one of the operator's overloads takes; those written in Python have a signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch


class EmissionError(Exception):
    """A program cannot be written, or what was written cannot run: never the user's fault.

    problem: one clause. call: the text or operator that is wrong, if any. where: the file and its line.
    """

    def __init__(self, problem: str, call: str = "", where: str = "") -> None:
        self.problem, self.call, self.where = problem, call, where
        super().__init__(": ".join(filter(None, (where, problem, call))))


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a schema. type: torch's word for it ("Tensor", "Optional[int]"). default: lists are tuples."""

    name: str
    type: str
    is_required: bool
    is_keyword: bool
    default: Any = None

    def is_default(self, value: Any) -> bool:
        """Whether leaving `value` out says the same: equal and of one type (a step of 1.0 makes floats, 1 integers)."""
        return not self.is_required and type(value) is type(self.default) and bool(value == self.default)


Schema = tuple[Argument, ...]


@cache
def schema_of(target: str) -> Schema | None:
    """The schema of an overload such as "aten.linear.default"; None if torch has none of that name."""
    member: Any = torch.ops
    for part in target.split("."):
        member = getattr(member, part, None)
    return _arguments(member._schema) if isinstance(member, torch._ops.OpOverload) else None


@cache
def devices_of(target: str) -> tuple[str, ...]:
    """The names of an overload's arguments that are devices, as `device` of `aten.zeros.default`."""
    return tuple(argument.name for argument in schema_of(target) or () if "Device" in argument.type)


@cache
def makes(target: str) -> bool:
    """Whether an overload makes a tensor that lies where it is told to, whatever its operands: `zeros`, `hann_window`.

    Those whose first operand is a tensor called `self` follow it (`zeros_like`, `new_zeros`, `to`).
    """
    schema = schema_of(target) or ()
    return "device" in devices_of(target) and not any(a.name == "self" and a.type == "Tensor" for a in schema)


@cache
def makes_list(target: str) -> bool:
    """Whether an overload's result is a list of tensors, of however many."""
    member: Any = torch.ops
    for part in target.split("."):
        member = getattr(member, part, None)
    return isinstance(member, torch._ops.OpOverload) and str(member._schema.returns[0].type).startswith("List")


@cache
def schemas_named(name: str) -> tuple[Schema, ...]:
    """The schemas of aten's operator `name`, without overloads that write to `out`; () if there is none."""
    schemas = [_arguments(schema) for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}")]
    return tuple(schema for schema in schemas if not any(argument.name == "out" for argument in schema))


@cache
def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function written in Python; None for one in C++."""
    try:
        return inspect.signature(function)
    except ValueError:
        return None


def _arguments(schema: Any) -> Schema:
    return tuple(
        Argument(
            name=a.name,
            type=str(a.type),
            is_required=not a.has_default_value(),
            is_keyword=a.kwarg_only,
            default=tuple(a.default_value) if isinstance(a.default_value, list) else a.default_value,
        )
        for a in schema.arguments
    )
