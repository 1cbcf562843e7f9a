"""Layers of experts (experts.py) in programs with kernels: rows are sorted, multiplied and summed by one kernel each.

Which one, by what a rank meets when it runs:

    what rows                         kernel                                                  elsewhere
    sort by expert                    kernels/counting_sort.py, on GPUs                       torch.sort
    multiply, in bf16, whole 16       torch.nn.functional.grouped_mm,                         a product for each expert
        bytes                             compute capability 9.x or 10.x
    multiply, otherwise               kernels/grouped_linear.py, fp32, bf16, fp16 on GPUs     a product for each expert
    sum by token, both ways           kernels/token_sums.py, fp32, bf16, fp16 on GPUs         torch's calls

Where torch has one kernel for products, that is CUTLASS's with tensor copies in flight while others are multiplied
(aten/src/ATen/native/cuda/GroupMM.cu), which ours can at best reach. Where it has none, it has a product for each
expert, all of which wait until the host knows the ends. Ours never waits, whatever the ends are. Nothing of this was
measured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.counting_sort import counting_sort
from ..kernels.dispatch import use_triton
from ..kernels.grouped_linear import grouped_linear
from ..kernels.token_sums import token_sums
from . import experts
from .experts import Permutation


def sorted_ids(ids: Tensor, num_ids: int) -> tuple[Permutation, Tensor]:
    """experts.sorted_ids: (order of rows, ends of ids)."""
    order, inverse, ends = counting_sort(ids, num_ids)
    return Permutation(order, inverse), ends


class Routes(experts.Routes):
    """experts.Routes, whose rows are sorted by a kernel."""

    sort = staticmethod(sorted_ids)


def dispatch(rows: Tensor, routes: Routes, choices: int = 1) -> Tensor:
    """experts.dispatch: [N / choices, ...] -> [M, ...]."""
    if choices == 1 or rows.dim() != 2 or not use_triton(rows):
        return experts.dispatch(rows, routes, choices)
    function: Any = _Copied
    return routes.arriving(function.apply(rows, *routes.by_expert, choices))


def combine(rows: Tensor, routes: Routes, weights: Tensor | None = None, choices: int = 1) -> Tensor:
    """experts.combine: [M, B], weights [N, 1] -> [N / choices, B]."""
    if choices == 1 or rows.dim() != 2:
        return experts.combine(rows, routes, weights, choices)
    order, places = routes.by_expert
    return token_sums(routes.returning(rows), places, order, choices, weights)


def expert_linear(rows: Tensor, weight: Tensor, routes: experts.Routes, bias: Tensor | None = None) -> Tensor:
    """experts.expert_linear: dispatched rows [M, A], weight [E / n, A, B], bias [E / n, B] -> [M, B]."""
    if experts.has_grouped_product(rows, weight) or not use_triton(rows, weight, bias):
        return experts.expert_linear(rows, weight, routes, bias)
    return grouped_linear(rows, weight, routes.ends, bias)


class _Copied(torch.autograd.Function):
    """tokens[order // choices], whose gradient one kernel sums by token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, places: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order, places)
        ctx.choices = choices
        return tokens.index_select(0, order // choices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        order, places = ctx.saved_tensors
        return token_sums(gradient, places, order, ctx.choices), None, None, None
