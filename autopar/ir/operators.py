"""The operators that a function calls, and the arguments of a node by the names that the operator's schema has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.graph import Node, base_name, map_refs
from autopar.operators.schemas import find_op, may_be_view, named_arguments
from autopar.operators.traits import MOVING, VIEWS


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


def shares_memory(op: str) -> bool:
    """Return whether the results of a call share memory with its first operand. A `contiguous` or `to` that is left in
    a trace is a copy."""
    name = base_name(op)
    return name in VIEWS or (name not in MOVING and may_be_view(op))


def arguments_of(node: Node) -> dict[str, Any]:
    """Return `named_arguments` of a node; an empty dict for an operator unknown to torch."""
    op = find_op(node.op)
    return {} if op is None else named_arguments(op, node.args, dict(node.kwargs))


def call_operator(node: Node, inputs: Sequence[Tensor], device: str = "cpu") -> tuple[Tensor, ...]:
    """Run the node's operator and return its outputs. `inputs` replace the Refs in order.

    device: replaces every device among the arguments. Raises ValueError for an operator unknown to torch.
    """
    overload = find_op(node.op)
    if overload is None:
        raise ValueError(f"torch has no operator {node.op!r}")
    copies = (tensor.clone() for tensor in inputs)  # so that in-place forms do not write to leaves
    args, kwargs = map_refs((node.args, node.kwargs), lambda _: next(copies))
    result = overload(*_as_list(args, device), **{name: _as_list(value, device) for name, value in kwargs})
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _as_list(value: Any, device: str) -> Any:
    """Convert tuples to lists, which operators require, and replace devices."""
    if isinstance(value, torch.device):
        return torch.device(device)
    return [_as_list(item, device) for item in value] if isinstance(value, tuple) else value
