"""Activations of a gate times what it gates (kernels/swiglu.py, geglu.py) whose operands are halves of one tensor.

    gate, up = F.linear(x, self.gate_up_proj).chunk(2, -1)
    y = swiglu(gate, up)                                     y = swiglu(F.linear(x, self.gate_up_proj))

The kernel reads both halves where they are, and writes their gradients into one tensor. Autograd would join two. Where
something else reads a half, both calls stay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from codegen.fusion.match import Flow
from codegen.program import Call, ModuleClass, Program, Statement, Var

GATED: Final = ("kernels.swiglu", "kernels.geglu")


def with_packed_gates(program: Program) -> Program:
    """The program with such calls joined, in all classes."""
    return replace(program, layers=tuple(map(_rewritten, program.layers)), root=_rewritten(program.root))


def _rewritten(cls: ModuleClass) -> ModuleClass:
    flow = Flow.of(cls.body, cls.outputs)
    body: list[Statement | None] = list(cls.body)
    for position in (index for target in GATED for index in flow.calls.get(target, ())):
        halves = _halves(flow, position)
        if halves is not None:
            cut, call = flow.body[halves], flow.body[position]
            assert isinstance(cut, Call) and isinstance(call, Call)
            body[position] = replace(call, args=(cut.args[0], *call.args[2:]), members=(cut, call))
            body[halves] = None
    return replace(cls, body=tuple(statement for statement in body if statement is not None))


def _halves(flow: Flow, position: int) -> int | None:
    """The statement that cuts a tensor into the two operands of the call at `position`, for this call alone."""
    call = flow.body[position]
    assert isinstance(call, Call)
    operands = call.args[:2]
    if len(operands) < 2 or not all(isinstance(operand, Var) for operand in operands):
        return None
    makers = {flow.origins[position][operand.name] for operand in operands}
    cut = flow.body[min(makers)] if len(makers) == 1 and min(makers) >= 0 else None
    is_cut = isinstance(cut, Call) and cut.target in ("aten.chunk.default", "aten.split.Tensor")
    if not isinstance(cut, Call) or not is_cut or cut.results != operands or cut.kwargs:
        return None
    (maker,), (whole, _, *dim) = makers, cut.args
    rank = len(whole.type.shape)
    is_last = len(dim) == 1 and dim[0] % rank == rank - 1
    readers = frozenset[int]().union(*(flow.readers[maker, operand.name] for operand in operands))
    stays = flow.value_at(whole.name, position, frozenset()) == flow.origins[maker][whole.name]
    has_halves = operands[0].type.shape == operands[1].type.shape
    return maker if is_last and has_halves and readers == {position} and stays else None
