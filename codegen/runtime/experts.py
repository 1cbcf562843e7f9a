"""Layers of a mixture of experts: each row is multiplied by the matrix of the expert that it was sent to.

Shapes: N rows (tokens times choices), E experts, A features in, B features out. Over an axis of n ranks, each with N
rows and E / n experts, rows travel to the rank that has their expert, are multiplied there, and travel back; M of them
arrive at a rank, which depends on the data and may be none or n N. Several layers in a row share one way there and one
back: between `dispatch` and `combine` may be anything that does with each row the same and by itself.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Final, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .captured import refuse_capture

ALIGNMENT_BYTES = 16
"""What rows and matrices are aligned to for torch's grouped product."""


class RoutingAxis(Protocol):
    """The parts of a mesh axis (`mesh.Axis`) that are needed here."""

    @property
    def size(self) -> int: ...
    def exchange_parts(self, parts: Tensor) -> Tensor: ...
    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor: ...


class Routes:
    """The ways of rows to their experts: sorted by expert, on the rank of `axis` that has it.

    experts [N]: each row's, from 0 to num_experts - 1. Every rank of the axis must make the same calls. Reads the
    numbers of rows on the host.
    """

    def __init__(self, experts: Tensor, num_experts: int, axis: RoutingAxis | None = None) -> None:
        self.axis = axis if axis is not None and axis.size > 1 else None
        self.order = experts.argsort(stable=True)
        counts = experts.new_zeros(num_experts).index_add_(0, experts, torch.ones_like(experts))
        self.arranged: Tensor | None = None
        if self.axis is not None:
            arriving = self.axis.exchange_parts(counts.view(self.axis.size, -1))
            local_experts = torch.arange(arriving.shape[1], device=experts.device).repeat(self.axis.size)
            refuse_capture("the exchange of experts' rows")
            self.sent, self.received = counts.view(self.axis.size, -1).sum(1).tolist(), arriving.sum(1).tolist()
            came = local_experts.repeat_interleave(arriving.flatten(), output_size=sum(self.received))
            self.arranged = came.argsort(stable=True)
            counts = arriving.sum(0)
        self.counts = counts

    @cached_property
    def ends(self) -> Tensor:
        """For each expert of this rank the number of arranged rows that it and those before it have, int32."""
        return self.counts.cumsum(0, dtype=torch.int32)


def dispatch(rows: Tensor, routes: Routes) -> Tensor:
    """[N, ...] in the order of the tokens -> [M, ...] sorted by expert: of all ranks' rows, those of this one's."""
    rows = taken(rows, routes.order)
    if routes.axis is None or routes.arranged is None:
        return rows
    return taken(exchanged(rows, routes.axis, routes.sent, routes.received), routes.arranged)


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """[M, ...] -> [N, ...]: what `dispatch` did, undone."""
    if routes.axis is not None and routes.arranged is not None:
        rows = taken(rows, routes.arranged.argsort())
        rows = exchanged(rows, routes.axis, routes.received, routes.sent)
    return taken(rows, routes.order.argsort())


SAVED: Final = ((0, 1, 2), False, 8)
"""What autograd keeps: (positions of arguments, whether the result, bytes per row of the first argument): sorted rows,
weight, routes, and the order of rows on their way there or back."""


def expert_linear(rows: Tensor, weight: Tensor, routes: Routes, bias: Tensor | None = None) -> Tensor:
    """Dispatched rows [M, A], weight [E / n, A, B], bias [E / n, B] -> [M, B]: each row times its expert's matrix, plus
    its expert's bias.

    An expert without a row gets a gradient of zeros.
    """
    if has_grouped_product(rows, weight):
        products = F.grouped_mm(rows, weight, offs=routes.ends)
    else:
        refuse_capture("a product per expert")
        parts = zip(torch.split(rows, routes.counts.tolist()), weight.unbind(), strict=True)
        products = torch.cat([part @ matrix for part, matrix in parts])
    return products if bias is None else products + bias.repeat_interleave(routes.counts, 0, output_size=len(rows))


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


def taken(rows: Tensor, order: Tensor) -> Tensor:
    """rows[order], for a permutation."""
    function: Any = _Taken
    result: Tensor = function.apply(rows, order)
    return result


def exchanged(rows: Tensor, axis: RoutingAxis, sent: list[int], received: list[int]) -> Tensor:
    """Rows to other ranks of the axis, as `RoutingAxis.exchange_rows`; backward their gradients return."""
    function: Any = _Exchanged
    result: Tensor = function.apply(rows, axis, sent, received)
    return result


def has_grouped_product(rows: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies all groups in one kernel: bf16 on GPUs of compute capability 9.x and 10.x. On others its
    grouped_mm waits for the ends, for a product per group (aten/src/ATen/native/GroupedMMUtils.h)."""
    is_gpu = rows.is_cuda and torch.version.hip is None and rows.numel() > 0
    if not is_gpu or not rows.dtype == weight.dtype == torch.bfloat16:
        return False
    sizes = (rows.shape[1], weight.shape[2])
    fits = all(size * rows.element_size() % ALIGNMENT_BYTES == 0 for size in sizes) and all(
        map(_is_aligned, (rows, weight))
    )
    return fits and torch.cuda.get_device_capability(rows.device)[0] in (9, 10)


def _is_aligned(matrices: Tensor) -> bool:
    """Whether rows, or columns, lie in one piece each and begin where torch's grouped product wants them."""
    near, far = sorted(matrices.stride()[-2:])
    begins = (matrices.data_ptr(), far * matrices.element_size())
    return near == 1 and all(begin % ALIGNMENT_BYTES == 0 for begin in begins)
