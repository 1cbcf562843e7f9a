"""Layers are found, verified to be equal, and folded; unequal ones are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.frontend.layers import layer_path
from autopar.frontend.trace import find_cuts, trace
from autopar.ir.graph import Graph, LayerRun, Node
from examples.models import EXAMPLES
from tests.autopar.interpret import run_graph, tensors_of


def runs_of(graph: Graph) -> list[LayerRun]:
    return [piece for piece in graph.body if isinstance(piece, LayerRun)]


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.3.mlp", "model.layers.3"),
        ("blocks.0", "blocks.0"),
        ("model.layers.3.experts.1.w", "model.layers.3"),
        ("model.norm", ""),
        ("", ""),
        ("0.linear", ""),
    ],
)
def test_layer_path(module: str, expected: str) -> None:
    assert layer_path(module) == expected


def test_six_layer_llama_is_one_run_of_six() -> None:
    example = EXAMPLES["llama"](layers=6)
    graph = trace(example.model, example.inputs)
    (run,) = runs_of(graph)
    assert run.layer.name == "LlamaDecoderLayer"
    assert run.instances == tuple(f"model.layers.{i}" for i in range(6))
    assert {p.name for p in run.layer.parameters} == dict(example.model.model.layers[0].named_parameters()).keys()
    ops = [node.op for node in run.layer.nodes]
    assert ops.count("aten.linear.default") == 7  # q, k, v, o, gate, up, down
    assert ops.count("aten.scaled_dot_product_attention.default") == 1
    assert len(run.carried) == 1 and len(run.layer.outputs) == 1
    # Rotary cosines and sines enter every layer, the hidden states only the first.
    (position, output) = run.carried[0]
    assert (run.layer.inputs[position][0], output) == ("hidden", 0)
    assert len(run.layer.inputs) == 3
    assert not any(isinstance(p, Node) and layer_path(p.module) for p in graph.body)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, slope: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.slope = nn.Linear(width, hidden), nn.Linear(hidden, width), slope

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.leaky_relu(self.up(x), self.slope))


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module], skip: int | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)  # so that a gradient reaches the first block's input as it does the others'
        self.blocks = nn.ModuleList(blocks)
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        kept = x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            kept = x if index == self.skip else kept
        return (x * kept).mean()


def instances(model: nn.Module, full_depth: bool) -> list[tuple[str, ...]]:
    """Runs found, after a check that the folded graph still computes the model."""
    x = torch.randn(3, 8)
    graph = trace(model, (x,), cuts=() if full_depth else None)
    assert len({piece.name for piece in graph.body}) == len(graph.body)
    torch.testing.assert_close(run_graph(graph, tensors_of(model), {"x": x}), model(x), rtol=1e-6, atol=1e-8)
    return [tuple(path.rpartition(".")[2] for path in run.instances) for run in runs_of(graph)]


@pytest.mark.parametrize("full_depth", [False, True])
def test_unequal_layers_are_not_folded(full_depth: bool) -> None:
    widths = Stack([Block(8, 8 * (1 + i % 2)) for i in range(5)])
    constants = Stack([Block(8, 8, 0.1 * i) for i in range(5)])
    alone = [(str(index),) for index in range(5)]
    assert instances(widths, full_depth) == alone
    assert instances(constants, full_depth) == alone


@pytest.mark.parametrize("full_depth", [False, True])
def test_runs_of_equal_layers_between_unequal_ones(full_depth: bool) -> None:
    hidden = [8, 16, 16, 16, 8, 8, 8, 8]
    assert instances(Stack([Block(8, h) for h in hidden]), full_depth) == [
        ("0",),
        ("1", "2", "3"),
        ("4", "5", "6", "7"),
    ]


@pytest.mark.parametrize("full_depth", [False, True])
def test_layer_whose_output_is_used_later_ends_a_run(full_depth: bool) -> None:
    """Block 2's output skips to the end, so a run cannot go through it: its inner results have no name outside."""
    model = Stack([Block(8, 8) for _ in range(6)], skip=2)
    found = instances(model, full_depth)
    assert all("2" not in run[:-1] for run in found)
    assert ("3", "4", "5") in found


