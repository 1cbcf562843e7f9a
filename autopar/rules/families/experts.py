"""Rules of layers of a mixture of experts, in which each row chooses a matrix (codegen/runtime/experts.py).

A row's result depends only on that row and its expert, so rows may be sharded like a batch; features like those of any
linear layer. Experts are sharded only together with rows. The rows then travel to the rank that has their expert and
back, depending on data. Several axes that shard both act on the rows as one axis of all their ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from autopar.ir.graph import Node, Ref
from autopar.rules.call import Call, make_rule
from autopar.rules.rule import Joint, Rule
from codegen.runtime.experts import Routes, RoutingAxis, combine, dispatch
from codegen.runtime.experts import expert_linear as multiplied

EXPERT_LINEAR = "autopar.expert_linear.default"
"""`expert_linear(input [N, A], weight [E, A, B], experts [N], bias [E, B]) -> [N, B]`: the form in which traces of
sorted rows are written. The bias may be absent."""

ROUTED = "routed"
"""The lowering of calls whose ranks have different experts."""

ROWS_AND_EXPERTS = "n+e"
"""The label of the option that shards rows and experts."""


def routed_linear(
    input: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None, axis: RoutingAxis | None = None
) -> Tensor:
    """Return `input[n] @ weight[experts[n]] + bias[experts[n]]` for every row n. axis: its ranks have an equal run of
    the experts each."""
    routes = Routes(experts, len(weight) * (1 if axis is None else axis.size), axis)
    return combine(multiplied(dispatch(input, routes), weight, routes, bias), routes)


@torch.library.custom_op("autopar::expert_linear", mutates_args=())
def _operator(input: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    return routed_linear(input, weight, experts, bias)


@_operator.register_fake
def _shape(input: Tensor, weight: Tensor, experts: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


def _setup(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Differentiate the operator, for proofs; programs differentiate the function itself."""
    input, weight, experts, bias = ctx.saved_tensors
    factors = [factor for factor in (input, weight, bias) if factor is not None]
    with torch.enable_grad():
        leaves = [factor.detach().requires_grad_() for factor in factors]
        result = routed_linear(leaves[0], leaves[1], experts, *leaves[2:])
    to_input, to_weight, *rest = torch.autograd.grad(result, leaves, gradient)
    return to_input, to_weight, None, rest[0] if rest else None


_operator.register_autograd(_backward, setup_context=_setup)


def expert_linear(call: Call) -> Rule:
    """Return the rule of input [n, a], weight [e, a, b], experts [n], optional bias [e, b] -> [n, b]."""
    weight, bias = call.tensor("weight"), call.get("bias")
    sizes = dict(zip("eab", weight.shape, strict=True)) | {"n": call.tensor("input").shape[0]}
    last = [] if bias is None else [[["e"], ["b"]]]
    return make_rule(
        call,
        [[["n"], ["a"]], [["e"], ["a"], ["b"]], [["n"]], *last],
        [[["n"], ["b"]]],
        sizes,
        blocked={"e"},
        additive={3} if last else (),
        linear=("input bias", "weight bias"),
        joints={
            ROWS_AND_EXPERTS: Joint(
                inputs=("n", "e", "n", "e")[: len(call.inputs)],
                output="n",
                lowering=ROUTED,
                free=frozenset("ne"),
                in_sections=True,
            )
        },
    )


def row_factor(node: Node, rule: Rule, rows: Collection[Ref]) -> str:
    """Return the factor of the first dim of all outputs, if the call treats every row alike and independently; else "".

    rows: the inputs that have the factor.
    """
    first = {dims[0] if dims else () for dims in rule.outputs}
    factor = next(iter(first))[0] if len(first) == 1 and all(len(dim) == 1 for dim in first) else ""
    if not factor or factor in rule.blocked or factor in rule.lowerings or "*" in rule.lowerings:
        return ""
    for ref, dims in zip(node.inputs, rule.inputs, strict=True):
        holders = [number for number, dim in enumerate(dims) if factor in dim]
        is_right = holders == [0] and dims[0] == (factor,) if ref in rows else not holders
        if not is_right:
            return ""
    return factor


TABLE = {"autopar.expert_linear": expert_linear}
