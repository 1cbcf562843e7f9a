"""Reshards whose backward runs beside the weight gradients of the linear layers that read them.

A column-parallel linear layer reads the result of a reshard to Rp, whose backward sums over the axis. Where linear
layers are all that reads it, they become one call of `codegen/runtime/overlapped.py`, which starts that sum as soon as
it has x's gradient:

    x = tp.all_gather(x, dim=1)                    x = tp.all_gather(x, dim=1)
    q = F.linear(x, self.q.weight)                 q, k = overlapped.linears(x, (self.q.weight, self.k.weight))
    k = F.linear(x, self.k.weight)

The call stands where the first of them stood. Layers whose weights are computed in forward stay as they are, and so do
those whose weight gradients are put off (`deferred.linear`), which leaves nothing to hide a sum behind. torch.addmm, of
the rows of x as a matrix, is joined alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from codegen.fusion.match import Flow
from codegen.linear_calls import Readers, as_one, operands_of, readers_of
from codegen.program import Call, ModuleClass, Program, Reshard, Statement

SUMMED_BACKWARD: Final[Mapping[str, frozenset[tuple[str, Any]]]] = {
    "for_use": frozenset(),
    "all_gather": frozenset(),
    "all_reduce": frozenset({("grad", "partial")}),
}
"""Methods of an axis that end in Rp -> the arguments that make them, beside dims."""


def overlap(program: Program) -> Program:
    """The program with every such reshard's linear layers joined, in all classes."""
    layers = tuple(_overlap_class(cls) for cls in program.layers)
    return replace(program, layers=layers, root=_overlap_class(program.root))


def sums_backward(statement: Statement) -> bool:
    """Whether a statement is a reshard to Rp, whose backward sums over the axis."""
    wanted = SUMMED_BACKWARD.get(statement.method) if isinstance(statement, Reshard) else None
    if wanted is None or not isinstance(statement, Reshard):
        return False
    return wanted == {pair for pair in statement.kwargs if pair[0] not in ("dim", "sections")}


def joined(readers: Readers, body: tuple[Statement, ...]) -> Call:
    """The call of `overlapped` that stands for the layers."""
    layers = readers.layers
    first, operands = layers[0], tuple(operands_of(readers, body).items())
    call = replace(first.call, operands=operands)
    if first.is_addmm:
        return replace(call, target="overlapped.addmm", args=(first.bias, readers.x, first.weight))
    if len(layers) == 1:
        return replace(call, target="overlapped.linear")
    return as_one(layers, "overlapped.linears")


def _overlap_class(cls: ModuleClass) -> ModuleClass:
    flow = Flow.of(cls.body, cls.outputs)
    body: list[Statement | None] = list(cls.body)
    for index, statement in enumerate(cls.body):
        readers = readers_of(index, flow) if sums_backward(statement) else None
        if readers is not None:
            for gone in readers.gone:
                body[gone] = None
            body[readers.calls[0]] = joined(readers, cls.body)
    return replace(cls, body=tuple(statement for statement in body if statement is not None))
