"""Layers of a mixture of experts, whose rows choose a matrix each (codegen/runtime/experts.py).

A row's result depends on that row and its expert alone, so rows may be cut as a batch is; features are those of any
linear layer. Experts are cut together with rows only, which then travel to the rank that has their expert and back:
which rows those are is data.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.rules.call import Call, make_rule
from autopar.rules.rule import Joint, Rule
from codegen.runtime import experts as experts_runtime

EXPERT_LINEAR = "autopar.expert_linear.default"
"""`expert_linear(input [N, A], weight [E, A, B], experts [N]) -> [N, B]`: what traces of sorted rows are written as."""

ROUTED = "routed"
"""The lowering of calls whose ranks have experts each."""

ROWS_AND_EXPERTS = "n+e"
"""The label of the option that cuts rows and experts."""


@torch.library.custom_op("autopar::expert_linear", mutates_args=())
def _operator(input: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    return experts_runtime.expert_linear(input, weight, experts)


@_operator.register_fake
def _shape(input: Tensor, weight: Tensor, experts: Tensor) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[2])


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """Programs differentiate the function itself; this is for those who call the operator, which proofs do."""
    *factors, experts = ctx.saved_tensors
    with torch.enable_grad():
        leaves = [factor.detach().requires_grad_() for factor in factors]
        result = experts_runtime.expert_linear(leaves[0], leaves[1], experts)
    to_input, to_weight = torch.autograd.grad(result, leaves, gradient)
    return to_input, to_weight, None


_operator.register_autograd(_backward, setup_context=_setup)


def expert_linear(call: Call) -> Rule:
    """input [n, a], weight [e, a, b], experts [n] -> [n, b]."""
    weight = call.tensor("weight")
    sizes = dict(zip("eab", weight.shape, strict=True)) | {"n": call.tensor("input").shape[0]}
    return make_rule(
        call,
        [[["n"], ["a"]], [["e"], ["a"], ["b"]], [["n"]]],
        [[["n"], ["b"]]],
        sizes,
        blocked={"e"},
        linear=("input", "weight"),
        joints={ROWS_AND_EXPERTS: Joint(("n", "e", "n"), "n", ROUTED, frozenset("n"))},
    )


TABLE = {"autopar.expert_linear": expert_linear}