class CountsBlocks(nn.Module):
    """Blocks look alike, but forward treats each by its index."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(5):
            x = self.blocks[i](x) * (i + 1)
        return x.mean()


def test_model_that_counts_its_blocks_is_traced_in_full() -> None:
    assert instances(CountsBlocks(), False) == instances(CountsBlocks(), True)


class SharedBlock(nn.Module):
    """Every layer uses one block: the weights are tied."""

    def __init__(self) -> None:
        super().__init__()
        block = Block(8, 8)
        self.blocks = nn.ModuleList([block] * 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean()


def test_tied_layers_compute_the_model() -> None:
    model, x = SharedBlock(), torch.randn(3, 8)
    graph = trace(model, (x,))
    parameters = list(model.parameters())
    loss = run_graph(graph, tensors_of(model), {"x": x})
    want = torch.autograd.grad(model(x), parameters)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), want, rtol=1e-5, atol=1e-8)
    assert len({p.name for p in graph.parameters}) == 4


class ByIndex(nn.Module):
    """A block that behaves by its own index, as models with sliding windows in every other layer do."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.linear, self.layer_idx = nn.Linear(8, 8), layer_idx

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.layer_idx % 2 else y.relu()


def test_blocks_that_act_by_their_index() -> None:
    assert instances(Stack([ByIndex(i) for i in range(6)]), False) == []


class TwoByIndex(nn.Module):
    """A layer whose kind is its index modulo a period, which nothing but forward shows."""

    def __init__(self, layer_idx: int, period: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layer_idx, self.period = layer_idx, period

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = (y.relu, y.tanh, y.sigmoid)[max(self.layer_idx % self.period - self.period + 3, 0)]()
        return x + self.down(y)


PATTERNS = {
    "widths, 2": (lambda: [Block(8, 8 * (1 + i % 2)) for i in range(7)], 3),
    "five narrow, one wide": (lambda: [Block(8, 8 if i % 6 < 5 else 16) for i in range(20)], 8),
    "by index, 2": (lambda: [TwoByIndex(i, 2) for i in range(8)], 4),
    "by index, 3": (lambda: [TwoByIndex(i, 3) for i in range(8)], 5),
    "after others": (lambda: [Block(8, 24), Block(8, 8), *(Block(8, 8 * (1 + i % 2)) for i in range(6))], 4),
}
"""Layers that repeat with a period, and how many of those that do are traced."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_layers_of_a_pattern_are_traced_by_its_first_ones(name: str) -> None:
    """The graph is that of the whole trace, and computes the model."""
    torch.manual_seed(0)
    make, num_kept = PATTERNS[name]
    model, x = Stack(make()), (torch.randn(3, 8),)
    cuts = find_cuts(model, x)
    assert [cut.num_kept for cut in cuts] == [num_kept]
    found, want = trace(model, x, cuts=cuts), trace(model, x, cuts=())
    assert sorted(found.parameters, key=str) == sorted(want.parameters, key=str)
    described = [[(p.layer, p.instances, p.args, p.carried) for p in runs_of(graph)] for graph in (found, want)]
    assert described[0] == described[1]
    assert instances(model, False) == instances(model, True)


class LateByIndex(ByIndex):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if self.layer_idx < 4 else y.relu()


@pytest.mark.parametrize("full_depth", [False, True])
def test_blocks_that_act_by_their_index_beyond_the_kept_ones(full_depth: bool) -> None:
    """The first two blocks trace alike and the fifth does not."""
    assert instances(Stack([LateByIndex(i) for i in range(6)]), full_depth) == [("0", "1", "2", "3"), ("4", "5")]
