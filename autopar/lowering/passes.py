"""The passes over a lowered program, each from Program to Program, in order.

Emitted programs (assembly.py) and priced ones (autopar/costs/emitted.py) go through the same passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from codegen.fusion import fuse
from codegen.passes.async_tp import with_async_tp
from codegen.passes.channels_last import with_channels_last
from codegen.passes.fp8 import in_fp8
from codegen.passes.grouped_experts import with_grouped_experts
from codegen.passes.once_per_node import Neighbors, with_rows_once_per_node
from codegen.passes.overlap import overlap
from codegen.passes.packed_gates import with_packed_gates
from codegen.passes.token_rows import with_token_rows
from codegen.program import Program

Pass = Callable[[Program], Program]


def passes(
    *,
    fused: bool = False,
    fp8: bool = False,
    asynchronous: bool = False,
    overlapped: bool = False,
    neighbors: Neighbors | None = None,
) -> tuple[Pass, ...]:
    """Return the passes of a program.

    fused: Triton kernels replace runs of calls, layers of experts, the update and the gradient's norm; convolutions
    with batch norms run channels_last. fp8: linear layers of layer classes multiply in e4m3. asynchronous: products run
    concurrently with the collectives before and after them. overlapped: backward's sums over ranks run concurrently
    with weight gradients, for calls without a kernel. neighbors: the cases in which rows of experts cross between nodes
    once per node. Where they do not, layers of experts take tokens and return sums by token in all programs.
    """
    by_node = () if neighbors is None else (partial(with_rows_once_per_node, neighbors=neighbors),)
    optional = ((fused, _with_kernels), (fp8, in_fp8), (asynchronous, with_async_tp), (overlapped, overlap))
    return (*by_node, with_token_rows, *(rewrite for is_wanted, rewrite in optional if is_wanted))


def _with_kernels(program: Program) -> Program:
    packed = with_packed_gates(fuse(program))
    return replace(with_channels_last(with_grouped_experts(packed)), kernels=True)
