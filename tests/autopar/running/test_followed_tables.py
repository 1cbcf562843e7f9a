"""Plain tensors and partial functions that a script exchanges between steps: followed as in one process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.table, self.tables = torch.arange(64.0).sin().view(8, 8), {"scale": torch.arange(64.0).cos()}
        self.activation: Any = functools.partial(F.leaky_relu, negative_slope=0.1)
        self.bounds = [functools.partial(torch.clamp, min=-2.5, max=3.0)]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.bounds[0](self.activation(self.first(x) + self.table))
        return (self.last(hidden) * self.tables["scale"][:4]).square().mean()


def _another_table(model: Any) -> None:
    model.table = torch.arange(64.0).exp().log1p().cos().view(8, 8)


def _another_partial(model: Any) -> None:
    model.activation = functools.partial(F.leaky_relu, negative_slope=0.3)


def _another_bound(model: Any) -> None:
    model.bounds[0] = functools.partial(torch.clamp, min=-2.5, max=0.4)


CHANGES: list[Callable[[Any], object]] = [
    _another_table,
    _another_partial,
    lambda model: model.table.mul_(0.5),
    _another_bound,
    lambda model: model.tables.update(scale=torch.arange(64.0).sin() + 1),
    lambda model: setattr(model, "activation", functools.partial(F.elu, alpha=0.3)),
]


def test_losses_are_those_of_one_process() -> None:
    model, x = Net(), torch.linspace(-1, 1, 256).cos().view(4, 8, 8)
    by_hand = copy.deepcopy(model)
    update = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    compiled = autopar.compile(model, "1 cpu", example_inputs={"x": x}, optimizer=_sgd)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step = compiled.build(device="cpu")
        for change in (lambda model: None, *CHANGES):
            change(model)
            change(by_hand)
            update.zero_grad()
            loss = by_hand(x)
            loss.backward()
            update.step()
            assert float(step({"x": x})) == pytest.approx(float(loss.detach()), rel=1e-5)
    finally:
        dist.destroy_process_group()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)
