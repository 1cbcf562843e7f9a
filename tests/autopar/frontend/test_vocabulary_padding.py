"""Padded vocabularies: the loss and all gradients are those of the model as it is, and padding has no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.padding.vocabulary import alignment_of, padded
from autopar.frontend.trace import trace
from tests.autopar.interpret import run_graph, tensors_of

VOCABULARY = 7
IDS = torch.arange(8).reshape(2, 4) % VOCABULARY
BATCH = {"ids": IDS, "labels": IDS.roll(1, 0)}

Loss = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.flatten())


def whole(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=2, reduction="sum")


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), labels.flatten(), label_smoothing=0.1)


def with_largest(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits, labels) + logits.logsumexp(-1).mean()


class Tied(nn.Module):
    def __init__(self, bias: bool, is_tied: bool = True) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 3, padding_idx=1), nn.Linear(3, VOCABULARY, bias=bias)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids).tanh())


def _longer(value: Tensor, more: int) -> Tensor:
    return torch.cat([value, value.new_zeros(more, *value.shape[1:])]).requires_grad_()


@pytest.mark.parametrize(("bias", "loss_fn"), [(False, flat), (True, shifted), (True, whole)])
@pytest.mark.parametrize("is_tied", [False, True])
def test_loss_and_gradients_are_those_without_padding(bias: bool, loss_fn: Loss, is_tied: bool) -> None:
    model = Tied(bias, is_tied).double()
    graph = padded(trace(model, BATCH, loss_fn), 4)
    paddings = {p.name: p.padding for p in graph.parameters}
    assert set(paddings.values()) == {1}
    assert graph.padded_to == 4
    longer = {p.name: _longer(tensors_of(model)[p.name].detach(), p.padding) for p in graph.parameters}
    assert all(tuple(longer[p.name].shape) == p.meta.shape for p in graph.parameters)
    loss, expected = run_graph(graph, longer, BATCH), loss_fn(model(IDS), BATCH["labels"])
    close = {"rtol": 1e-12, "atol": 1e-15} if expected.dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(loss, expected, **close)
    names = list(dict(model.named_parameters()))
    found = torch.autograd.grad(loss, [longer[name] for name in names])
    for name, have, want in zip(names, found, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(have[:VOCABULARY], want, **close)
        assert not have[VOCABULARY:].any(), name


class Mean(Tied):
    """What reads the table otherwise sees padding."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.table.weight.mean()


@pytest.mark.parametrize(
    ("model", "loss_fn", "multiple"),
    [(Tied(True), smoothed, 4), (Tied(True), with_largest, 4), (Mean(True), flat, 4), (Tied(True), flat, 7)],
)
def test_left_alone_where_padding_would_be_seen_or_is_not_needed(
    model: nn.Module, loss_fn: Loss, multiple: int
) -> None:
    graph = trace(model, BATCH, loss_fn)
    assert padded(graph, multiple) is graph


class Sized(nn.Module):
    """A table of `rows` rows and a head of as many classes, and a table of positions that is only looked up."""

    def __init__(self, rows: int, positions: int = 4) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(rows, 8), nn.Embedding(positions, 8)
        self.head = nn.Linear(8, rows)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.table(ids) + self.positions(ids % 4))


def normalized(logits: Tensor, labels: Tensor) -> Tensor:
    return whole(logits, labels) + logits.square().mean()


@pytest.mark.parametrize(
    ("rows", "loss_fn", "alignment"),
    [
        (1021, whole, 64),
        (1024, whole, 1),
        (1000, whole, 1),  # a multiple of 8, which products read as fast
        (7, whole, 1),  # padding would be most of the table
        (1021, normalized, 1),  # the loss would see padding
    ],
)
def test_vocabularies_are_aligned_for_products_on_gpus(rows: int, loss_fn: Loss, alignment: int) -> None:
    graph = trace(Sized(rows), BATCH, loss_fn)
    assert alignment_of(graph) == alignment
    paddings = {p.name: p.padding for p in padded(graph, alignment).parameters}
    expected = -rows % alignment
    assert paddings == {"table.weight": expected, "head.weight": expected, "head.bias": expected, "positions.weight": 0}


def test_small_heads_are_not_padded_to_the_alignment() -> None:
    """Rows of padding would be most of a head of two classes."""

    class TwoHeads(Sized):
        def __init__(self) -> None:
            super().__init__(1021)
            self.second = nn.Linear(8, 2)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.table(ids)
            labels = ids.roll(1, 0)
            return whole(self.head(hidden), labels) + whole(self.second(hidden), labels % 2)

    graph = trace(TwoHeads(), {"ids": IDS}, None)
    assert alignment_of(graph) == 64
    paddings = {p.name: p.padding for p in padded(graph, 64).parameters}
    assert paddings["head.weight"] == 3 and paddings["second.weight"] == paddings["second.bias"] == 0


@pytest.mark.parametrize(
    ("cluster", "precision", "padded_to"),
    [("1 h100-sxm", "bf16", 64), ("1 h100-sxm", "fp32", 1), ("1 cpu", "bf16", 1)],
)
def test_plans_say_the_alignment_and_keep_it(cluster: str, precision: str, padded_to: int) -> None:
    options = {"example_inputs": BATCH, "loss_fn": whole, "precision": precision}
    plan = autopar.compile(Sized(1021), cluster, **options).plan
    assert plan.padded_to == padded_to
    assert autopar.compile(Sized(1021), cluster, plan=plan, **options).plan.padded_to == padded_to
