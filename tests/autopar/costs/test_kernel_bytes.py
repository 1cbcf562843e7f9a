"""What layers with fused kernels keep, and plans that fit with them only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.costs.cost_table import unit_costs
from autopar.frontend.trace import trace
from autopar.ir.mesh import Mesh
from autopar.launch import run_ranks
from autopar.planning.planner import search_plans
from autopar.planning.request import pricer_for
from autopar.sharding.call_options import operators_of, options_of
from benchmarks.memory import IDEAL, OVER, UNDER, _peaks
from cost_models.machine import Cluster
from examples.models import EXAMPLES
from tests.autopar.costs.test_kernel_prices import NARROW, fused_setting
from tests.autopar.requests import (
    BATCH,
    hostless,
    request_for,
)


def test_a_layer_keeps_less() -> None:
    """Per SwiGLU the activation of the gate, per RMSNorm the normalised x (the weight's factor): one tensor each. The
    norm's number per row is kept either way."""
    it = fused_setting("llama", "single")
    _, assignment = it.assignment(0)
    plain = pricer_for(request_for("llama"), it.pricer.mesh, 1)
    kept = [
        unit_costs(it.graph, it.operators, p, assignment)["LlamaDecoderLayer"].live.kept for p in (plain, it.pricer)
    ]
    gate = next(o.node.outputs[0] for (s, _), o in it.operators.items() if s and o.node.op.startswith("aten.silu"))
    hidden = BATCH * 32 * NARROW * 4
    saved = gate.num_bytes + 2 * hidden
    assert kept[0] - kept[1] == pytest.approx(saved * (1 + plain.rates.fragmentation))


@pytest.mark.parametrize(("name", "scope"), [("gpt2", "GPT2Block"), ("bert", "BertLayer")])
def test_dropout_with_its_addition_keeps_no_mask(name: str, scope: str) -> None:
    """Two of a byte per element in each layer; GELU, written out by GPT-2, keeps its input only."""
    it = fused_setting(name, "single", options="")
    _, assignment = it.assignment(0)
    plain = pricer_for(request_for(name), it.pricer.mesh, 1)
    kept = [unit_costs(it.graph, it.operators, p, assignment)[scope].live.kept for p in (plain, it.pricer)]
    masks = 2 * BATCH * 32 * NARROW
    # Half of x, tanh and its sum with one.
    written_out = 3 * 4 * BATCH * 32 * 4 * NARROW if name == "gpt2" else 0
    assert kept[0] - kept[1] == pytest.approx((masks + written_out) * (1 + plain.rates.fragmentation))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "constraints", "sizes"),
    [
        ("llama", {"dp": 2, "zero": 2}, {}),
        ("gpt2", {"tp": 2, "parameters": {"transformer.wte.weight": {"tp": "S(0)"}}}, {}),
        ("llama", {"pp": 2, "schedule": "zero-bubble", "micro_batches": 4}, {"seq_len": 256}),
    ],
    ids=["dp", "vocabulary over tp", "zero bubble"],
)
def test_predicted_peaks_with_a_fused_head_are_close_to_measured_ones(name, constraints, sizes) -> None:
    """On CPUs the head is the one kernel whose reference is fused too."""
    small = {"layers": 2, "width": 64, "seq_len": 64, "vocab_size": 4096, "batch_size": 8}
    example = EXAMPLES[name](**(small | sizes))
    cluster = replace(Cluster.from_toml(IDEAL), devices_per_node=2)
    options = {"example_inputs": example.inputs, "constraints": constraints, "kernels": "on"}
    compiled = autopar.compile(example.model, cluster, **options)
    assert "linear_cross_entropy(" in compiled.source
    prediction = compiled.plan.prediction
    pipeline_ranks = prediction.pipeline_ranks or (prediction.num_bytes,) * 2
    for predicted, (measured, _) in zip(pipeline_ranks, run_ranks(_peaks, (compiled, example.inputs), 2), strict=True):
        assert 1 - UNDER <= sum(predicted.values()) / measured <= 1 + OVER


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_plans_on_gpus_are_priced_with_kernels() -> None:
    example = EXAMPLES["llama"]()
    found = {
        (cluster, choice): autopar.compile(
            example.model,
            hostless(Cluster.parse(cluster)),
            example_inputs=example.inputs,
            constraints={"dp": 2},
            kernels=choice,
        ).plan.prediction
        for cluster, choice in (("2 h100-sxm", "auto"), ("2 h100-sxm", "off"), ("2 cpu", "auto"), ("2 cpu", "off"))
    }
    assert found["2 cpu", "auto"] == found["2 cpu", "off"]
    assert found["2 h100-sxm", "auto"].step_seconds < 0.9 * found["2 h100-sxm", "off"].step_seconds


def test_a_limit_that_fits_with_kernels_only() -> None:
    """The planner needs less recomputation, or none, where less is kept."""
    free = replace(request_for("llama", "2 a100-80g", dp=2, micro_batches=1), kernels=True)
    least = search_plans(free).best.plan.prediction.peak_bytes
    tight = request_for("llama", "2 a100-80g", dp=2, micro_batches=1, memory=int(least * 1.001))
    with_kernels = search_plans(replace(tight, kernels=True)).best.plan
    assert with_kernels.prediction.peak_bytes <= least * 1.001
    assert with_kernels.prediction.step_seconds < search_plans(tight).best.plan.prediction.step_seconds


@pytest.mark.parametrize(
    ("call", "passes"),
    [
        (lambda x, y: torch.cat([x, y], 1), 0),  # views of the gradient
        (lambda x, y: x + y.detach(), 0),  # the gradient itself
        (lambda x, y: x - y.detach(), 0),
        (lambda x, y: y.detach() - x, 4),  # priced as any call: what went in and out, and a gradient
        (lambda x, y: x * 0.5, 2),
        (lambda x, y: x + y, 5),
    ],
)
def test_backward_moves_what_torchs_formulas_say(call, passes) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(self.layer(x), self.layer(x).relu()).square().mean()

    graph = trace(Model(), {"x": torch.zeros(8, 64)}, None, batch_size=8)
    request = request_for("llama", "4 a100-80g")
    pricer = pricer_for(request, Mesh((), ()), 1)
    names = ("aten.cat.default", "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor")
    (operator,) = (op for op in operators_of(graph).values() if op.node.op in names)
    (option,) = options_of(operator, pricer.mesh)
    size = operator.inputs[0].num_bytes
    assert pricer.operator_seconds(operator, option)[1] == pricer.rates.memory_seconds(passes * size)
