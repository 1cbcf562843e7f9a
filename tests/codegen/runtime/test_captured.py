"""Replayed steps are equal to the bit to steps that are issued call by call, whatever changes between them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from codegen.runtime.captured import MOST_PIECES, WARM_UPS, Captured
from examples.models import EXAMPLES
from tests.codegen.runtime.recorded_graph import RecordedGraph

STEPS = 8


class Normed(nn.Module):
    """Convolutions with batch norms, whose running statistics a skipped step takes back, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(F.relu(self.norm(self.first(x))).mean((2, 3))))


def normed() -> tuple[nn.Module, dict[str, Tensor], Callable[..., Tensor] | None]:
    torch.manual_seed(0)
    return Normed(), {"x": torch.randn(8, 2, 6, 6), "target": torch.randint(0, 3, (8,))}, F.cross_entropy


def example(name: str, **options: Any) -> Any:
    model = EXAMPLES[name](**options)
    return model.model, model.inputs, model.loss_fn


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "buffers and draws": (normed, {}),
    "dropout, micro-batches": (lambda: example("gpt2", dropout=0.1), {"constraints": {"micro_batches": 2}}),
    "fp16": (lambda: example("bert"), {"precision": "fp16"}),
    "bf16, recomputation": (lambda: example("llama"), {"precision": "bf16", "constraints": {"recompute": "full"}}),
    "decoder and encoder": (lambda: example("t5"), {}),
}


def module_of(step: Any, name: str) -> ModuleType:
    return importlib.import_module(f"{type(step).__module__.rpartition('.')[0]}.{name}")


def steps_of(case: str, **build: Any) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return a step that is issued call by call, one that is replayed, and a batch."""
    make, options = CASES[case]
    model, batch, loss_fn = make()
    program = autopar.compile(model, "1 cpu", example_inputs=batch, loss_fn=loss_fn, kernels="on", **options)
    eager, replayed = (program.build(first_step_check=False, max_grad_norm=1.0, **build) for _ in range(2))
    for step in (eager, replayed):
        # The update of GPUs, by the formula of its kernel.
        module_of(step, "fused_update").use_triton = lambda _: True
        step._update.kernels.attach(step.parts, step.optimizer, is_offloaded=False)
    replayed._replay_with(captured=Captured(replayed.mesh, RecordedGraph))
    return eager, replayed, batch


def varied(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Return another batch of the same shapes; of integers in another order."""
    return {
        name: value * (1 + number / 7) if value.is_floating_point() else value.roll(number, 0)
        for name, value in batch.items()
    }


def require_equal(one: Any, other: Any) -> None:
    expected, actual = one.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(expected[name].nan_to_num(7.0), actual[name].nan_to_num(7.0)) for name in expected)
    states = [step.optimizer.state_dict()["state"] for step in (one, other)]
    for number, state in states[0].items():
        assert all(torch.equal(value, states[1][number][name]) for name, value in state.items())


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_are_equal_to_the_bit(case: str) -> None:
    eager, replayed, batch = steps_of(case)
    for number in range(STEPS):
        rate = 1e-3 / (1 + number)
        losses = []
        for step in (eager, replayed):
            step.optimizer.param_groups[0]["lr"] = rate
            losses.append(step(step.local_batch(varied(batch, number))))
        assert torch.equal(*losses), number
        assert torch.equal(eager.grad_norm, replayed.grad_norm), number
    assert replayed._captured.is_on
    assert replayed._captured.num_graphs == 3
    require_equal(eager, replayed)


@pytest.mark.parametrize("non_finite", ["skip", "stop"])
def test_a_step_that_is_not_finite_changes_nothing(non_finite: str) -> None:
    eager, replayed, batch = steps_of("buffers and draws", non_finite=non_finite)
    for number in range(STEPS):
        values = varied(batch, number)
        if number == WARM_UPS + 2:
            values["x"][0, 0, 0, 0] = float("nan")
        for step in (eager, replayed):
            if number == WARM_UPS + 2 and non_finite == "stop":
                with pytest.raises(FloatingPointError, match="the loss is nan"):
                    step(step.local_batch(values))
            else:
                step(step.local_batch(values))
    assert [step.guard.num_skipped for step in (eager, replayed)] == [1, 1]
    require_equal(eager, replayed)


