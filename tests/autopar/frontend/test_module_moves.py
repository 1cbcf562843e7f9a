"""Methods that forward calls on modules: those that change nothing are let through, casts are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self, move: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.experts, self.move = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8)]), move

    def forward(self, x: Tensor) -> Tensor:
        self.move(self, x)
        for expert in self.experts:
            x = expert(x).tanh()
        return x.square().mean()


MOVES = {
    "to the input's device": lambda model, x: [expert.to(x.device) for expert in model.experts],
    "to the input": lambda model, x: model.experts[0].to(x),
    "to its dtype": lambda model, x: model.experts.float().to(dtype=torch.float32),
    "to the CPU": lambda model, x: model.cpu(),
    "to another memory format": lambda model, x: model.to(memory_format=torch.channels_last),
    "to training": lambda model, x: model.train().requires_grad_(),
}


QUICK = {"to the input's device", "to training"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MOVES])
def test_a_move_to_where_it_is_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    assert is_exact(Net(MOVES[name]), {"x": X})


@pytest.mark.parametrize("cast", [lambda module: module.double(), lambda module: module.to(torch.bfloat16)])
def test_a_cast_is_refused(cast: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(TraceError, match=r"casts its own parameters.*\n.*weight of Linear"):
        trace(Net(lambda model, x: cast(model.experts[0])), {"x": X})
