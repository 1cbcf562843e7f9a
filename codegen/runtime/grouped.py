"""Layers of experts (experts.py) in programs with kernels: one kernel multiplies the rows of all experts.

Which one, by what a rank meets when it runs:

    bf16, whole 16 bytes, compute capability 9.x or 10.x    torch.nn.functional.grouped_mm
    other fp32, bf16 and fp16 on GPUs                       kernels/grouped_linear.py
    fp64, no rows, no GPU, no Triton                        a product for each expert

Where torch has one kernel, that is CUTLASS's with tensor copies in flight while others are multiplied
(aten/src/ATen/native/cuda/GroupMM.cu), which ours can at best reach. Where it has none, it has a product for each
expert, all of which wait until the host knows the ends. Ours never waits, whatever the ends are. Nothing of this was
measured.
"""

from __future__ import annotations

from torch import Tensor

from ..kernels.dispatch import use_triton
from ..kernels.grouped_linear import grouped_linear
from . import experts


def expert_linear(rows: Tensor, weight: Tensor, routes: experts.Routes, bias: Tensor | None = None) -> Tensor:
    """experts.expert_linear: dispatched rows [M, A], weight [E / n, A, B], bias [E / n, B] -> [M, B]."""
    if experts.has_grouped_product(rows, weight) or not use_triton(rows, weight, bias):
        return experts.expert_linear(rows, weight, routes, bias)
    return grouped_linear(rows, weight, routes.ends, bias)