def test_an_overflow_in_fp16_lowers_the_scale_of_replays() -> None:
    eager, replayed, batch = steps_of("fp16", loss_scale={"init_scale": 2.0**20, "growth_interval": 3})
    scales = []
    for number in range(STEPS):
        for step in (eager, replayed):
            step(step.local_batch(varied(batch, number)))
        scales.append(replayed.loss_scale)
        assert replayed.loss_scale == eager.loss_scale
    assert len(set(scales[WARM_UPS + 1 :])) > 1
    require_equal(eager, replayed)


def test_a_loaded_state_and_another_limit_are_captured_anew() -> None:
    eager, replayed, batch = steps_of("decoder and encoder")
    for number in range(2 * WARM_UPS + 3):
        for step in (eager, replayed):
            step.forward_backward(step.local_batch(varied(batch, number)))
            if number > WARM_UPS + 1:
                step.clip(0.01)
            step.update()
            if number == WARM_UPS + 3:
                step.optimizer.load_state_dict(step.optimizer.state_dict())
    require_equal(eager, replayed)
    assert replayed._captured.is_on


def test_hooks_of_the_optimizer_are_called_and_rates_are_followed() -> None:
    eager, replayed, batch = steps_of("buffers and draws")
    num_calls = [0, 0]
    for number in range(STEPS + WARM_UPS):
        for index, step in enumerate((eager, replayed)):
            if number == WARM_UPS + 2:  # after the capture

                def note(*_: Any, index: int = index) -> None:
                    num_calls[index] += 1

                handles = step.optimizer.register_step_post_hook(note)
            step.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + number)
            step(step.local_batch(varied(batch, number)))
    assert handles is not None and num_calls == [STEPS - 2] * 2
    require_equal(eager, replayed)


class Reading(RecordedGraph):
    """A graph whose capture fails, as where the host reads a tensor."""

    def capture(self, work: Callable[[], Any]) -> Any:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")


class Stale(RecordedGraph):
    """A graph whose replays leave results as they were, which on a GPU is whatever was in memory."""

    def capture(self, work: Callable[[], Any]) -> Any:
        results = super().capture(work)
        results[0].fill_(0.25)
        return results

    def replay(self) -> None:
        return


@pytest.mark.parametrize(("graph", "reason"), [(Reading, "not permitted"), (Stale, "the first replay gives")])
def test_what_cannot_be_replayed_goes_on_call_by_call(graph: type[RecordedGraph], reason: str) -> None:
    eager, replayed, batch = steps_of("buffers and draws")
    replayed._replay_with(captured=Captured(replayed.mesh, graph))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(STEPS):
            for step in (eager, replayed):
                step(step.local_batch(varied(batch, number)))
    messages = [str(warning.message) for warning in caught if "CUDA graphs" in str(warning.message)]
    assert len(messages) == 1 and reason in messages[0]
    assert not replayed._captured.is_on
    require_equal(eager, replayed)


def test_few_graphs_are_kept() -> None:
    _, replayed, _ = steps_of("buffers and draws")
    captured, value = Captured(replayed.mesh, RecordedGraph), torch.zeros(3)
    for key in range(MOST_PIECES + 3):
        for _ in range(WARM_UPS + 2):
            captured.run(key, lambda inputs, key=key: inputs["value"] + key, {"value": value + 1})
    assert captured.num_graphs == MOST_PIECES
    assert torch.equal(captured.run(5, lambda inputs: inputs["value"] + 5, {"value": value}), value + 5)


PLANS = {"zero 2": {"dp": 2, "zero": 2, "micro_batches": 2}, "zero 3": {"dp": 2, "zero": 3}, "tensors": {"tp": 2}}


def _trained(program: Any, batch: dict[str, Tensor]) -> tuple[bool, int]:
    """Return whether this rank's replayed steps are equal to those that are issued call by call, and the graphs."""
    eager, replayed = (program.build(first_step_check=False, max_grad_norm=0.1) for _ in range(2))
    replayed._replay_with(captured=Captured(replayed.mesh, RecordedGraph))
    for number in range(STEPS):
        for step in (eager, replayed):
            step(step.local_batch(varied(batch, number)))
    require_equal(eager, replayed)
    return replayed._captured.is_on, replayed._captured.num_graphs


@pytest.mark.parametrize("plan", PLANS)
def test_collectives_are_replayed(plan: str) -> None:
    example = EXAMPLES["gpt2"](layers=2, dropout=0.1)
    options = {"example_inputs": example.inputs, "loss_fn": example.loss_fn, "kernels": "on"}
    program = autopar.compile(example.model, "2 cpu", constraints=PLANS[plan], **options)
    # torch's AdamW updates here, call by call.
    assert program.launch(lambda step, batch: _trained(program, batch), example.inputs) == [(True, 2)] * 2
