"""Bags of one size, whose list of ids is written as rows: against eager, and cut along the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.frontend.trace import trace
from autopar.ir.graph import Node
from autopar.rules.families.lookup import BAGS
from tests.autopar.interpret import run_graph, tensors_of


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(12, 6, **options)
        self.gate = nn.Linear(6, 1)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        own = weights * self.gate.weight[0, 0] if self.table.mode == "sum" else None
        return (self.table(ids, per_sample_weights=own) * self.gate(self.table(ids + 1))).square().mean()


class Flat(Bags):
    """With the starts of bags given."""

    def __init__(self, starts: list[int]) -> None:
        super().__init__(mode="sum")
        self.starts = starts

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        found = self.table(ids.reshape(-1), torch.tensor(self.starts, device=ids.device))
        return (found.sum(0) + weights.sum()).square().mean()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"ids": torch.randint(11, (8, 5), generator=generator), "weights": torch.rand(8, 5, generator=generator)}


@pytest.mark.parametrize(
    "options",
    [{"mode": "sum"}, {"mode": "mean", "padding_idx": 3}, {"mode": "max"}, {"mode": "sum", "padding_idx": -2}],
)
def test_bags_are_rows(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Bags(**options)
    graph = trace(model, batch())
    called = [piece.op for piece in graph.body if isinstance(piece, Node)]
    assert [op for op in called if "bag" in op] == [BAGS] * 2
    loss = model(**batch())
    torch.testing.assert_close(run_graph(graph, tensors_of(model), batch()), loss)


@pytest.mark.parametrize("starts", [[0, 3, 9, 12], [0, 10, 20], [0, 0, 0, 0]])
def test_bags_of_several_sizes_are_left(starts: list[int]) -> None:
    graph = trace(Flat(starts), batch())
    assert not any(isinstance(piece, Node) and piece.op == BAGS for piece in graph.body)


@pytest.mark.by_turns(2)
@pytest.mark.distributed
@pytest.mark.parametrize("pins", [{"dp": 2, "micro_batches": 2}, {"tp": 2}])
def test_bags_are_cut(pins: dict[str, int]) -> None:
    torch.manual_seed(0)
    report = autopar.verify(Bags(mode="sum"), "2 cpu", example_inputs=batch(), constraints=pins)
    assert report.gradients and report.ok(1e-5), str(report)
