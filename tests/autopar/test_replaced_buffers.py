"""Buffers that forward replaces and backward reads: `verify` and a run on one process compute what eager torch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import Trainer, TrainerConfig


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("kept", torch.linspace(0.5, 1.5, 8))


class Gated(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.kept
        self.kept = 0.8 * self.kept + 0.2 * hidden.detach().abs().mean(0)
        return F.mse_loss(self.last(hidden), y)


class Remembering(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("before", torch.zeros(8, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + self.before @ self.last.weight.T @ self.last.weight)
        self.before = hidden.detach()
        return F.mse_loss(self.last(hidden), y)


class Scaled(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.last(torch.relu(self.first(x)) / self.kept)
        self.kept = torch.maximum(self.kept, self.first(x).detach().abs().amax(0))
        return F.mse_loss(out, y)


def batches(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    make = [(torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator)) for _ in range(count)]
    return [{"x": x, "y": y} for x, y in make]


@pytest.mark.parametrize("kind", [Gated, Remembering, Scaled])
def test_a_run_on_one_process_trains_as_torch_does(kind: type[Net]) -> None:
    model, data = kind(), batches(3)
    by_hand, right = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        loss = by_hand(**batch)
        loss.backward()
        optimizer.step()
        right.append(loss.item())
    settings: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 0.0, "optimizer": {"name": "sgd"}}
    config = TrainerConfig(cluster="1 cpu", steps=3, log_every=0, auto_parallel=False, **settings)
    assert list(Trainer(model, config, data).fit().losses) == pytest.approx(right, rel=1e-6)
    assert all(torch.allclose(value, by_hand.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", [Gated, Remembering, Scaled])
def test_verify_compares_with_the_true_gradients(kind: type[Net]) -> None:
    report = autopar.verify(kind(), "2 cpu", example_inputs=batches(1)[0], constraints={"dp": 2})
    assert report.ok() and report.largest_gradient < 1e-4
