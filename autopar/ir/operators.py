"""torch's operators by name, and the arguments of a call by the names in the operator's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.graph import Node


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
"""`_find` with a cache, for torch's own operators, which never change."""


def calls_of(
    run: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    decompositions: Mapping[torch._ops.OpOverload, Callable[..., Any]] | None = None,
) -> torch.fx.GraphModule:
    """Trace the operators that `run(*tensors)` calls, backward included, with writes in functional form.

    tensors: fake, under their mode. decompositions: of operators to decompose.
    """
    joint = make_fx(run, decomposition_table=decompositions)(*tensors)
    return make_fx(functionalize(joint))(*tensors)


def may_be_view(name: str) -> bool:
    """Whether a result of the operator may share memory with an operand that it does not write to, by its schema."""
    op = find_op(name)
    infos = [] if op is None else [result.alias_info for result in op._schema.returns]
    return any(info is not None and not info.is_write for info in infos)


def named_arguments(op: torch._ops.OpOverload, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name, in the schema's order, with defaults for omitted ones."""
    names, defaults = _arguments(op)
    values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return {name: values[name] for name in names if name in values}


@lru_cache(maxsize=4096)
def _arguments(op: torch._ops.OpOverload) -> tuple[tuple[str, ...], Mapping[str, Any]]:
    """Return the names of an operator's arguments, and the defaults of those that have one."""
    schema = op._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    frozen = {name: tuple(value) if isinstance(value, list) else value for name, value in defaults.items()}
    return tuple(a.name for a in schema), frozen


def arguments_of(node: Node) -> dict[str, Any]:
    """Return `named_arguments` of a node; an empty dict for an operator unknown to torch."""
    op = find_op(node.op)
    return {} if op is None else named_arguments(op, node.args, dict(node.kwargs))
