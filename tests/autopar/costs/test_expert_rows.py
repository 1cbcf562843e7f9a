"""Prices of mixtures that read tokens and sum rows by token: what they spare, and which programs do so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.costs.emitted import emitted, priced
from autopar.ir.mesh import Mesh
from autopar.lowering.lower import lower
from autopar.plan import Plan
from autopar.planning.request import pricer_for
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.call_options import Operator, options_of
from codegen.runtime.experts import Routes, combine, dispatch
from tests.autopar.requests import BATCH, Setting, request_for, setting

MIXTRAL = "mixtral"


class Traffic(TorchDispatchMode):
    """Bytes that calls read and write; a gather reads as much as it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        floats = [x for x in (*args, result) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if function in (torch.ops.aten.index_select.default, torch.ops.aten.clone.default):
            self.num_bytes += 2 * result.nbytes
        elif function in (torch.ops.aten.mul.Tensor, torch.ops.aten.sum.dim_IntList):
            self.num_bytes += sum(x.nbytes for x in floats)
        return result


def _layers(it: Setting) -> dict[tuple[str, str], Operator]:
    return {key: op for key, op in it.operators.items() if op.node.op == EXPERT_LINEAR}


def test_spares_the_bytes_that_its_calls_moved() -> None:
    """Two choices each of T tokens. Without kernels copies of tokens are gone; kernels read and write rows once."""
    it, mesh = setting(MIXTRAL, "single"), Mesh.parse("single")
    first, last = _layers(it).values()
    (num_rows, width), columns, choices = first.inputs[0].shape, last.node.outputs[0].shape[1], first.route.choices
    tokens, weights = torch.randn(num_rows // choices, width), torch.rand(num_rows, 1)
    routes = Routes(torch.randint(first.inputs[1].shape[0], (num_rows,)), first.inputs[1].shape[0])
    moved = []
    for call in (
        lambda: dispatch(tokens.repeat_interleave(choices, 0), routes),
        lambda: dispatch(tokens, routes, choices=choices),
        lambda: combine(torch.randn(num_rows, columns), routes, weights, choices=choices),
    ):
        with Traffic() as traffic, torch.no_grad():
            call()
        moved.append(traffic.num_bytes)
    request = request_for(MIXTRAL, "4 h100-sxm")
    plain, fused = (pricer_for(replace(request, kernels=kernels), mesh, 1) for kernels in (False, True))
    rate = plain.cluster.device.memory_bytes_per_second * plain.cluster.device.memory_efficiency
    spared = [
        [pricer.contractions.rows.spared_seconds(op, options_of(op, mesh)[0]) for op in (first, last)]
        for pricer in (plain, fused)
    ]
    # A copy reads its token once, where torch's clone of an expanded tensor counts it for each choice.
    of_tokens = moved[0] - moved[1] - (choices - 1) * tokens.nbytes
    assert spared[0] == [(pytest.approx(of_tokens / rate), 0.0), (0.0, 0.0)]
    rows, sums = num_rows * columns * 4, num_rows // choices * columns * 4
    assert spared[1][1][0] == pytest.approx((moved[2] - weights.nbytes - rows - sums) / rate)
    assert all(seconds > 0 for layer in spared[1] for seconds in layer)


@pytest.mark.parametrize("is_rewritten", [True, False])
def test_the_program_says_which_mixtures_do(is_rewritten: bool) -> None:
    it = setting(MIXTRAL, "single")
    _, assignment = it.assignment(0)
    if is_rewritten:
        program = emitted(it.graph, it.operators, it.pricer, assignment, {}).program
    else:
        plan = Plan(MIXTRAL, "", it.pricer.mesh, BATCH, 1, "fp32", {})
        program = lower(it.graph, it.operators, plan, assignment)
    pricer = priced(program, it.graph, it.operators, it.pricer)
    for key, operator in _layers(it).items():
        assert (key in pricer.experts.from_tokens and key in pricer.experts.to_tokens) == is_rewritten
        spared = pricer.contractions.rows.spared_seconds(operator, assignment.operators[key])
        assert any(spared) == (is_rewritten and operator.route.dispatches)
