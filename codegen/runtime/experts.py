"""Layers of a mixture of experts: each row is multiplied by the matrix of the expert that it was sent to.

Shapes: N rows (tokens times choices), E experts, A features in, B features out. Over an axis of n ranks, each with N
rows and E / n experts, rows travel to the rank that has their expert, are multiplied there, and travel back; M of them
arrive at a rank, which depends on the data and may be none or n N.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

ALIGNMENT_BYTES = 16
"""What rows and matrices are aligned to for torch's grouped product."""


class RoutingAxis(Protocol):
    """What is needed of a mesh axis (`mesh.Axis`)."""

    @property
    def size(self) -> int: ...
    def exchange_parts(self, parts: Tensor) -> Tensor: ...
    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor: ...


def expert_linear(input: Tensor, weight: Tensor, experts: Tensor, axis: RoutingAxis | None = None) -> Tensor:
    """`input[n] @ weight[experts[n]]` for every row n.

    input [N, A], weight [E, A, B] (of the ranks of `axis` each has an equal run of the experts), experts [N] (whole
    numbers from 0 to E - 1) -> [N, B]. An expert without a row gets a gradient of zeros.
    """
    routes = Routes(experts, len(weight) * (1 if axis is None else axis.size), axis)
    return routes.combine(routes.linear(routes.dispatch(input), weight))


class Routes:
    """Where rows meet their experts: sorted by expert, on the rank of `axis` that has it, and back.

    experts [N]: each row's, from 0 to num_experts - 1. Several layers in a row share one way there and one back:
    `combine(f(linear(dispatch(x), w)))` for any f that treats rows alike and each by itself. Every rank of the axis
    must make the same calls. Reads the numbers of rows on the host.
    """

    def __init__(self, experts: Tensor, num_experts: int, axis: RoutingAxis | None = None) -> None:
        self.axis = axis if axis is not None and axis.size > 1 else None
        self.order = experts.argsort()
        counts = experts.new_zeros(num_experts).index_add_(0, experts, torch.ones_like(experts))
        self.arranged = None
        if self.axis is not None:
            arriving = self.axis.exchange_parts(counts.view(self.axis.size, -1))
            own = torch.arange(arriving.shape[1], device=experts.device).repeat(self.axis.size)
            self.sent, self.received = counts.view(self.axis.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
            self.arranged = own.repeat_interleave(arriving.flatten(), output_size=sum(self.received)).argsort()
            counts = arriving.sum(0)
        self.counts = counts

    def dispatch(self, rows: Tensor) -> Tensor:
        """[N, ...] in the order of the tokens -> [M, ...] sorted by expert, of all ranks' rows those of this one's."""
        rows = _taken(rows, self.order)
        if self.axis is not None and self.arranged is not None:
            rows = _exchanged(rows, self.axis, self.sent, self.received)
            rows = _taken(rows, self.arranged)
        return rows

    def combine(self, rows: Tensor) -> Tensor:
        """[M, ...] -> [N, ...]: what `dispatch` did, undone."""
        if self.axis is not None and self.arranged is not None:
            rows = _taken(rows, self.arranged.argsort())
            rows = _exchanged(rows, self.axis, self.received, self.sent)
        return _taken(rows, self.order.argsort())

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Dispatched rows [M, A], weight [E / n, A, B] -> [M, B]: each row times its expert's matrix."""
        if _has_kernel(rows, weight):
            return F.grouped_mm(rows, weight, offs=self.counts.cumsum(0, dtype=torch.int32))
        parts = zip(torch.split(rows, self.counts.tolist()), weight.unbind(), strict=True)
        return torch.cat([part @ matrix for part, matrix in parts])


class _Taken(torch.autograd.Function):
    """rows[order], for a permutation."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return gradient.index_select(0, order.argsort()), None


class _Exchanged(torch.autograd.Function):
    """Rows to other ranks; backward their gradients return."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, axis: RoutingAxis, sent: list[int], received: list[int]) -> Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return axis.exchange_rows(rows, sent, received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.axis.exchange_rows(gradient, ctx.received, ctx.sent), None, None, None


def _taken(rows: Tensor, order: Tensor) -> Tensor:
    function: Any = _Taken
    taken: Tensor = function.apply(rows, order)
    return taken


def _exchanged(rows: Tensor, axis: RoutingAxis, sent: list[int], received: list[int]) -> Tensor:
    function: Any = _Exchanged
    exchanged: Tensor = function.apply(rows, axis, sent, received)
    return exchanged


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all groups in one kernel: of bf16 on GPUs of compute capability 8.0 or more."""
    if not rows.is_cuda or rows.dtype != torch.bfloat16 or torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    return all(size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in (rows.shape[1], weight.shape[2]))
