"""Floating-point operations of matmuls and convolutions, as torch counts them when it runs them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.costs.contractions import contraction_flops
from autopar.ir.graph import base_name
from autopar.ir.operators import call_operator
from autopar.operators.traits import MATMULS
from autopar.rules.registry import rule_for
from autopar.sharding.call_options import Operator
from tests.autopar.rules.handmade_calls import f, make_node

CALLS: tuple[tuple[Any, ...], ...] = (
    ("aten.linear.default", f(4, 6, 12), f(6, 12), f(6)),
    ("aten.addmm.default", f(6), f(4, 12), f(12, 6)),
    ("aten.bmm.default", f(6, 4, 6), f(6, 6, 12)),
    ("aten.einsum.default", "bhqd,bhkd->bhqk", [f(2, 4, 6, 6), f(2, 4, 6, 6)]),
    ("aten.conv1d.default", f(4, 6, 8), f(6, 6, 3), f(6), [1], [1]),
    ("aten.conv2d.default", f(2, 3, 12, 24), f(4, 3, 2, 4), f(4), [2, 4]),
    ("aten.conv2d.default", f(4, 12, 7, 5), f(24, 2, 3, 3), f(24), [2, 1], [1, 1], [1, 1], 6),
    ("aten.conv3d.default", f(2, 4, 5, 6, 7), f(6, 4, 3, 3, 3), None, [1, 2, 1], [1, 1, 0]),
    ("aten.conv_transpose1d.default", f(2, 6, 5), f(6, 4, 3), f(4), [2]),
    ("aten.conv_transpose2d.input", f(2, 6, 5, 4), f(6, 2, 3, 2), f(4), [2, 1], [1, 0], [0, 0], 2),
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call[0]}-{len(str(call))}")
def test_as_many_as_torch_counts(call: tuple[Any, ...]) -> None:
    node, inputs = make_node(*call)
    rule = rule_for(node, tuple(inputs))
    assert rule is not None and base_name(node.op) in MATMULS
    operator = cast(Operator, SimpleNamespace(node=node, rule=rule, inputs=tuple(inputs)))
    tensors = [torch.randn(meta.shape) for meta in inputs]
    with FlopCounterMode(display=False) as counted:
        call_operator(node, tensors)
    assert math.isclose(contraction_flops(operator), counted.get_total_flops())
