"""Losses that are modules and update buffers of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.turns import by_turns


class Normalised(nn.Module):
    """The loss in units of its own running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(2.0))

    def forward(self, out: Tensor, z: Tensor) -> Tensor:
        loss = F.smooth_l1_loss(out, z)
        with torch.no_grad():
            self.mean.lerp_(loss, 0.3)
        return loss / self.mean


class Balanced(nn.Module):
    """Two terms weighed by how they changed since the step before; buffers are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.ones(2), persistent=False)
        self.register_buffer("now", torch.ones(2))

    def forward(self, out: Tensor, z: Tensor) -> Tensor:
        terms = torch.stack([F.mse_loss(out, z), out.abs().mean()])
        weights = (self.now / self.last).softmax(0)
        self.last, self.now = self.now.clone(), terms.detach()
        return (weights * terms).sum()


class Warming(nn.Module):
    """A weight that grows with the calls, which a buffer of integers counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Normalised()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, out: Tensor, z: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(out, z) * (self.calls / 4).clamp(max=1.0)


KINDS = (Normalised, Balanced, Warming)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 6))


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input": torch.randn(8, 10, generator=generator), "z": torch.randn(8, 6)} for _ in range(4)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def eager(loss_fn: nn.Module, data: list[dict[str, Tensor]]) -> list[float]:
    model, found = net(), []
    optimizer = sgd(model.parameters())
    for each in data:
        optimizer.zero_grad()
        loss = loss_fn(model(each["input"]), each["z"])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def train(step: Any, compiled: Any, data: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    found = [float(step(step.local_batch(each))) for each in data]
    compiled.update_model(step)
    return found, {name: value.clone() for name, value in compiled.loss_fn.named_buffers()}


def assert_equal(found: tuple[list[float], dict[str, Tensor]], kind: type[nn.Module], data: Any) -> None:
    loss_fn = kind()
    assert found[0] == pytest.approx(eager(loss_fn, data), rel=1e-5)
    for name, value in loss_fn.named_buffers():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_keeps_what_it_updates(kind: type[nn.Module]) -> None:
    data, loss_fn = batches(), kind()
    before = copy.deepcopy(loss_fn.state_dict())
    compiled = autopar.compile(net(), "1 cpu", example_inputs=data[0], loss_fn=loss_fn, optimizer=sgd)
    assert all(torch.equal(loss_fn.state_dict()[name], value) for name, value in before.items())
    assert_equal(train(compiled.build(), compiled, data), kind, data)


PLANS: list[dict[str, Any]] = [{"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 1}]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "plan"), by_turns(list(KINDS), PLANS, 2))
def test_losses_under_plans(kind: type[nn.Module], plan: dict[str, Any]) -> None:
    data = batches()
    compiled = autopar.compile(net(), "2 cpu", example_inputs=data[0], loss_fn=kind(), optimizer=sgd, constraints=plan)
    assert_equal(compiled.launch(train, compiled, data)[0], kind, data)
