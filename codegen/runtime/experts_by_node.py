"""Rows of experts' layers that cross between nodes once for every node, however many of its experts they go to.

What experts.py does over an axis of n ranks, done in two exchanges where p neighboring ranks of the axis share a node.
A token goes to the rank at its own place of each node that has an expert of it, and from there, once for every choice,
to the ranks of that node. On the way back the holder of the copy weighs and sums what comes of the choices inside its
node, one row of which returns to the token's rank, which sums over nodes:

    dispatch_by_node(x, routes) = dispatch(x.repeat_interleave(k, 0), routes)
    combine_by_node(y, w, routes) = (combine(y, routes) * w).view(T, k, -1).sum(1)

but for the order of the sums. Gradients go the same ways: those of copies are summed inside the node, too.

Shapes: T tokens, k choices of each, N = n / p nodes, E experts, A and B features; C copies leave a rank, H copies are
on it, R rows leave it inside the node, M of all ranks' rows are of its experts. Over the whole axis each exchange
is one all_to_all with uneven splits, of which those of ranks elsewhere are empty, so that no group of ranks is needed
but the axis' own. Sums are taken in fp32 and rounded once on every rank, in an order that depends on the routing alone.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .experts import RoutingAxis, exchanged, joined_runs, taken


class NumberedAxis(RoutingAxis, Protocol):
    """The parts of a mesh axis (`mesh.Axis`) that are needed here."""

    @property
    def rank(self) -> int: ...


class Copies:
    """For each copy, the row that it is one of; several copies of a row become its sum on the way back."""

    def __init__(self, rows: Tensor, num_rows: int) -> None:
        self.rows, self.num_rows = rows, num_rows

    @cached_property
    def by_row(self) -> Tensor:
        """The copies in the order of their rows."""
        return self.rows.argsort(stable=True)

    @cached_property
    def starts(self) -> Tensor:
        """For each row, the number of copies of those before it."""
        counts = self.rows.new_zeros(self.num_rows).index_add_(0, self.rows, torch.ones_like(self.rows))
        return counts.cumsum(0) - counts


class NodeRoutes:
    """The ways of tokens to their experts and back.

    experts [T k]: of each token's choices, from 0 to num_experts - 1. neighbors: p, ranks of the axis in a row that
    share a node. Every rank of the axis must make the same calls. Reads the numbers of rows on the host, once.
    """

    def __init__(self, experts: Tensor, num_experts: int, axis: NumberedAxis, choices: int, neighbors: int) -> None:
        self.axis, self.choices, self.neighbors = axis, choices, neighbors
        self.node, self.place = divmod(axis.rank, neighbors)
        num_nodes, experts_per_rank, chosen = (
            axis.size // neighbors,
            num_experts // axis.size,
            experts.view(-1, choices),
        )
        counts = experts.new_zeros(num_experts).index_add_(0, experts, torch.ones_like(experts))
        goes = torch.zeros(len(chosen), num_nodes, dtype=torch.bool, device=experts.device)
        goes = goes.scatter_(1, chosen // (experts_per_rank * neighbors), value=True).t()
        arriving, numbers = self._counted(counts, goes.sum(1), num_nodes)
        (self.sent, self.arrived), (self.spread, self.received) = numbers
        num_sent, num_arrived, num_spread = sum(self.sent), sum(self.arrived), sum(self.spread)

        tokens = torch.arange(len(chosen), device=experts.device).repeat(num_nodes)
        leaving = torch.nonzero_static(goes.flatten(), size=num_sent).flatten()
        self.copies = Copies(tokens[leaving], len(chosen))
        local = self.across(chosen[self.copies.rows].int()) - self.node * experts_per_rank * neighbors
        last = experts_per_rank * neighbors
        local = local.where((local >= 0) & (local < last), last).flatten()
        self.order = local.argsort(stable=True)[:num_spread]
        """The choices of the copies on this rank that are of this node's experts, sorted by expert."""
        self.inside = Copies(self.order // choices, num_arrived)
        self.arranged = joined_runs(arriving, sum(self.received))
        self.ends = arriving.sum(0).cumsum(0, dtype=torch.int32)

    def _counted(self, counts: Tensor, copies: Tensor, num_nodes: int) -> tuple[Tensor, list[list[list[int]]]]:
        """(rows that come from each neighbor for each expert [p, E / n]; on the host the copies that go to and come
        from each node, and the rows that go to and come from each neighbor).

        A rank tells each other one the rows for that one's experts, and the copies and rows for its whole node, which
        concern the rank of that node at its own place.
        """
        neighbors, size = self.neighbors, self.axis.size
        of_expert = counts.view(size, -1)
        of_rank = of_expert.sum(1).view(num_nodes, neighbors).repeat_interleave(neighbors, 0)
        told = torch.cat([of_expert, copies.repeat_interleave(neighbors).unsqueeze(1), of_rank], 1)
        heard = self.axis.exchange_parts(told).view(num_nodes, neighbors, -1)
        num_experts = of_expert.shape[1]
        arriving, counts_held = heard[..., :num_experts].sum(0), heard[:, self.place, num_experts:]
        numbers = torch.cat([copies, counts_held[:, 0], counts_held[:, 1:].sum(0), arriving.sum(1)]).tolist()
        nodes, ranks = numbers[: 2 * num_nodes], numbers[2 * num_nodes :]
        return arriving, [[nodes[:num_nodes], nodes[num_nodes:]], [ranks[:neighbors], ranks[neighbors:]]]

    def across(self, copies: Tensor, returns: bool = False) -> Tensor:
        """[C, ...] -> [H, ...] to the nodes; returns: [H, ...] -> [C, ...] from them."""
        sent, received = (
            [numbers[rank // self.neighbors] if rank % self.neighbors == self.place else 0 for rank in self._ranks]
            for numbers in (self.sent, self.arrived)
        )
        return exchanged(copies, self.axis, received, sent) if returns else exchanged(copies, self.axis, sent, received)

    def within(self, rows: Tensor, returns: bool = False) -> Tensor:
        """[R, ...] -> [M, ...] to the ranks of this node; returns: [M, ...] -> [R, ...] from them."""
        if self.neighbors == 1:
            return rows
        sent, received = (
            [numbers[rank % self.neighbors] if rank // self.neighbors == self.node else 0 for rank in self._ranks]
            for numbers in (self.spread, self.received)
        )
        return exchanged(rows, self.axis, received, sent) if returns else exchanged(rows, self.axis, sent, received)

    @property
    def _ranks(self) -> range:
        return range(self.axis.size)


def dispatch_by_node(tokens: Tensor, routes: NodeRoutes) -> Tensor:
    """[T, A] -> [M, A] sorted by expert: of all ranks' tokens, for each choice of an expert of this one's a row."""
    arrived = routes.across(_apply(_Copied, tokens, routes.copies))
    return taken(routes.within(_apply(_Copied, arrived, routes.inside)), routes.arranged)


def combine_by_node(rows: Tensor, weights: Tensor, routes: NodeRoutes) -> Tensor:
    """[M, B], and a weight for each choice of this rank's tokens, [T k] or [T k, 1] -> [T, B]: for each token the
    weighted sum over its choices, in the dtype that a row times a weight has."""
    rows = routes.within(taken(rows, routes.arranged.reversed), returns=True)
    arrived_weights = routes.across(weights.reshape(-1, routes.choices).index_select(0, routes.copies.rows))
    sums = _apply(_Weighed, rows, arrived_weights.flatten().index_select(0, routes.order), routes.inside)
    return _apply(_Summed, routes.across(sums, returns=True), routes.copies)


def _summed(copies: Tensor, of: Copies, weights: Tensor | None = None) -> Tensor:
    """The sum over the copies of each row, which may have a weight each."""
    if not len(copies):
        return copies.new_zeros(of.num_rows, *copies.shape[1:])
    ordered = None if weights is None else weights.index_select(0, of.by_row)
    return F.embedding_bag(of.by_row, copies.contiguous(), of.starts, mode="sum", per_sample_weights=ordered)


class _Copied(torch.autograd.Function):
    """Every copy of the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return rows.index_select(0, copies.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.copies), None


class _Summed(torch.autograd.Function):
    """The sums over copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return _summed(rows, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_select(0, ctx.copies.rows), None


class _Weighed(torch.autograd.Function):
    """The weighted sums over copies, in the dtype of the products."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(rows, weights)
        dtype = torch.promote_types(rows.dtype, weights.dtype)
        return _summed(rows.to(dtype), copies, weights.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weights = ctx.saved_tensors
        copied = gradient.index_select(0, ctx.copies.rows)
        to_weights = (copied * rows).sum(1, dtype=_accumulator(copied)).to(weights.dtype)
        return copied.mul_(weights.unsqueeze(1)).to(rows.dtype), to_weights, None


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _apply(function: Any, *args: object) -> Tensor:
    """`function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*args)
    return result
