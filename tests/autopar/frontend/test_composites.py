"""Operators that torch defines by others, and have no rule: the graph has those, and eager's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.frontend.trace import trace
from autopar.ir.graph import Graph
from autopar.rules.registry import rule_for
from autopar.sharding.call_options import scopes_of
from tests.autopar.interpret import run_graph, tensors_of

X, Y = torch.linspace(-1, 1, 192).reshape(4, 6, 8).cos(), torch.linspace(0, 1, 192).reshape(4, 6, 8)
BAGS = torch.arange(12).reshape(4, 3) % 5


def without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.linalg.matrix_norm(x)
    return x / scale[:, None, None]


def written_through_movedim(x: Tensor) -> Tensor:
    y = 2 * x
    y.movedim(0, 1).mul_(torch.arange(6.0)[:, None, None])
    return y


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "multiply": lambda x: torch.multiply(x, torch.true_divide(x, 3)),
    "cosine_similarity": lambda x: x * F.cosine_similarity(x, x + 1, -1)[..., None],
    "margin_ranking_loss": lambda x: x + F.margin_ranking_loss(x, x.flip(2), torch.ones(4, 6, 8)),
    "matrix_norm": lambda x: x / torch.linalg.matrix_norm(x)[:, None, None],
    "det": lambda x: x + torch.linalg.det(x[:, :4, :4] + torch.eye(4))[:, None, None],
    "tensordot": lambda x: torch.tensordot(x, torch.ones(8, 8), 1),
    "hsplit": lambda x: torch.cat(torch.hsplit(x, 2)[::-1], 1),
    "diff": lambda x: x + x.diff(dim=1).sum(1, keepdim=True),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.3)),
    "no_grad": without_gradient,
    "write to movedim": written_through_movedim,
}


class Calls(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.linear = call, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.linear(x))


class Bags(nn.Module):
    """An operator that is made of another one where nothing is differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.linear = nn.EmbeddingBag(5, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.bags(ids)).square().mean()


def unknown(graph: Graph) -> set[str]:
    return {
        node.op
        for scope in scopes_of(graph)
        for node in scope.nodes
        if rule_for(node, tuple(scope.metas[ref] for ref in node.inputs)) is None
    }


@pytest.mark.by_turns(3)
@pytest.mark.parametrize("name", CALLS)
def test_they_are_what_defines_them(name: str) -> None:
    model = Calls(CALLS[name])
    expected = F.mse_loss(model(X), Y)
    graph = trace(model, (X, Y), F.mse_loss)
    found = run_graph(graph, tensors_of(model), {"x": X, "target": Y})
    torch.testing.assert_close(found, expected)
    parameters = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters))
    assert not unknown(graph)


def test_gradients_go_through_what_has_another_form_without_them() -> None:
    model = Bags()
    graph = trace(model, (BAGS,))
    found = run_graph(graph, tensors_of(model), {"ids": BAGS})
    wanted = list(model.parameters())
    torch.testing.assert_close(torch.autograd.grad(found, wanted), torch.autograd.grad(model(BAGS), wanted))


@pytest.mark.distributed
def test_programs_train_as_one_process_does() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Calls(CALLS[name]) for name in ("multiply", "cosine_similarity", "matrix_norm", "hsplit")))
    report = autopar.verify(model, "2 cpu", example_inputs=(X, Y), loss_fn=F.mse_loss, constraints={"dp": 2}, steps=2)
    assert report.ok(), str(report)
