"""Buffers that training alone writes, and losses that it alone adds to: evaluations are those of `model.eval()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.turns import by_turns


class Whitening(nn.Module):
    """Divides by a running size, which training brings forward first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.register_buffer("size", torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.linear(x).tanh()
        if self.training:
            with torch.no_grad():
                self.size.mul_(0.7).add_(x.square().mean(0), alpha=0.3)
        return x / self.size.sqrt()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Whitening() for _ in range(3)), nn.Linear(10, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


class Observer(nn.Module):
    """Fake quantization by a range that training widens and replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 4)
        self.register_buffer("high", torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.high = torch.maximum(self.high, x.detach().abs().max())
        scale = self.high / 7
        return F.cross_entropy(self.last(x + ((x / scale).round().clamp(-7, 7) * scale - x).detach()), y)


class Regularised(nn.Module):
    """The loss of training has a term of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x).relu()
        loss = F.cross_entropy(self.last(x), y)
        return loss + 0.3 * x.square().mean() if self.training else loss


class Viewed(Regularised):
    """A view from before the write is read after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        flat = self.mean.view(10)
        if self.training:
            with torch.no_grad():
                self.mean.add_(x.mean(0).view(2, 5))
        return super().forward(x - flat, y)


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 10, generator=generator), "y": torch.randint(4, (8,), generator=generator)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)


def eager(model: nn.Module) -> list[float]:
    optimizer, found = sgd(model.parameters()), []
    for seed in range(3):
        optimizer.zero_grad()
        loss = model(**batch(seed))
        loss.backward()
        optimizer.step()
        model.eval()
        found += [loss.item(), model(**batch(9)).item()]
        model.train()
    return found


def program(step: Any) -> list[float]:
    found = []
    for seed in range(3):
        found += [float(step(step.local_batch(batch(seed)))), float(step.evaluate(step.local_batch(batch(9))))]
    return found


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", [Layers, Observer, Regularised])
def test_evaluations_are_those_of_one_process(kind: type[nn.Module]) -> None:
    step = autopar.compile(made(kind), "1 cpu", example_inputs=batch(0), optimizer=sgd).build(first_step_check=False)
    assert program(step) == pytest.approx(eager(made(kind)), rel=1e-5)


def test_a_view_of_what_training_writes_is_refused() -> None:
    step = autopar.compile(made(Viewed), "1 cpu", example_inputs=batch(0), optimizer=sgd).build(first_step_check=False)
    assert float(step(step.local_batch(batch(0)))) > 0
    with pytest.raises(RuntimeError, match=r"no evaluation mode.*update_model"):
        step.evaluate(step.local_batch(batch(0)))


PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "micro_batches": 1}]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "plan"), by_turns([Layers, Observer, Regularised], PLANS, 2))
def test_evaluations_under_plans(kind: type[nn.Module], plan: dict[str, Any]) -> None:
    compiled = autopar.compile(made(kind), "2 cpu", example_inputs=batch(0), optimizer=sgd, constraints=plan)
    assert compiled.launch(program)[0] == pytest.approx(eager(made(kind)), rel=1e-5)
