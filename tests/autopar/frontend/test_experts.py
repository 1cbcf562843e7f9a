"""Mixtures of experts whose rows are sorted: which are written without the sorting, and that all keep their numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  # registers grouped_mm_fallback
from torch import Tensor, nn

from autopar.frontend.trace import trace
from autopar.ir.graph import base_name
from autopar.sharding.scopes import scopes_of
from tests.autopar.interpret import run_graph, tensors_of

TOKENS, CHOICES, EXPERTS, WIDTH = 8, 2, 4, 8
Between = Callable[[Tensor, Tensor], Tensor]
"""(sorted rows, their ids) -> rows, between the two layers of the experts."""


def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """torch's own has shapes of bf16 alone."""
    found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return found


class Mixture(nn.Module):
    """Sorts a row per token and choice by expert, multiplies runs of rows, and puts the results back.

    bins: of the histogram that says where each expert's rows end. descending: the order of the ids.
    """

    def __init__(
        self, between: Between, bins: int = EXPERTS, by_argsort: bool = False, descending: bool = False
    ) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)
        self.between, self.bins, self.by_argsort, self.descending = between, bins, by_argsort, descending

    def forward(self, x: Tensor) -> Tensor:
        weights, choices = self.router(x).softmax(-1).topk(CHOICES)
        ids = choices.reshape(-1)
        if self.by_argsort:
            order = torch.argsort(ids)
            own, inverse = ids[order], torch.argsort(order)
        else:
            own, order = torch.sort(ids, descending=self.descending)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order))
        counts = torch.histc(own.float(), self.bins, 0, self.bins - 1)
        ends = counts.cumsum(0, dtype=torch.int32)[:EXPERTS]
        rows = grouped(x[order // CHOICES], self.up, ends) + self.bias[own]
        rows = grouped(self.between(rows, own), self.down, ends)
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        return rows[inverse].view(-1, CHOICES, WIDTH).sum(1)


class AddedToTokens(Mixture):
    """Rows are weighed before, and added to their tokens after the experts, as torchtitan's layer does.

    way: "scatter_add" to what all experts share, or "index_add" to zeros. counts: "histc" of the ids as they are, or
    "one_hot", of the sorted ids.
    """

    def __init__(self, way: str, counts: str = "histc", choices: int = CHOICES, scale: float = 1.0) -> None:
        super().__init__(silu)
        self.way, self.counts, self.choices, self.scale = way, counts, choices, scale

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CHOICES)
        counts = torch.histc(chosen.view(-1).float(), EXPERTS, 0, EXPERTS - 1)
        order = torch.argsort(chosen.view(-1), stable=True)
        if self.counts == "one_hot":
            counts = F.one_hot(chosen.view(-1)[order], EXPERTS).sum(0)
        ends = counts.cumsum(0).to(torch.int32)
        tokens = order // self.choices
        by_element = tokens.reshape(-1, 1).expand(-1, WIDTH)
        rows = torch.gather(x, 0, by_element) * weights.view(-1)[order].reshape(-1, 1)
        rows = grouped(F.silu(grouped(rows, self.up, ends) + self.bias[chosen.view(-1)[order]]), self.down, ends)
        if self.way == "index_add":
            return torch.zeros_like(x).index_add_(0, tokens, rows, alpha=self.scale)
        return torch.tanh(x).scatter_add(0, by_element, rows)


class LookedUp(Mixture):
    """Takes the matrix of each row out of the weights, and multiplies it by that row.

    way: by batched products of rows or of columns, as transformers' batched_mm, or by einsum, as gpt-fast. from_end:
    experts are counted from the last one.
    """

    def __init__(self, way: str, from_end: bool = False) -> None:
        super().__init__(silu)
        self.way, self.from_end = way, from_end

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(CHOICES)
        chosen = chosen - EXPERTS if self.from_end else chosen
        if self.way == "einsum":
            rows = torch.einsum("ti,tkio->tko", x, self.up[chosen]) + self.bias[chosen]
            rows = torch.einsum("tko,tkoi->tki", F.silu(rows), self.down[chosen])
            return torch.einsum("tki,tk->ti", rows, weights)
        ids, rows = chosen.reshape(-1), x.repeat_interleave(CHOICES, 0)
        if self.way == "rows":
            rows = torch.bmm(rows.unsqueeze(1), self.up[ids]).squeeze(1) + self.bias[ids]
            rows = torch.bmm(F.silu(rows).unsqueeze(1), self.down[ids]).squeeze(1)
        else:
            up, down = self.up.transpose(1, 2), self.down.transpose(1, 2)
            rows = torch.bmm(up[ids], rows.unsqueeze(-1)).squeeze(-1) + self.bias[ids]
            rows = torch.matmul(down[ids], F.silu(rows).unsqueeze(-1)).squeeze(-1)
        return (rows * weights.reshape(-1, 1)).view(-1, CHOICES, WIDTH).sum(1)


def silu(rows: Tensor, ids: Tensor) -> Tensor:
    return F.silu(rows.clamp(max=7.0))


def less_its_mean(rows: Tensor, ids: Tensor) -> Tensor:
    return rows - rows.mean(0)


def added_up(rows: Tensor, ids: Tensor) -> Tensor:
    return rows.cumsum(0)


def with_its_place(rows: Tensor, ids: Tensor) -> Tensor:
    return rows * torch.arange(len(rows)).unsqueeze(1)


def columns_in_the_order_of_rows(rows: Tensor, ids: Tensor) -> Tensor:
    return rows[:, torch.argsort(ids)]  # as many columns as rows


def with_its_expert(rows: Tensor, ids: Tensor) -> Tensor:
    return rows * (1.0 + ids).unsqueeze(1)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(
    ("model", "is_rewritten"),
    [
        (lambda: Mixture(silu), True),
        (lambda: Mixture(silu, by_argsort=True), True),
        (lambda: Mixture(with_its_expert), True),
        (lambda: LookedUp("rows"), True),
        (lambda: LookedUp("columns"), True),
        (lambda: LookedUp("einsum"), True),
        (lambda: LookedUp("rows", from_end=True), False),
        (lambda: AddedToTokens("scatter_add"), True),
        (lambda: AddedToTokens("index_add"), True),
        (lambda: AddedToTokens("index_add", counts="one_hot"), True),
        (lambda: AddedToTokens("index_add", scale=2.0), False),
        (lambda: AddedToTokens("index_add", choices=2 * CHOICES), False),
        (lambda: Mixture(silu, bins=EXPERTS + 1), False),
        (lambda: Mixture(silu, descending=True), False),
        (lambda: Mixture(less_its_mean), False),
        (lambda: Mixture(columns_in_the_order_of_rows), False),
        (lambda: Mixture(added_up), False),
        (lambda: Mixture(with_its_place), False),
    ],
    ids=[
        "plain",
        "argsort",
        "reads ids",
        "looked up for rows",
        "looked up for columns",
        "looked up for einsum",
        "counted from the end",
        "scatter_add",
        "index_add",
        "one_hot",
        "twice their sum",
        "other tokens",
        "more bins",
        "descending",
        "mean over rows",
        "columns",
        "cumsum over rows",
        "place of rows",
    ],
)
def test_mixture(model: Callable[[], nn.Module], is_rewritten: bool) -> None:
    torch.manual_seed(0)
    own, x = model(), torch.randn(TOKENS, WIDTH)
    graph = trace(own, {"x": x}, lambda y: y.square().mean())
    calls = [base_name(node.op) for scope in scopes_of(graph) for node in scope.nodes]
    assert calls.count("expert_linear") == (2 if is_rewritten else 0)
    assert is_rewritten != any(name in calls for name in ("sort", "argsort", "bmm"))
    expected = own(x).square().mean()
    found = run_graph(graph, tensors_of(own), {"x": x})
    torch.testing.assert_close(found, expected)
    parameters = list(own.parameters())
    for have, want in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize("model", [lambda: Mixture(silu), lambda: LookedUp("rows"), lambda: AddedToTokens("index_add")])
def test_a_bias_of_experts_is_part_of_their_layer(model: Callable[[], nn.Module]) -> None:
    graph = trace(model(), {"x": torch.randn(TOKENS, WIDTH)}, lambda y: y.square().mean())
    nodes = [node for scope in scopes_of(graph) for node in scope.nodes]
    layers = [len(node.inputs) for node in nodes if base_name(node.op) == "expert_linear"]
    assert layers == [4, 3], "the first layer has a bias"


def test_what_is_sorted_may_not_leave() -> None:
    """A loss that reads the sorted rows has them in their order."""
    torch.manual_seed(0)
    own, x = Mixture(silu), torch.randn(TOKENS, WIDTH)
    leaked: list[Tensor] = []
    own.between = lambda rows, ids: leaked.append(rows) or silu(rows, ids)  # type: ignore[func-returns-value]

    def loss(y: Tensor) -> Tensor:
        return y.square().mean() + leaked.pop()[0].sum()

    graph = trace(own, {"x": x}, loss)
    calls = [base_name(node.op) for scope in scopes_of(graph) for node in scope.nodes]
    assert "expert_linear" not in calls
    expected = loss(own(x))
    torch.testing.assert_close(run_graph(graph, tensors_of(own), {"x": x}), expected)
