"""A random number of Python that is more than a factor."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import TraceError


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(6, 6), change

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.change(x)).square().mean()


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.roll(x, random.randint(1, 3), 1),
        lambda x: torch.rot90(x, random.randrange(4)) + x.sum(),
        lambda x: torch.triu(x, random.randint(0, 2)),
    ],
    ids=["roll", "rot90", "triu"],
)
def test_a_drawn_number_as_an_option_is_refused_with_its_line(change: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError) as caught:
        autopar.compile(Net(change), "1 cpu", example_inputs={"x": torch.randn(6, 6)})
    assert "test_drawn_index.py" in str(caught.value) and "rand" in str(caught.value)
