"""The worked example of `docs/architecture.md`: every figure and line of code on the page is what the code gives."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.costs.cost_table import unit_costs
from autopar.costs.overlap import Overlaps
from autopar.ir.graph import Ref
from autopar.planning.request import pricer_for
from autopar.sharding.call_options import options_of
from cost_models import compute
from cost_models.machine import Cluster
from examples.models import llama
from tests.autopar.requests import hostless

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
LAYER, X, WEIGHT = "LlamaDecoderLayer", Ref("mul_10"), "mlp.up_proj.weight"
MIB = 2**20


@pytest.fixture(scope="module")
def program():
    example = llama(layers=4, width=1024, num_heads=8, batch_size=8, seq_len=512, vocab_size=8192)
    constraints = {"dp": 2, "tp": 2, "micro_batches": 1, "zero": 0}
    options = {"precision": "bf16", "kernels": "off", "constraints": constraints}
    cluster = hostless(Cluster.parse("4 h100-sxm"))
    return autopar.compile(example.model, cluster, example_inputs=example.inputs, **options)


@pytest.fixture(scope="module")
def section():
    """The section's words, one space between them, without the marks of code."""
    text = PAGE.read_text().split("## One linear layer, from model to price\n")[1].split("\n## ")[0]
    return plain(text.replace("```python", "").replace("`", ""))


def plain(text: str) -> str:
    return " ".join(text.split())


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.2f} us"


def test_options(program, section):
    best = program.best
    operator = best.operators[LAYER, "linear_5"]
    assert operator.node.module == "mlp.up_proj" and operator.node.inputs == (X, Ref(WEIGHT))
    sizes = ", ".join(f"{factor} = {size}" for factor, size in operator.rule.sizes.items())
    assert sizes in section
    pricer = pricer_for(program.request, program.plan.mesh, 1)
    options = options_of(operator, program.plan.mesh)
    assert options and {option.labels[0] for option in options} == {"b.0"}
    for option in options:
        on_tp = [str(placements[1]) for placements in (*option.inputs, *option.outputs)]
        cells = (option.labels[1], *on_tp, *map(us, pricer.operator_seconds(operator, option)))
        assert f"| {' | '.join(cells)} |" in section
    assert best.assignment.operators[LAYER, "linear_5"].labels == ("b.0", "n")


def test_program(program, section):
    """From the norm's result, the reshard of x, up to the call that computes both layers."""
    body = plain(program.source.split(f"class {LAYER}(Module):")[1])
    begin, end = "post_attention_layernorm = rms_norm(", "self.mlp.up_proj.weight) )"
    shown = begin + body.split(begin)[1].split(end)[0] + end
    assert shown in section


def test_prices(program, section):
    best, pricer = program.best, pricer_for(program.request, program.plan.mesh, 1)
    operator, option = best.operators[LAYER, "linear_5"], best.assignment.operators[LAYER, "linear_5"]
    meta = operator.inputs[0]
    device = pricer.cluster.device
    flops, moved = 2 * 2048 * 1024 * 1024, 10 * MIB
    products = [(2048, 1024, 1024), (2048, 1024, 1024), (1024, 1024, 2048)]
    times = [compute.seconds(compute.Work("matmul", flops, moved, "bf16", shape), device) for shape in products]
    forward, backward = pricer.operator_seconds(operator, option)
    assert forward == times[0] and backward == pytest.approx(times[1] + times[2])
    memory = (moved / device.memory_bytes_per_second + device.memory_ramp_seconds) / device.memory_efficiency
    arithmetic = forward - device.kernel_launch_seconds
    source, kept = best.assignment.operators[LAYER, X.node].outputs[0], best.assignment.tensors[LAYER, X]
    reshard = pricer.rates.reshard_seconds(source, kept, meta)
    hidden = Overlaps(best.graph, best.operators, pricer).seconds((LAYER, X), source, kept, is_kept=True)
    assert memory < arithmetic and hidden == pytest.approx(times[2])
    stored, weight = best.assignment.parameters[LAYER, WEIGHT], operator.inputs[1]
    assert [size / MIB for size in pricer.parameters.parameter_bytes(weight, stored)] == [6, 4, 8]
    per_step = (
        pricer.parameters.accumulation_seconds(weight, stored),
        pricer.parameters.sync_parts(weight, stored, 0)[1],
    )
    per_step += (pricer.parameters.optimizer_seconds(weight, stored),)
    for figure in (*times, forward, backward, memory, arithmetic, reshard, hidden, reshard - hidden, *per_step):
        assert us(figure) in section
    assert f"{4 * (forward + backward + sum(per_step)) * 1e6:.0f} us" in section


def test_step(program, section):
    best, prediction = program.best, program.plan.prediction
    pricer = pricer_for(program.request, program.plan.mesh, 1)
    costs = unit_costs(best.graph, best.operators, pricer, best.assignment)
    units = [costs[name].forward["forward compute"] for name in ("top 0", LAYER, "top 1")]
    assert prediction.seconds["forward compute"] == pytest.approx(units[0] + 4 * units[1] + units[2])
    layer = costs[LAYER]
    figures = (
        *units,
        layer.forward["all_reduce tp"],
        layer.backward["backward compute"],
        layer.backward["all_reduce tp"],
    )
    for figure in (*figures, prediction.seconds["forward compute"], prediction.step_seconds):
        assert us(figure) in section
