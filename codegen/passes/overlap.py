"""Reshards whose backward runs beside the weight gradients of the linear layers that read them.

A column-parallel linear layer reads the result of a reshard to Rp, whose backward sums over the axis. Where linear
layers are all that reads it, they become one call of `codegen/runtime/overlapped.py`, which starts that sum as soon as
it has x's gradient:

    x = tp.all_gather(x, dim=1)                    x = tp.all_gather(x, dim=1)
    q = F.linear(x, self.q.weight)                 q, k = overlapped.linears(x, (self.q.weight, self.k.weight))
    k = F.linear(x, self.k.weight)

The call stands where the first of them stood. Layers whose weights are computed in forward stay as they are, and so do
those whose weight gradients are deferred (`deferred.linear`), which leaves nothing to hide a sum behind. torch.addmm,
of the rows of x as a matrix, is joined alone.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.fusion.match import Flow
from codegen.passes.linear_calls import Readers, as_one, readers_of
from codegen.program import Call, ModuleClass, Program, Reshard, Statement


def overlap(program: Program) -> Program:
    """The program with every such reshard's linear layers joined, in all classes."""
    layers = tuple(_overlap_class(cls) for cls in program.layers)
    return replace(program, layers=layers, root=_overlap_class(program.root))


def sums_backward(reshard: Reshard) -> bool:
    """Whether it is a reshard to Rp, whose backward sums over the axis."""
    return reshard.result.type.placement(reshard.axis) == "Rp"


def joined(readers: Readers) -> Call:
    """The call of `overlapped` that stands for the layers."""
    layers = readers.layers
    first = layers[0]
    if first.is_addmm:
        return replace(first.call, target="overlapped.addmm", args=(first.bias, readers.x, first.weight))
    if len(layers) == 1:
        return replace(first.call, target="overlapped.linear")
    return as_one(layers, "overlapped.linears")


def _overlap_class(cls: ModuleClass) -> ModuleClass:
    flow = Flow.of(cls.body, cls.outputs)
    body: list[Statement | None] = list(cls.body)
    for index, statement in enumerate(cls.body):
        if not isinstance(statement, Reshard) or not sums_backward(statement):
            continue
        readers = readers_of(statement.result, index, flow)
        if readers is not None:
            for gone in readers.gone:
                body[gone] = None
            body[readers.calls[0]] = joined(readers)
    return replace(cls, body=tuple(statement for statement in body if statement is not None))
