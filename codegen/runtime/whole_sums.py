"""Sums over all micro-batches of a step, in forwards of which each has one of them.

A step of a program that needs such sums runs the forwards of all micro-batches twice: first without gradients, when the
sums are found, then as any other step does, when they are known. Nothing else is left of the first pass
(`Part.first_pass`). Masks of dropout are the same in both, since they are functions of counters; a layer whose forward
runs again in backward finds the sums where they were.

On every rank the sum is of what that rank has of the tensor, and lies on the mesh as the tensor does: whole, in shards,
or as a partial sum, which is completed where it is read.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from .mesh import Mesh
from .parameters import Module
from .rng_state import RngState

SUMMING_ATTRIBUTES = ("_sums", "_is_first_pass")
"""What a `SummingModule` holds beside what any module does."""


class SummingModule(Module):
    """Base of generated classes whose forward reads sums over all micro-batches."""

    needs_first_pass: ClassVar[bool] = True

    def __init__(self, mesh: Mesh, rng: RngState | None = None, path: str = "", layer_index: int = 0) -> None:
        # Not by __setattr__, which wants modules for what a user calls alike.
        self.__dict__.update(dict.fromkeys(SUMMING_ATTRIBUTES))
        super().__init__(mesh, rng, path, layer_index)
        self._sums: dict[int, tuple[Tensor, int]] = {}
        self._is_first_pass = False

    def begin_first_pass(self) -> None:
        self._sums, self._is_first_pass = {}, True

    def end_first_pass(self) -> None:
        self._is_first_pass = False

    def whole_sum(self, x: Tensor, number: int) -> Tensor:
        """The sum of x over the step's m micro-batches; its gradient is that of this micro-batch's x, times m.

        So the mean of gradients over the micro-batches, which a step takes, is that of the sum. In the first pass x as
        it is. number: of the sum in this module. Half precision is added up in fp32, in which a number of fp16 stays:
        m of them would overflow m times before their mean does.
        """
        if self._is_first_pass:
            wide = x.detach().float() if x.dtype in (torch.bfloat16, torch.float16) else x.detach()
            whole, count = self._sums.get(number, (torch.zeros_like(wide), 0))
            self._sums[number] = whole + wide, count + 1
            return x
        whole, count = self._sums[number]
        whole = whole.to(x.dtype) if x.ndim or x.dtype != torch.float16 else whole
        return torch.add(whole, x - x.detach(), alpha=count) if x.requires_grad else whole
