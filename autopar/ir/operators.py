"""The operators that a function calls, and the arguments of a node by the names that the operator's schema has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.ir.graph import Node, base_name
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
