"""Writes to views of every kind, and in-place operators whose functional form has another overload's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.by_hand import is_exact


class Net(nn.Module):
    def __init__(self, write: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(6, 6), write

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x) * 1.0
        self.write(x, h)
        return h.square().mean()


WRITES: dict[str, Callable[[Any, Tensor], object]] = {
    "narrow": lambda x, h: h.narrow(1, 1, 3).copy_(x[:, :3]),
    "narrow from the end": lambda x, h: h.narrow(1, -2, 2).mul_(3),
    "diagonal": lambda x, h: h.reshape(2, 3, 4).diagonal(0, 1, 2).fill_(2),
    "permute": lambda x, h: h.reshape(2, 2, 6).permute(2, 0, 1)[1].add_(1),
    "pow": lambda x, h: h.pow_(2),
    "pow of tensors": lambda x, h: h.pow_(torch.full_like(x, 2)),
    "remainder": lambda x, h: h.remainder_(0.5),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("kind", WRITES)
def test_writes_are_those_of_one_process(kind: str) -> None:
    assert is_exact(Net(WRITES[kind]), {"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(0))})
