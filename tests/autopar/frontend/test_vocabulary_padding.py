"""Padded vocabularies: the loss and all gradients are those of the model as it is, and padding has no gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontend.padding.vocabulary import padded
from autopar.frontend.trace import trace
from tests.autopar.interpret import run_graph, tensors_of

VOCABULARY = 7
IDS = torch.arange(8).reshape(2, 4) % VOCABULARY
BATCH = {"ids": IDS, "labels": IDS.roll(1, 0)}

Loss = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().view(-1, VOCABULARY), labels.flatten())


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


@pytest.mark.parametrize(("bias", "loss_fn"), [(False, flat), (True, shifted)])
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
