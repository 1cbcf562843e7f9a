"""torch.vmap in forward: trained as one process trains it, cut over ranks like any other calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import autopar
from autopar.errors import TraceError
from autopar.frontend.trace import trace
from benchmarks.by_hand import is_exact

DRAWN = torch.Generator().manual_seed(0)
BATCH = {"x": torch.randn(4, 8, generator=DRAWN), "target": torch.randn(4, 8, generator=DRAWN)}


class Mapped(nn.Module):
    """A model that computes with the function that it is given."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.members = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.5)
        self.compute = compute

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.norm(self.compute(self, x)), target)


def ensemble(model: Any, x: Tensor) -> Tensor:
    names = dict(model.members[0].named_parameters())
    stacked = {name: torch.stack([m.get_parameter(name) for m in model.members]) for name in names}
    one = model.members[0]
    return vmap(lambda own, each: functional_call(one, own, (each,)), in_dims=(0, None))(stacked, x).mean(0)


def rows_and_a_constant(model: Any, x: Tensor) -> Tensor:
    return vmap(lambda row: model.members[1](row).tanh() * row.detach().norm())(x)


def pairs(model: Any, x: Tensor) -> Tensor:
    distances = vmap(lambda a: vmap(lambda b: (model.weights[0] @ (a - b)).square().sum())(x))(x)
    return x @ model.weights[1] + distances.softmax(-1) @ x


COMPUTE = {
    "weights": lambda model, x: vmap(lambda weight: torch.tanh(x @ weight))(model.weights).mean(0),
    "an ensemble": ensemble,
    "rows, one factor without gradient": rows_and_a_constant,
    "pairs of rows": pairs,
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", COMPUTE)
def test_trains_as_by_hand(name: str) -> None:
    assert is_exact(Mapped(COMPUTE[name]), BATCH)


@pytest.mark.by_turns(2)
@pytest.mark.distributed
@pytest.mark.parametrize("constraints", [{"dp": 2}, {"tp": 2, "parameters": {"weights": {"tp": "S(2)"}}}])
def test_trains_as_by_hand_on_two_ranks(constraints: dict[str, Any]) -> None:
    report = autopar.verify(Mapped(COMPUTE["weights"]), "2 cpu", example_inputs=BATCH, constraints=constraints)
    assert report.ok(), str(report)


def test_random_numbers_in_it_are_refused() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        return vmap(lambda row: model.dropout(row), randomness="different")(x)

    with pytest.raises(TraceError, match="random numbers"):
        trace(Mapped(compute), BATCH)


def test_what_cannot_be_written_out_is_refused_by_name() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        def row_of(row: Tensor) -> Tensor:
            with torch.no_grad():
                factor = model.members[0](row)
            return row * factor

        return vmap(row_of)(x)

    with pytest.raises(TraceError, match="torch.vmap computes"):
        trace(Mapped(compute), BATCH)


def test_a_choice_by_value_is_not_advised_as_its_own_remedy() -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, model.members[0], model.members[1], (x,))

    with pytest.raises(TraceError) as error:
        trace(Mapped(compute), BATCH)
    assert "torch.where" in str(error.value) and "torch.cond)" not in str(error.value).partition("instead")[2]
