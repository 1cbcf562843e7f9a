"""Runs of calls that one kernel does: patterns by family, and the one place that finds and replaces them.

A pattern (template.py) is a small tree of calls over the lowered program. What it replaces are calls of one rank on
local tensors by one call with the same local result, so fusing never changes which ranks hold what; a reshard is no
call, hence never inside a pattern. It is done (match.py, rewrite.py) where

- every intermediate is read inside the pattern only (not by other statements, not returned, not carried on by a loop),
  unless the kernel makes it too; then nothing reads it before the pattern's last call,
- what the pattern reads still has the same value where its last call stands, which is where the fused call goes,
- no call of the pattern is corrected for sharding (`divisor` 1: the normalised dim of a mean is whole),
- shapes and dtypes (`Var.type`) are those that the kernel is for,
- it pays for the rows that a rank has.

All other statements keep their order.

residual.py, norms.py, rotary.py, activations.py, losses.py    the patterns

An earlier pattern goes before a later one that shares calls with it (PATTERNS): an addition is the dropout's before it,
which spares the mask and its making, then the norm's after it, which spares one reading of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from codegen.axis_records import AXES
from codegen.fusion import activations, losses, norms, residual, rotary
from codegen.fusion.match import Match, matches
from codegen.fusion.rewrite import chosen, replaced
from codegen.fusion.template import Pattern
from codegen.program import ModuleClass, Program

PATTERNS: Final[tuple[Pattern, ...]] = (
    *residual.PATTERNS,
    *norms.PATTERNS,
    *rotary.PATTERNS,
    *activations.PATTERNS,
    *losses.PATTERNS,
)

KERNELS: Final[Mapping[str, Pattern]] = {
    pattern.target: pattern for pattern in PATTERNS if pattern.target.startswith("kernels.")
}
"""One pattern of every kernel, by its target: all patterns of a kernel have the same record, but for the calls."""

__all__ = ["KERNELS", "PATTERNS", "Match", "Pattern", "fuse", "matches"]


def fuse(program: Program) -> Program:
    """The program with every run of calls that a pattern matches replaced, in all classes; where two patterns' matches
    share calls, the earlier pattern's."""
    sizes = zip(program.axes, program.axis_sizes, strict=True)
    num_token_ranks = math.prod(size for axis, size in sizes if AXES[axis].cuts_tokens)

    def fused(cls: ModuleClass) -> ModuleClass:
        fusions = chosen(matches(PATTERNS, cls.body, cls.outputs), num_token_ranks)
        return replace(cls, body=replaced(cls.body, fusions))

    return replace(program, layers=tuple(map(fused, program.layers)), root=fused(program.root))
