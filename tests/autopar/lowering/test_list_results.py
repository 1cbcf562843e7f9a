"""Calls that make a list of tensors, where it is a list of one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar


class Lists(nn.Module):
    """A stack of one (as of one codebook, one stream), and splits that leave all in one part."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        (one,) = torch.stack([self.stem(x)]).unbind(0)
        (two,) = self.head(one.tanh()).split(8, dim=-1)
        (three,) = two.tensor_split(1, dim=0)
        return three.square().mean()


def test_a_list_of_one_is_taken_apart() -> None:
    torch.manual_seed(0)
    model, batch = Lists(), {"x": torch.randn(4, 8)}
    step = autopar.compile(model, "1 cpu", example_inputs=batch).build()
    expected = model(**batch)
    assert step.forward_backward(batch).item() == pytest.approx(expected.item(), rel=1e-6)
