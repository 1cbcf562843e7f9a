"""Branches on values of tensors that forward makes of numbers alone, and of those that only look so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.frontend.trace import trace
from tests.autopar.interpret import assert_equals_eager, run_graph, tensors_of

X = torch.linspace(-1, 1, 48).reshape(4, 3, 4)


class Asks(nn.Module):
    """Asks for values of a mask that `make` makes of a batch."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make

    def forward(self, x: Tensor) -> Tensor:
        mask = self.make(x)
        if (mask > 0).any() and mask.sum().item() > 3:
            x = self.linear(x)
        if not torch.all(mask[:, 1:] == 1):
            x = x.exp()
        return (self.linear(x) * mask[..., None]).mean() * int(mask[0, 0])


def written(x: Tensor) -> Tensor:
    mask = torch.ones_like(x[..., 0])
    rows = mask[1:]
    rows[:, 1] = 2
    mask += 1
    return mask


def sums_written(x: Tensor, write: Callable[[Tensor, Tensor], object]) -> Tensor:
    mask = torch.ones(4, 3)
    write(mask[1:], x.sum())
    return mask


@pytest.mark.parametrize("make", [written, lambda x: x.new_ones(4, 3), lambda x: torch.arange(3).tile(4, 1) + 1])
def test_values_of_constants_are_known(make: Callable[[Tensor], Tensor]) -> None:
    model = Asks(make)
    assert_equals_eager(trace(model, (X,)), model, {"x": X}, model(X))


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.rand(4, 3),
        lambda x: torch.ones(4, 3).bernoulli(),
        lambda x: sums_written(x, lambda part, total: part.add_(total)),
        lambda x: sums_written(x, lambda part, total: part.__setitem__(0, total)),
        lambda x: sums_written(x, lambda part, total: part.__iadd__(total)),
        lambda x: sums_written(x, lambda part, total: torch.add(part, total, out=part)),
        lambda x: sums_written(x, lambda part, total: torch.ops.aten.add_(part, total)),
        lambda x: sums_written(x, lambda part, total: torch.ops.aten.copy_.default(part, total)),
    ],
)
def test_values_of_other_tensors_are_not(make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match="value"):
        trace(Asks(make), (X,))


class Selects(nn.Module):
    """Selects by masks that follow from numbers alone."""

    def __init__(self, select: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.select = nn.Linear(4, 4), select

    def forward(self, x: Tensor) -> Tensor:
        return self.select(self.linear(x)).square().mean()


def off_diagonal(x: Tensor) -> Tensor:
    products = x @ x.transpose(1, 2)
    others = ~torch.eye(3, dtype=torch.bool).expand(len(x), 3, 3)
    return products.masked_select(others).reshape(len(x), 3, 2).cumsum(0) + products[others].reshape(len(x), 3, 2)


def pairs(x: Tensor) -> Tensor:
    above = torch.ones(3, 3).triu(1) > 0
    first, second = torch.where(above)
    listed = above.nonzero()
    return (x[:, first] * x[:, second]).cumsum(1) + x[:, listed[:, 0]] + (x @ x.transpose(1, 2))[:, above][..., None]


def even_rows(x: Tensor) -> Tensor:
    return x[torch.arange(len(x)) % 2 == 0, :, 1:3].cumsum(0)


@pytest.mark.parametrize("select", [off_diagonal, pairs, even_rows])
def test_selections_by_masks_of_numbers(select: Callable[[Tensor], Tensor]) -> None:
    model = Selects(select)
    graph = trace(model, (X,))
    tables = {each.name: each.value for each in graph.parameters if each.value is not None}
    loss = run_graph(graph, tensors_of(model) | tables, {"x": X})
    torch.testing.assert_close(loss, model(X))
