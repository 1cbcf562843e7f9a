"""Drawn numbers that forward takes for Python's: drawn by counters, as torch's are."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.layer(x)).square().mean()


def _mixed(y: Tensor) -> Tensor:
    share = float(np.random.uniform(0.5, 1.0))
    return share * y + (1 - share) * y.flip(1)


def _asked_of_torch(y: Tensor) -> Tensor:
    scale = torch.rand(1).item() + 0.5
    return y * float(torch.empty(()).uniform_(0.5, 1.5)) / scale


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "float of numpy's": _mixed,
    "item of torch's": _asked_of_torch,
    "mathematics": lambda y: y * math.sqrt(float(np.random.rand()) + 0.1) + math.exp(random.gauss(0, 0.1)),
    "bounds": lambda y: y * max(0.2, min(float(np.random.randn()), 0.9)),
    "numpy's functions": lambda y: y + np.clip(np.random.normal(0, 2), -1.0, 1.0),
    "rounded": lambda y: y + round(float(np.random.exponential()), 2),
}
QUICK = {"float of numpy's", "item of torch's"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in CHANGES])
def test_a_number_in_arithmetic_is_drawn_in_every_step(name: str) -> None:
    torch.manual_seed(0)
    assert is_exact(Net(CHANGES[name]), {"x": X})
    assert "float" not in globals() and isinstance(1.0, float)


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y if float(np.random.rand()) < 0.5 else y.flip(0),
        lambda y: y[:, : int(float(np.random.rand()) * 4) + 1],
        lambda y: y * 2 if torch.rand(1).item() > 0.5 else y,
    ],
    ids=["if", "size", "if of torch's"],
)
def test_a_number_that_decides_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError):
        trace(Net(change), {"x": X})
