"""Layers of a mixture of experts: each row is multiplied by the matrix of the expert that it was sent to.

Shapes: N rows (tokens times choices), E experts, A features in, B features out. Over an axis of n ranks, each with N
rows and E / n experts, rows travel to the rank that has their expert, are multiplied there, and travel back; M of them
arrive at a rank, which depends on the data and may be none or n N. Several layers in a row share one way there and one
back: between `dispatch` and `combine` may be anything that does with each row the same and by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .captured import refuse_capture

ALIGNMENT_BYTES = 16
"""What rows and matrices are aligned to for torch's grouped product."""


class RoutingAxis(Protocol):
    """The parts of a mesh axis (`mesh.Axis`) that are needed here."""

    @property
    def size(self) -> int: ...
    def exchange_parts(self, parts: Tensor) -> Tensor: ...
    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor: ...


class Permutation(NamedTuple):
    """An order of rows. order: at each place the row that goes there. inverse: for each row its place."""

    order: Tensor
    inverse: Tensor

    @property
    def reversed(self) -> Permutation:
        """The permutation that undoes this one."""
        return Permutation(self.inverse, self.order)


def sorted_ids(ids: Tensor, num_ids: int) -> tuple[Permutation, Tensor]:
    """The stable order that sorts ids [N] from 0 to num_ids - 1, and for each id the number of rows that it and those
    before it have, int32 [num_ids]."""
    ascending, order = ids.sort(stable=True)
    numbers = torch.arange(max(len(ids), num_ids), device=ids.device)
    ends = torch.searchsorted(ascending, numbers[:num_ids].to(ids.dtype), right=True, out_int32=True)
    return Permutation(order, torch.empty_like(order).scatter_(0, order, numbers[: len(ids)])), ends


def row_counts(ends: Tensor) -> Tensor:
    """For each id the number of its rows, of the numbers `sorted_ids` returns."""
    return ends.diff(prepend=ends.new_zeros(1))


def joined_runs(lengths: Tensor, num_rows: int) -> Permutation:
    """The order that joins the runs of each expert. Rows come as runs, of one rank and expert each: lengths [ranks,
    experts], num_rows in all. They leave by expert, and by rank within it."""

    def starts(counts: Tensor) -> Tensor:
        return (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)

    places, shifts = torch.arange(num_rows, device=lengths.device), starts(lengths) - starts(lengths.t()).t()
    order, inverse = (
        places + sign * shift.flatten().repeat_interleave(runs.flatten(), output_size=num_rows)
        for sign, shift, runs in ((1, shifts.t(), lengths.t()), (-1, shifts, lengths))
    )
    return Permutation(order, inverse)


class Routes:
    """The ways of rows to their experts: sorted by expert, on the rank of `axis` that has it.

    experts [N]: each row's, from 0 to num_experts - 1. Every rank of the axis must make the same calls. Reads the
    numbers of rows on the host where rows travel. sort: as `sorted_ids`.

    by_expert: the order of this rank's rows. arranged: of the rows that arrive, None where none travel. ends: for each
    expert of this rank the number of arranged rows that it and those before it have, int32.
    """

    sort: Callable[[Tensor, int], tuple[Permutation, Tensor]] = staticmethod(sorted_ids)

    def __init__(self, experts: Tensor, num_experts: int, axis: RoutingAxis | None = None) -> None:
        self.axis = axis if axis is not None and axis.size > 1 else None
        self.by_expert, self.ends = self.sort(experts, num_experts)
        self.arranged: Permutation | None = None
        if self.axis is not None:
            leaving = row_counts(self.ends).view(self.axis.size, -1)
            arriving = self.axis.exchange_parts(leaving)
            refuse_capture("the exchange of experts' rows")
            self.sent, self.received = torch.stack([leaving.sum(1), arriving.sum(1)]).tolist()
            self.arranged = joined_runs(arriving, sum(self.received))
            self.ends = arriving.sum(0).cumsum(0, dtype=torch.int32)

    def arriving(self, rows: Tensor) -> Tensor:
        """[N, ...] of this rank sorted by expert -> [M, ...] of all ranks, those of this rank's experts."""
        if self.axis is None or self.arranged is None:
            return rows
        return taken(exchanged(rows, self.axis, self.sent, self.received), self.arranged)

    def returning(self, rows: Tensor) -> Tensor:
        """[M, ...] -> [N, ...]: what `arriving` did, undone."""
        if self.axis is None or self.arranged is None:
            return rows
        return exchanged(taken(rows, self.arranged.reversed), self.axis, self.received, self.sent)


def dispatch(rows: Tensor, routes: Routes, choices: int = 1) -> Tensor:
    """[N / choices, ...] in the order of the tokens -> [M, ...] sorted by expert: of all ranks' rows, those of this
    one's. choices: rows that each token has."""
    return routes.arriving(taken(rows, routes.by_expert, choices))


def combine(rows: Tensor, routes: Routes, weights: Tensor | None = None, choices: int = 1) -> Tensor:
    """[M, B] -> [N / choices, B]: the rows in the order of the tokens, times weights [N, 1], summed for each token."""
    rows = taken(routes.returning(rows), routes.by_expert.reversed)
    if weights is not None:
        rows = rows * weights
    return summed_choices(rows, choices)


def summed_choices(rows: Tensor, choices: int) -> Tensor:
    """[N, ...] -> [N / choices, ...]: the sums of adjacent rows."""
    return rows if choices == 1 else rows.view(len(rows) // choices, choices, *rows.shape[1:]).sum(1)


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
        sizes = [end - start for start, end in itertools.pairwise([0, *routes.ends.tolist()])]
        parts = zip(torch.split(rows, sizes), weight.unbind(), strict=True)
        products = torch.cat([part @ matrix for part, matrix in parts])
    if bias is None:
        return products
    return products + bias.repeat_interleave(row_counts(routes.ends), 0, output_size=len(rows))


class _Taken(torch.autograd.Function):
    """Rows in another order, each as often as it has choices."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.choices = choices
        return rows.index_select(0, order if choices == 1 else order // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return summed_choices(gradient.index_select(0, inverse), ctx.choices), None, None, None


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


def taken(rows: Tensor, permutation: Permutation, choices: int = 1) -> Tensor:
    """rows[order]. choices: how often each row stands before they are ordered."""
    function: Any = _Taken
    result: Tensor = function.apply(rows, *permutation, choices)
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
