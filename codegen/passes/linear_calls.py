"""Linear layers with stored weights among the calls of a body, and those of them that are all readers of a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from codegen.fusion.match import Flow
from codegen.fusion.template import VIEWS
from codegen.program import Call, Statement, TensorType, Var

LINEAR: Final = "aten.linear.default"
ADDMM: Final = "aten.addmm.default"


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer. weight: stored; [in, out] for torch.addmm, [out, in] for F.linear. bias: None without one."""

    call: Call
    x: Var
    weight: Var
    bias: Any

    @property
    def is_addmm(self) -> bool:
        return self.call.target == ADDMM


@dataclass(frozen=True, slots=True)
class Readers:
    """Layers that become one call.

    x: what they read. calls: their positions, the first of which is the call's. view: the position of the statement
    that flattens x for them, -1 if none does.
    """

    x: Var
    calls: tuple[int, ...]
    layers: tuple[Layer, ...]
    view: int = -1

    @property
    def gone(self) -> frozenset[int]:
        """Positions of what the call makes superfluous."""
        return frozenset((*self.calls[1:], *((self.view,) if self.view >= 0 else ())))


def layer_of(statement: Statement | None) -> Layer | None:
    """The statement as a linear layer, whose gradients are not deferred; None if it is none."""
    if not isinstance(statement, Call) or statement.kwargs or statement.divisor != 1 or len(statement.results) != 1:
        return None
    if statement.target == ADDMM and len(statement.args) == 3:
        bias, x, weight = statement.args
    elif statement.target == LINEAR and len(statement.args) in (2, 3):
        x, weight, bias = (*statement.args, None)[:3]
    else:
        return None
    return Layer(statement, x, weight, bias) if isinstance(x, Var) and is_stored(weight) else None


def is_stored(value: Any) -> bool:
    """Whether an argument is a parameter or buffer."""
    return isinstance(value, Var) and value.is_stored


def readers_of(x: Var, maker: int, flow: Flow) -> Readers | None:
    """The layers that are all that reads x, if they may be one call; torch.addmm only alone. made: by that statement,
    -1 for what no statement makes."""
    read, view = x, -1
    calls = flow.readers.get((maker, x.name), frozenset())
    if len(calls) == 1:
        (only,) = calls
        flattened = _flattened(only, flow)
        if flattened is not None:
            read, view, calls = flattened, only, flow.readers.get((only, flattened.name), frozenset())
    order = tuple(sorted(calls))
    layers = tuple(layer for i in order if (layer := _reader(i, read, flow)) is not None)
    if not layers or len(layers) < len(order) or any(layer.is_addmm for layer in layers) and len(layers) > 1:
        return None
    if view >= 0 and not layers[0].is_addmm:
        return None
    first = order[0]
    holds = flow.value_at(x.name, first, frozenset((view,))) == maker
    may_move = all(flow.may_move(i, first) for i in order[1:])
    return Readers(x, order, layers, view) if holds and may_move else None


def as_one(layers: Sequence[Layer], target: str) -> Call:
    """One call of `target` for layers of one x: x, all weights and, if there are any, all biases -> all results."""
    first = layers[0]
    weights, biases = tuple(layer.weight for layer in layers), tuple(layer.bias for layer in layers)
    more = (biases,) if any(bias is not None for bias in biases) else ()
    results = tuple(layer.call.results[0] for layer in layers)
    members = tuple(layer.call for layer in layers)
    return replace(first.call, target=target, args=(first.x, weights, *more), results=results, members=members)


def _reader(index: int, read: Var, flow: Flow) -> Layer | None:
    layer = layer_of(flow.body[index] if index < len(flow.body) else None)
    if layer is None or layer.x != read:
        return None
    return layer if layer.bias is None or is_stored(layer.bias) else None


def view_of(statement: Statement | None) -> tuple[TensorType, tuple[Any, ...]] | None:
    """Return the operand of a view and its sizes; None for other statements."""
    if not isinstance(statement, Call) or statement.target not in VIEWS or statement.kwargs or statement.divisor != 1:
        return None
    x, sizes = (*statement.args, None, None)[:2]
    return (x.type, sizes) if isinstance(x, Var) and isinstance(sizes, tuple) else None


def _flattened(index: int, flow: Flow) -> Var | None:
    """The result of a statement that is x as a matrix of its rows; None for any other."""
    statement = flow.body[index] if index < len(flow.body) else None
    view = view_of(statement)
    if view is None or not isinstance(statement, Call):
        return None
    operand_type, sizes = view
    return statement.results[0] if len(sizes) == 2 and sizes[1] == operand_type.shape[-1] else None
