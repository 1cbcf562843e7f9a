"""Layers of a mixture of experts, whose rows choose a matrix each (codegen/runtime/experts.py).

A row's result depends on that row and its expert alone, so rows may be cut as a batch is; features are those of any
linear layer. Every rank has all experts: which rows a rank would multiply for its own ones is data.
"""

from __future__ import annotations

import torch

from autopar.rules.call import Call, make_rule
from autopar.rules.rule import Rule
from codegen.runtime.experts import expert_linear as expert_linear_function

EXPERT_LINEAR = "autopar.expert_linear.default"
"""`expert_linear(input [N, A], weight [E, A, B], experts [N]) -> [N, B]`: what traces of sorted rows are written as."""

_LIBRARY = torch.library.Library("autopar", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "expert_linear(Tensor input, Tensor weight, Tensor experts) -> Tensor"
)
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "expert_linear", expert_linear_function, "CompositeImplicitAutograd"
)


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
    )


TABLE = {"autopar.expert_linear": expert_linear}
