"""Facts about operators, read from torch's schemas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch


def find_op(name: str) -> torch._ops.OpOverload | None:
    """Return the overload called `name` ("aten.linear.default"), or None if torch does not have it."""
    return _find_known(name) if name.startswith("aten.") else _find(name)


def _find(name: str) -> torch._ops.OpOverload | None:
    parts = name.split(".")
    if len(parts) != 3:
        return None
    namespace, packet, overload = parts
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
    return op if isinstance(op, torch._ops.OpOverload) else None


_find_known = cache(_find)
"""The same for torch's own operators, which do not come and go."""


def may_be_view(name: str) -> bool:
    """Return whether a result of the operator may share memory with an operand that it does not write to."""
    op = find_op(name)
    infos = [] if op is None else [result.alias_info for result in op._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def is_seeded(op: torch._ops.OpOverload | None) -> bool:
    """Return whether an operator of torch draws random numbers, or may."""
    return op is not None and torch.Tag.nondeterministic_seeded in op.tags


def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Return the names of an operator's arguments in the schema's order."""
    return _arguments(op)[0]


def named_arguments(op: torch._ops.OpOverload, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, in the schema's order, with the defaults of those that are left out."""
    names, defaults = _arguments(op)
    values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return {name: values[name] for name in names if name in values}


@lru_cache(maxsize=4096)
def _arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the names of an operator's arguments, and the defaults of those that have one."""
    schema = op._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in defaults.items()}
    return tuple(argument.name for argument in schema), values
