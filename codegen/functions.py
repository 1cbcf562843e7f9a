"""A user's `torch.autograd.Function` as an operator of the graph, which programs write as the Function's own `apply`.

The operator computes what forward does and knows no gradient: a program calls the Function by its import path, and so
has its backward. One operator is made for each Function and kinds of arguments.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from codegen.source.text import is_plain

NAMESPACE = "autograd_function"
_APPLY = torch.autograd.Function.__dict__["apply"]  # as it is where a trace has not replaced it
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", torch.dtype: "ScalarType", type(None): "Tensor?"}


@dataclass(frozen=True, slots=True)
class FunctionOperator:
    """One Function for one schema. packet: the operator's name in `NAMESPACE`, and the Function's in programs.

    written: the places of dicts, lists and tuples, which the operator takes as they are written in Python.
    """

    function: type
    packet: str
    operator: Callable[..., Any]
    written: frozenset[int] = frozenset()

    def given(self, args: Sequence[Any]) -> list[Any]:
        """Return the arguments of the Function, from those of the operator."""
        return _given(self.written, args)

    @property
    def import_line(self) -> str:
        """`from models.gelu import GeLU`, under the packet's name where that is another."""
        root = self.function.__qualname__.partition(".")[0]
        renamed = f" as {self.packet}" if root != self.packet else ""
        return f"from {self.function.__module__} import {root}{renamed}"

    @property
    def call(self) -> str:
        """`GeLU.apply`."""
        _, dot, rest = self.function.__qualname__.partition(".")
        return f"{self.packet}{dot}{rest}.apply"


def _given(written: frozenset[int], args: Sequence[Any]) -> list[Any]:
    return [ast.literal_eval(value) if i in written else value for i, value in enumerate(args)]


def applied(function: type, *args: Any) -> Any:
    """`function.apply(*args)`, while a trace has replaced that too."""
    return _APPLY.__get__(None, function)(*args)


def function_of(target: str) -> FunctionOperator | None:
    """The Function behind an operator's name, "autograd_function.GeLU.default"; None for other operators."""
    space, _, name = target.partition(".")
    return _made()[1].get(name.partition(".")[0]) if space == NAMESPACE else None


def can_import(function: type) -> bool:
    """Whether a module has the Function by its name."""
    try:
        return attrgetter(function.__qualname__)(sys.modules[function.__module__]) is function
    except (KeyError, AttributeError):
        return False


def unknown_arguments(args: Sequence[Any]) -> list[Any]:
    """Those that no operator takes: what is neither a tensor, a number, text, dtype, None, nor plain data of such."""
    return [
        argument
        for argument in args
        if not (isinstance(argument, Tensor) or type(argument) in _KINDS or is_plain(argument))
    ]


def operator_of(function: type, args: Sequence[Any], num_outputs: int | None) -> FunctionOperator:
    """The operator for a call with `args`. num_outputs: of the tuple that it returns; None for a tensor by itself."""
    written = frozenset(i for i, value in enumerate(args) if isinstance(value, (dict, list, tuple)))
    kinds = ["Tensor" if isinstance(value, Tensor) else _KINDS.get(type(value), "str") for value in args]
    result = "Tensor" if num_outputs is None else f"({', '.join(['Tensor'] * num_outputs)})"
    schema = f"({', '.join(f'{kind} a{i}' for i, kind in enumerate(kinds))}) -> {result}"
    by_schema, by_packet = _made()
    key = function, schema, written
    if key not in by_schema:
        wish = function.__qualname__.replace(".", "_")
        packet = wish if wish not in by_packet else f"{wish}_{len(by_packet)}"
        operator = FunctionOperator(function, packet, _operator(function, packet, schema, written), written)
        by_schema[key] = by_packet[packet] = operator
    return by_schema[key]


@cache
def _made() -> tuple[dict[tuple[type, str, frozenset[int]], FunctionOperator], dict[str, FunctionOperator]]:
    """Those of this process, by Function, schema and places of what is written, and by packet; torch keeps them."""
    return {}, {}


def _operator(function: type, packet: str, schema: str, written: frozenset[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with torch.no_grad():
            results = applied(function, *_given(written, args))
        return tuple(map(_own, results)) if isinstance(results, tuple) else _own(results)

    def _own(result: Tensor) -> Tensor:
        """An operator's result shares no memory with its operands."""
        return result.clone()

    custom_operator = torch.library.custom_op(f"{NAMESPACE}::{packet}", run, mutates_args=(), schema=schema)
    custom_operator.register_fake(run)
    return custom_operator


def is_custom(target: str) -> bool:
    """Whether a target is an operator of another library than torch's own (`torch.library`)."""
    return target.count(".") == 2 and not target.startswith(("aten.", "prims.", "self.", f"{NAMESPACE}."))
