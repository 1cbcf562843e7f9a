"""Einsums of three operands, for which torch records an order of products where opt_einsum is installed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from benchmarks.by_hand import is_exact

PRODUCTS = {
    "a chain": ("bi,ij,jk->bk", (0, 1, 0, 1)),
    "a sum over rows": ("bi,ij,bk->jk", (0, 2, 0, 1)),
    "a gate": ("bi,ij,bj->bj", (1, 2, 0, 1)),
}


class Product(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight, self.last = nn.Parameter(torch.randn(8, 8) / 3), nn.Linear(8, 8)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        equation, order = PRODUCTS[self.name]
        other = self.last.weight if self.name == "a chain" else self.last(x)
        return torch.ops.aten.einsum(equation, [x, self.weight, other], path=order).square().mean()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", PRODUCTS)
def test_the_order_of_products_is_left_to_torch(name: str) -> None:
    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0))}
    program = autopar.compile(Product(name), "1 cpu", example_inputs=batch)
    assert "torch.einsum(" in program.source
    assert is_exact(Product(name), batch)
