"""Values that a script writes to its model's parameters between steps: trained as on one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import ModelError
from tests.turns import by_turns


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.unread = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return F.mse_loss(self.last(hidden), y) + F.mse_loss(hidden, torch.tanh(self.teacher(x)))


Write = Callable[[Any, int, dict[str, Tensor]], None]


def clips(model: Any, step: int, kept: dict[str, Tensor]) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.15, 0.15)


@torch.no_grad()
def projects(model: Any, step: int, kept: dict[str, Tensor]) -> None:
    model.last.weight.copy_(F.normalize(model.last.weight, dim=1))


@torch.no_grad()
def looks_ahead(model: Any, step: int, kept: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        slow = kept.setdefault(name, parameter.clone())
        if step % 2:
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)


@torch.no_grad()
def teaches(model: Any, step: int, kept: dict[str, Tensor]) -> None:
    for parameter, other in zip(model.teacher.parameters(), model.first.parameters(), strict=True):
        parameter.mul_(0.8).add_(other, alpha=0.2)


def loads_the_best(model: Any, step: int, kept: dict[str, Tensor]) -> None:
    if step == 0:
        kept |= copy.deepcopy(model.state_dict())
    if step == 2:
        model.load_state_dict(kept)


def looks_and_puts_back(model: Any, step: int, kept: dict[str, Tensor]) -> None:
    before = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: value * 0.5 for name, value in before.items()})
    model.load_state_dict(before)


WRITES: tuple[Write, ...] = (clips, projects, looks_ahead, teaches, loads_the_best, looks_and_puts_back)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    make = [(torch.randn(8, 8, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]
    return [{"x": x, "y": y} for x, y in make]


def eager(write: Write, data: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    model, losses, kept = Net(), [], dict[str, Tensor]()
    optimizer = sgd(model.parameters())
    for number, batch in enumerate(data):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        write(model, number, kept)
    return losses, model.state_dict()


def train(
    step: Any, program: Any, model: nn.Module, write: Write, data: list[dict[str, Tensor]]
) -> tuple[list[float], dict[str, Tensor]]:
    losses, kept = [], dict[str, Tensor]()
    for number, batch in enumerate(data):
        losses.append(float(step(step.local_batch(batch))))
        program.update_model(step)
        write(model, number, kept)
    return losses, step.full_state_dict()


def assert_equal(outcome: tuple[list[float], dict[str, Tensor]], right: tuple[list[float], dict[str, Tensor]]) -> None:
    assert outcome[0] == pytest.approx(right[0], rel=1e-5)
    for name, value in right[1].items():
        torch.testing.assert_close(outcome[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("write", WRITES, ids=lambda function: function.__name__)
def test_written_values_are_trained_as_on_one_process(write: Write) -> None:
    model, data = Net(), batches(4)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    assert_equal(train(compiled.build(first_step_check=False), compiled, model, write, data), eager(write, data))


PLANS: list[dict[str, Any]] = [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 2}]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("write", "plan"), by_turns([clips, looks_ahead, teaches], PLANS, 2))
def test_written_values_under_plans(write: Write, plan: dict[str, Any]) -> None:
    model, data = Net(), batches(4)
    compiled = autopar.compile(model, "2 cpu", example_inputs=data[0], optimizer=sgd, constraints=plan)
    assert_equal(compiled.launch(train, compiled, model, write, data)[0], eager(write, data))


def test_writes_to_old_values_are_refused_and_the_steps_own_values_are_not() -> None:
    model, data = Net(), batches(3)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    step = compiled.build(first_step_check=False)
    step(step.local_batch(data[0]))
    model.load_state_dict(step.full_state_dict())  # to look at them
    step(step.local_batch(data[1]))
    clips(model, 0, {})
    with pytest.raises(ModelError, match=r"values of first.weight: written[\s\S]*update_model"):
        step(step.local_batch(data[2]))
    assert step.rng.step == 2
    compiled_values = step.full_state_dict()
    model.load_state_dict(compiled_values)
    step(step.local_batch(data[2]))


def test_written_values_are_in_a_checkpoint(tmp_path: Path) -> None:
    model, data = Net(), batches(1)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    step = compiled.build(first_step_check=False)
    step(step.local_batch(data[0]))
    compiled.update_model(step)
    clips(model, 0, {})
    right = copy.deepcopy(model.state_dict())
    compiled.save_checkpoint(step, tmp_path / "saved")
    other = compiled.build(first_step_check=False)
    compiled.load_checkpoint(other, tmp_path / "saved")
    for name, value in other.full_state_dict().items():
        assert torch.equal(value, right[name]), name


def test_masters_keep_what_a_model_of_half_precision_cannot_say() -> None:
    model, data = nn.Linear(8, 4).bfloat16(), {"input": torch.randn(8, 8).bfloat16()}
    options: dict[str, Any] = {"loss_fn": lambda y: y.float().square().mean(), "precision": "bf16"}
    compiled = autopar.compile(model, "1 cpu", example_inputs=data, optimizer=sgd, **options)
    step = compiled.build(first_step_check=False)
    for _ in range(2):
        step(step.local_batch(data))
    masters = step.stored_parameters()["weight"].detach().clone()
    assert not torch.equal(masters, masters.bfloat16().float())
    compiled.update_model(step)
    with torch.no_grad():
        model.weight.copy_(model.weight.clone())
        model.bias[0] = 3.0
    step.evaluate(step.local_batch(data))
    assert torch.equal(step.stored_parameters()["weight"], masters)
    assert float(step.full_state_dict()["bias"][0]) == 3.0


def test_a_model_whose_memory_is_wanted_goes_on_training() -> None:
    def moved(model: Any) -> None:
        model.to("meta")

    def emptied(model: Any) -> None:
        for parameter in model.parameters():
            parameter.data = torch.empty(0)

    data, right = batches(2), eager(lambda *args: None, batches(2))[0]
    for free in (moved, emptied):
        model = Net()
        model.register_buffer("scale", torch.ones(4))
        step = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd).build(first_step_check=False)
        free(model)
        assert [float(step(step.local_batch(batch))) for batch in data] == pytest.approx(right, rel=1e-5)


class Normed(Net):
    """With statistics that forward updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(self.norm(x), y)


def test_statistics_may_be_loaded_with_the_values_that_the_step_has() -> None:
    model, data = Normed(), batches(3)
    compiled = autopar.compile(model, "1 cpu", example_inputs=data[0], optimizer=sgd)
    step = compiled.build(first_step_check=False)
    step(step.local_batch(data[0]))
    best = step.full_state_dict()
    step(step.local_batch(data[1]))
    step.load(best), model.load_state_dict(best)
    step(step.local_batch(data[2]))
    model.norm.running_mean.mul_(2.0)
    with pytest.raises(ModelError, match=r"norm.running_mean"):
        step(step.local_batch(data[2]))
