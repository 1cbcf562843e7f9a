"""Rows that cross between nodes once per node: the numbers of one process, on ranks without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.proofs.simulated_ranks import meshes, run_ranks
from codegen.runtime.experts import expert_linear
from codegen.runtime.experts_by_node import NodeRoutes, combine_by_node, dispatch_by_node

EXPERTS, CHOICES, TOKENS, WIDTH = 8, 3, 5, 4


def chosen(routing: str, ranks: int) -> Tensor:
    """[ranks T, k]"""
    generator = torch.Generator().manual_seed(1)
    shape = ranks * TOKENS, CHOICES
    if routing == "balanced":
        return torch.rand(shape[0], EXPERTS, generator=generator).argsort(1)[:, :CHOICES]
    if routing == "skewed":
        return (torch.rand(shape, generator=generator) > 0.8).long() * (EXPERTS - 1)
    return torch.full(shape, {"one expert": 5, "first expert": 0}[routing])


def eager(x: Tensor, weights: Tensor, up: Tensor, down: Tensor, ids: Tensor) -> Tensor:
    rows = F.silu(torch.einsum("tkbh,th->tkb", up.transpose(1, 2)[ids], x))
    return (torch.einsum("tkhb,tkb->tkh", down.transpose(1, 2)[ids], rows) * weights.unsqueeze(-1)).sum(1)


@pytest.mark.by_turns(3)
@pytest.mark.parametrize(("ranks", "neighbors"), [(4, 2), (8, 2), (8, 4), (2, 1), (4, 4)])
@pytest.mark.parametrize("routing", ["balanced", "skewed", "one expert", "first expert"])
def test_values_and_gradients_are_those_of_one_process(ranks: int, neighbors: int, routing: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weights = random(ranks * TOKENS, WIDTH), random(ranks * TOKENS, CHOICES)
    up, down = random(EXPERTS, WIDTH, 6), random(EXPERTS, 6, WIDTH)
    ids, seed = chosen(routing, ranks), random(ranks * TOKENS, WIDTH).detach()
    wanted = eager(x, weights, up, down, ids)
    gradients = torch.autograd.grad(wanted, [x, weights, up, down], seed)
    axes, found = meshes((ranks,)), dict[int, Any]()

    def work(coordinate: tuple[int, ...]) -> None:
        (axis,), rank = axes[coordinate].axes, coordinate[0]
        own = [part.chunk(ranks)[rank].detach().requires_grad_() for part in (x, weights, up, down)]
        routes: Any = NodeRoutes(ids.chunk(ranks)[rank].flatten(), EXPERTS, axis, CHOICES, neighbors)
        rows = F.silu(expert_linear(dispatch_by_node(own[0], routes), own[2], routes))
        y = combine_by_node(expert_linear(rows, own[3], routes), own[1].flatten().unsqueeze(-1), routes)
        found[rank] = y.detach(), torch.autograd.grad(y, own, seed.chunk(ranks)[rank])

    run_ranks(list(axes), work, together=True)
    torch.testing.assert_close(torch.cat([found[rank][0] for rank in range(ranks)]), wanted)
    for number, gradient in enumerate(gradients):
        torch.testing.assert_close(torch.cat([found[rank][1][number] for rank in range(ranks)]), gradient)
