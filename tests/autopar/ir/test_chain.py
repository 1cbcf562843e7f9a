"""The units of models without layers: cut at calls with parameters, where few tensors cross."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.frontend.trace import trace
from autopar.ir.chain import MOST_UNITS, chain, nodes_of
from autopar.lowering.stages import stage_graphs, tied_parameters

WIDTH = 8


class Again(nn.Module):
    """One layer that is called many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.up, self.down, self.times = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x + self.down(self.up(x).relu())
        return x


def graph_of(times: int):
    return trace(Again(times), (torch.randn(4, WIDTH), torch.randn(4, WIDTH)), nn.functional.mse_loss)


def test_units_begin_at_calls_with_parameters_where_one_tensor_crosses():
    graph = graph_of(3)
    begins = [nodes_of(graph, unit)[0] for unit in chain(graph)]
    assert [node.op for node in begins] == ["aten.linear.default"] * len(begins)
    assert [node.name for node in begins][:1] == ["linear"] and len(begins) >= 3
    stages = stage_graphs(graph, (0, len(begins) // 2))
    assert len(stages[1].received) >= 1 and {name for name, _ in tied_parameters(stages)} >= {"up.weight"}


def test_there_are_not_more_than_can_be_searched():
    assert len(chain(graph_of(40))) == MOST_UNITS
