"""Simplification leaves the numbers alone and folds the masks that it can know."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.trace import trace
from autopar.ir.graph import WINDOW_ATTENTION, Graph, Node
from autopar.ir.operators import arguments_of
from autopar.sharding.scopes import scopes_of
from examples.models import EXAMPLES
from tests.autopar.interpret import run_graph, tensors_of

SDPA = "aten.scaled_dot_product_attention.default"
BATCH, HEADS, SEQ, WIDTH = 2, 2, 6, 8


def attention_calls(graph: Graph) -> list[Node]:
    return [node for scope in scopes_of(graph) for node in scope.nodes if node.op in (SDPA, WINDOW_ATTENTION)]


def masking(graph: Graph) -> list[tuple[bool, bool]]:
    """(has a mask, is_causal) of every attention call."""
    calls = [arguments_of(node) for node in attention_calls(graph)]
    return [(call.get("attn_mask") is not None, call.get("is_causal", False)) for call in calls]


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", ["llama", "llama_gqa", "qwen2", "qwen3", "gpt2", "opt", "nanogpt"])
def test_causal_models_attend_causally_without_a_mask(name: str) -> None:
    example = EXAMPLES[name](layers=2)
    graph = trace(example.model, example.inputs)
    assert masking(graph) == [(False, True)]
    ops = {node.op for scope in scopes_of(graph) for node in scope.nodes}
    assert not ops & {"aten.tril.default", "aten.le.Tensor", "aten.index.Tensor", "aten.bitwise_and.Tensor"}


@pytest.mark.parametrize("name", ["vit", "transformer_encoder"])
def test_bidirectional_models_attend_to_everything(name: str) -> None:
    example = EXAMPLES[name](layers=2)
    assert masking(trace(example.model, example.inputs, example.loss_fn)) == [(False, False)]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding_mask_is_data_and_stays(name: str) -> None:
    example = EXAMPLES[name](layers=2)
    padded = torch.arange(16) < torch.tensor([16, 11, 5, 16, 8, 9, 16, 3])[:, None]
    batch = {**example.inputs, "attention_mask": padded.long()}
    graph = trace(example.model, batch)
    assert masking(graph) == [(True, False)]
    expected = example.model(**batch).loss
    parameters = list(example.model.parameters())
    loss = run_graph(graph, tensors_of(example.model), batch)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    pairs = zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters), strict=True)
    for have, want in pairs:
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-7)


class Attends(nn.Module):
    """Attention with the mask that `mask` makes."""

    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(BATCH, SEQ, HEADS, WIDTH // HEADS).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask()).square().mean()


def square_mask() -> Tensor:
    return torch.ones(SEQ, SEQ).tril().bool()


def additive_mask() -> Tensor:
    return torch.full((SEQ, SEQ), float("-inf")).triu(1)


def lowest_mask() -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(SEQ, SEQ).masked_fill(~square_mask(), lowest)[None, None]


def position_mask() -> Tensor:
    positions = torch.arange(SEQ)
    return (positions[None, :] <= positions[:, None]).expand(BATCH, 1, SEQ, SEQ)


def all_true() -> Tensor:
    return torch.ones(BATCH, 1, SEQ, SEQ, dtype=torch.bool)


def no_padding() -> Tensor:
    """What transformers makes of attention masks that are all ones."""
    return torch.ones(BATCH, 1, 1, SEQ, dtype=torch.bool)


def a_row_of_zeros() -> Tensor:
    return torch.zeros(1, SEQ) * 2.0


def first_keys() -> Tensor:
    return (torch.arange(SEQ) < SEQ - 1)[None]


def window_mask() -> Tensor:
    return square_mask() & torch.ones(SEQ, SEQ, dtype=torch.bool).triu(-2)


def upper_mask() -> Tensor:
    return square_mask().T


def biased_mask() -> Tensor:
    return additive_mask() + torch.ones(SEQ, SEQ).tril() * 0.5


MASKS: dict[Callable[[], Tensor], tuple[bool, bool]] = {
    square_mask: (False, True),
    additive_mask: (False, True),
    lowest_mask: (False, True),
    position_mask: (False, True),
    all_true: (False, False),
    no_padding: (False, False),
    a_row_of_zeros: (False, False),
    first_keys: (True, False),
    window_mask: (False, False),
    upper_mask: (True, False),
    biased_mask: (True, False),
}


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.__name__)
def test_hand_written_masks(mask: Callable[[], Tensor]) -> None:
    model, x = Attends(mask), torch.randn(BATCH, SEQ, WIDTH)
    graph = trace(model, (x,))
    assert masking(graph) == [MASKS[mask]]
    expected, loss = model(x), run_graph(graph, tensors_of(model), {"x": x})
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    have, want = (torch.autograd.grad(value, list(model.parameters())) for value in (loss, expected))
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-7)


class Decodes(nn.Module):
    """torch.nn's own layers, which compare the values of a mask that they are given with a causal one's."""

    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
        self.decoder, self.mask = nn.TransformerDecoder(layer, 1), mask

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x.sin(), tgt_mask=self.mask()).square().mean()


@pytest.mark.parametrize("mask", [additive_mask, upper_mask])
def test_masks_of_transformer_layers(mask: Callable[[], Tensor]) -> None:
    model, x = Decodes(lambda: mask().logical_not() if mask is upper_mask else mask()), torch.randn(BATCH, SEQ, WIDTH)
    graph = trace(model, (x,))
    assert masking(graph) == [MASKS[mask], (False, False)]
    torch.testing.assert_close(run_graph(graph, tensors_of(model), {"x": x}), model(x), rtol=1e-5, atol=1e-7)


class Picks(nn.Module):
    def __init__(self, rows: Callable[[], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, SEQ)
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y[self.rows()[:, None], torch.arange(SEQ)[None, :]] * torch.arange(SEQ)).square().mean()


@pytest.mark.parametrize(
    ("rows", "folds"), [(lambda: torch.arange(4), True), (lambda: 3 - torch.arange(4), False)], ids=["iota", "reversed"]
)
def test_index_that_counts_through_a_dim_is_a_view(rows: Callable[[], Tensor], folds: bool) -> None:
    model, x = Picks(rows), torch.randn(4, WIDTH)
    graph = trace(model, (x,))
    ops = [node.op for scope in scopes_of(graph) for node in scope.nodes]
    assert ("aten.index.Tensor" not in ops) == folds
    torch.testing.assert_close(run_graph(graph, tensors_of(model), {"x": x}), model(x), rtol=1e-6, atol=0)


def test_nothing_dead_is_left() -> None:
    """Every call's result reaches the loss."""
    for name in ("llama", "bert", "vit"):
        example = EXAMPLES[name]()
        graph = trace(example.model, example.inputs)
        for scope in scopes_of(graph):
            used = {ref.node for node in scope.nodes for ref in node.inputs}
            used |= {ref.node for ref in scope.layer.outputs} if scope.layer else {graph.loss.node}
            used |= {ref.node for piece in graph.body if hasattr(piece, "instances") for ref in piece.args}
            assert {node.name for node in scope.nodes} <= used, name
