"""What a GPU's host takes to issue a program, against counts by hand and what was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.compiled import CompiledProgram
from autopar.costs.cost_table import combined
from autopar.costs.host_calls import SYNCHRONISED, calls_of, host_calls
from autopar.costs.layer_costs import HIDDEN, HOST, SYNCHRONISATION, WAITED, ComputeSeconds, LayerCost
from autopar.costs.stored_costs import StoredCost
from codegen.program import Call, Reshard, TensorType, Var
from cost_models.machine import Cluster
from examples.models import EXAMPLES, llama, mlp

LINEAR, LINEAR_BACKWARD = 1.5, 0.6 + 2 * 1.3


def on(cluster: Cluster | str, call_seconds: float | None = None) -> Cluster:
    found = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    device = found.device if call_seconds is None else replace(found.device, host_call_seconds=call_seconds)
    return replace(found, device=device)


def compiled(example: Any, cluster: Cluster, **options: Any) -> CompiledProgram:
    loss = {"loss_fn": example.loss_fn} if example.loss_fn is not None else {}
    return autopar.compile(example.model, cluster, example_inputs=example.inputs, **loss, **options)


def test_a_perceptrons_calls_by_hand() -> None:
    """Three linears, the first of which has no gradient for its input, and two GELUs; the loss by itself."""
    program = compiled(mlp(layers=3), on("1 h100-sxm"), kernels="off").program
    forward, backward = host_calls(program.root.body, is_layer=False)
    calls = [statement for statement in program.root.body if isinstance(statement, Call)]
    others = [call for call in calls if "linear" not in call.target]
    assert len(calls) - len(others) == 3
    assert all(call.target.startswith("aten.") for call in others)
    assert forward == pytest.approx(3 * LINEAR + len(others))
    # Weights and biases, and the inputs of the last two.
    linears = 3 * 0.6 + (2 + 3 + 3) * 1.3
    assert backward == pytest.approx(linears + len(others) * 1.5)


def test_collectives_count_in_the_direction_in_which_they_are() -> None:
    x = Var("x", TensorType((4, 4), "float32", requires_grad=True))
    gather = Reshard("tp", "all_gather", x, (), x, forward="all_gather", backward="reduce_scatter")
    for_use = Reshard("tp", "for_use", x, (), x, backward="all_reduce")
    assert calls_of(gather) == (8.0, 8.0) and calls_of(for_use) == (1.0, 8.0)
    still = Var("y", TensorType((4, 4), "int64"))
    assert calls_of(Reshard("tp", "all_gather", still, (), still, forward="all_gather")) == (8.0, 0.0)


def test_a_stretch_takes_what_is_longer() -> None:
    """Where a plan is chosen, the seconds beyond the device's count WAITED of themselves."""
    seconds = ComputeSeconds(forward=2.0, backward=4.0, weight=1.0, overlapped=0.5, host=(3.0, 4.2))
    forward, late = 2.0 + 0.75 * 1.0, 0.2
    assert WAITED == 0.75
    assert seconds.under("1f1b", 1) == pytest.approx(forward + 4.0 + 0.75 * late)
    assert seconds.under("1f1b", 2) == pytest.approx(2 * forward + 4.0 + 0.75 * late)
    assert seconds.under("zero-bubble", 1) == pytest.approx(forward + 4.0 + 0.75 * late + (0.5 - late))
    assert seconds.under("1f1b", 1, exposed=1.0, stored=(0.5, 0.5)) == pytest.approx(2.0 + 0.75 * 1.5 + 5.0)


def test_gradients_are_sent_while_a_device_waits() -> None:
    """A backward of three seconds waits for one more, in which a second of what gradients take is done."""
    stored = StoredCost(per_step={SYNCHRONISATION: 1.6, "optimizer": 0.3}, host=(0.0, 0.5))
    own = LayerCost(forward={"forward compute": 2.0}, backward={"backward compute": 3.0}, host=(1.0, 3.5))
    found = combined({"layer": own}, {"layer": stored})["layer"]
    assert found.backward_seconds == 4.0 and found.forward_seconds == 2.0
    assert found.step[SYNCHRONISATION] == pytest.approx(0.6) and found.step[HIDDEN] == pytest.approx(1.0)
    assert found.step_seconds == pytest.approx(0.9) and found.chosen_seconds == pytest.approx(2.0 + 3.0 + 0.75)


def test_a_joined_sum_is_a_product_with_a_function() -> None:
    x, weight = (Var(name, TensorType((4, 4), "float32", requires_grad=True)) for name in ("x", "weight"))
    result = Var("y", TensorType((4, 4), "float32", requires_grad=True))
    plain, joined = (
        calls_of(Call(f"{kind}", (x, weight), (), (result,))) for kind in ("aten.linear.default", "overlapped.linear")
    )
    assert plain == (LINEAR, LINEAR_BACKWARD) and joined == (LINEAR + 1, LINEAR_BACKWARD + 1)


def test_a_small_llamas_step_takes_what_was_measured() -> None:
    """12.6 ms in `autopar train` on an H200, where its kernels alone are predicted to take 1.5."""
    example = llama(layers=4, width=256, num_heads=8, batch_size=8, seq_len=256, vocab_size=256)
    options: dict[str, Any] = {"precision": "bf16", "kernels": "on"}
    found = compiled(example, on("1 h200-sxm"), **options).plan.prediction
    assert found.step_seconds == pytest.approx(12.6e-3, rel=0.05)
    alone = compiled(example, on("1 h200-sxm", 0.0), **options).plan.prediction
    assert alone.step_seconds == pytest.approx(1.5e-3, rel=0.05) and not alone.seconds.get(HOST)
    assert found.seconds[HOST] == pytest.approx(found.step_seconds - alone.step_seconds, rel=1e-9)


@pytest.mark.slow
def test_large_layers_hide_their_host() -> None:
    """But for what lies between the reading of the norm and the update's launch."""
    example = EXAMPLES["llama"](layers=2, width=2048, num_heads=16, batch_size=8, seq_len=2048, vocab_size=2048)
    cluster = on("1 h100-sxm")
    found = compiled(example, cluster, precision="bf16", kernels="on").plan.prediction
    alone = compiled(example, on(cluster, 0.0), precision="bf16", kernels="on").plan.prediction
    late = found.step_seconds - alone.step_seconds
    assert SYNCHRONISED * cluster.device.host_call_seconds <= late < 0.04 * alone.step_seconds


def test_many_small_micro_batches_take_the_host_each() -> None:
    example = llama(layers=4, width=64, batch_size=16, seq_len=32)
    one, four = (
        compiled(example, on("1 h100-sxm"), constraints={"micro_batches": count}).plan.prediction.step_seconds
        for count in (1, 4)
    )
    assert four > 3.5 * one


def test_zero_3_gathers_take_the_host() -> None:
    example = llama(layers=4, width=64, batch_size=16, seq_len=32)
    found = [
        compiled(example, on("2 h100-sxm"), constraints={"dp": 2, "zero": zero}).plan.prediction.seconds[HOST]
        for zero in (0, 3)
    ]
    # Two gathers and a sum of each layer at least; what shows of the traffic hides some of it.
    assert found[1] > found[0]


def test_a_cpus_prices_know_no_host() -> None:
    prediction = compiled(llama(layers=2), on("2 cpu")).plan.prediction
    assert HOST not in prediction.seconds or prediction.seconds[HOST] == 0.0
