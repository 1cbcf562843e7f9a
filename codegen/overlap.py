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
from dataclasses import dataclass, replace
from typing import Any, Final

from codegen.fusion.match import Flow
from codegen.program import Call, ModuleClass, Program, Reshard, Statement, Var

SUMMED_BACKWARD: Final[Mapping[str, frozenset[tuple[str, Any]]]] = {
    "for_use": frozenset(),
    "all_gather": frozenset(),
    "all_reduce": frozenset({("grad", "partial")}),
}
"""Methods of an axis that end in Rp -> the arguments that make them, beside dims."""

LINEAR: Final = "aten.linear.default"
ADDMM: Final = "aten.addmm.default"
VIEWS: Final = ("aten.view.default", "aten.reshape.default")


@dataclass(frozen=True, slots=True)
class _Readers:
    """Calls that become one. x: what they read; view: the statement that flattens it for them, -1 if none does."""

    x: Var
    calls: tuple[int, ...]
    view: int = -1


def overlap(program: Program) -> Program:
    """The program with every such reshard's linear layers joined, in all classes."""
    layers = tuple(_overlap_class(cls) for cls in program.layers)
    return replace(program, layers=layers, root=_overlap_class(program.root))


def _overlap_class(cls: ModuleClass) -> ModuleClass:
    flow = Flow.of(cls.body, cls.outputs)
    found = (_readers(index, flow) for index in range(len(cls.body)))
    body: list[Statement | None] = list(cls.body)
    for readers in found:
        if readers is not None:
            for index in (readers.view, *readers.calls[1:]):
                if index >= 0:
                    body[index] = None
            body[readers.calls[0]] = _joined(readers, cls.body)
    return replace(cls, body=tuple(statement for statement in body if statement is not None))


def _readers(index: int, flow: Flow) -> _Readers | None:
    """The linear layers that are all that reads the reshard at `index`, if they may be one call."""
    reshard = flow.body[index]
    if not isinstance(reshard, Reshard) or not _sums_backward(reshard):
        return None
    name, calls = reshard.result, flow.readers.get((index, reshard.result), frozenset())
    view = -1
    if len(calls) == 1:
        (only,) = calls
        if _flattens(only, flow):
            view, calls = only, flow.readers.get((only, _call(only, flow).results[0]), frozenset())
    readers = _Readers(Var(name), tuple(sorted(calls)), view)
    if not calls or not all(_is_layer(i, readers, flow) for i in readers.calls):
        return None
    first = readers.calls[0]
    holds = flow.value_at(name, first, frozenset((view,))) == index
    return readers if holds and all(_may_move(i, first, flow) for i in readers.calls[1:]) else None


def _sums_backward(reshard: Reshard) -> bool:
    wanted = SUMMED_BACKWARD.get(reshard.method)
    return wanted is not None and wanted == {pair for pair in reshard.kwargs if pair[0] not in ("dim", "sections")}


def _call(index: int, flow: Flow) -> Call:
    call = flow.body[index]
    assert isinstance(call, Call)
    return call


def _flattens(index: int, flow: Flow) -> bool:
    """Whether a statement is x as a matrix of its rows."""
    call = flow.body[index] if index < len(flow.body) else None
    if not isinstance(call, Call) or call.target not in VIEWS or call.kwargs or len(call.args) != 2:
        return False
    x, sizes = call.args
    held = dict(call.operands).get(x.name) if isinstance(x, Var) else None
    return held is not None and isinstance(sizes, tuple) and len(sizes) == 2 and sizes[1] == held.shape[-1]


def _is_layer(index: int, readers: _Readers, flow: Flow) -> bool:
    """Whether a statement is a layer with stored weights that reads x as its input."""
    call = flow.body[index] if index < len(flow.body) else None
    if not isinstance(call, Call) or call.kwargs or call.divisor != 1 or len(call.results) != 1:
        return False
    if call.target == ADDMM and len(call.args) == 3:
        bias, x, weight = call.args
        fits = len(readers.calls) == 1
    elif call.target == LINEAR and len(call.args) in (2, 3):
        x, weight, bias = (*call.args, None)[:3]
        fits = readers.view < 0
    else:
        return False
    read = _call(readers.view, flow).results[0] if readers.view >= 0 else readers.x.name
    stored = [value for value in (weight, bias) if value is not None]
    return fits and x == Var(read) and all(_is_stored(value) for value in stored)


def _is_stored(value: Any) -> bool:
    return isinstance(value, Var) and value.name.startswith("self.")


def _may_move(index: int, to: int, flow: Flow) -> bool:
    """Whether a call's result may have its name from `to` on."""
    (result,) = _call(index, flow).results
    between = range(to, index)
    return not any(result in flow.origins[i] or i in flow.assigned[result] for i in between)


def _joined(readers: _Readers, body: tuple[Statement, ...]) -> Call:
    calls = [call for index in readers.calls if isinstance(call := body[index], Call)]
    first = calls[0]
    operands = dict(pair for call in calls for pair in call.operands)
    if first.target == ADDMM:
        view = body[readers.view] if readers.view >= 0 else None
        if isinstance(view, Call):
            operands = {n: held for n, held in operands.items() if n.startswith("self.")} | dict(view.operands)
        bias, _, weight = first.args
        joined = replace(first, target="overlapped.addmm", args=(bias, readers.x, weight))
    elif len(calls) == 1:
        joined = replace(first, target="overlapped.linear")
    else:
        weights = tuple(call.args[1] for call in calls)
        biases = tuple(call.args[2] if len(call.args) > 2 else None for call in calls)
        more = (biases,) if any(bias is not None for bias in biases) else ()
        results = tuple(call.results[0] for call in calls)
        joined = replace(first, target="overlapped.linears", args=(readers.x, weights, *more), results=results)
    return replace(joined, operands=tuple(operands.items()))
