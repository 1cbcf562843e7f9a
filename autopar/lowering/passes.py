"""The passes over a lowered program, each from Program to Program, in their order.

What is emitted goes through them (assembly.py), and so does what is priced (autopar/costs/emitted.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from codegen.async_tp import with_async_tp
from codegen.fp8 import in_fp8
from codegen.fusion import fuse
from codegen.grouped import with_grouped_experts
from codegen.once_per_node import Neighbours, with_rows_once_per_node
from codegen.overlap import overlap
from codegen.program import Program

Pass = Callable[[Program], Program]


def passes(
    *,
    fused: bool = False,
    fp8: bool = False,
    asynchronous: bool = False,
    overlapped: bool = False,
    neighbours: Neighbours | None = None,
) -> tuple[Pass, ...]:
    """The passes of a program.

    fused: Triton kernels in place of runs of calls and for layers of experts, for the update and for the gradient's
    norm. fp8: linear layers of layer classes multiply in e4m3. asynchronous: products run beside the collectives before
    and after them. overlapped: sums over ranks of backward run beside weight gradients, of calls that no kernel has.
    neighbours: where rows of experts cross between nodes once per node.
    """
    by_node = () if neighbours is None else (partial(with_rows_once_per_node, neighbours=neighbours),)
    wanted = ((fused, _with_kernels), (fp8, in_fp8), (asynchronous, with_async_tp), (overlapped, overlap))
    return (*by_node, *(each for is_wanted, each in wanted if is_wanted))


def _with_kernels(program: Program) -> Program:
    return replace(with_grouped_experts(fuse(program)), kernels=True)
