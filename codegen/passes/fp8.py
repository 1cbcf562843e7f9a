"""Linear layers of layer classes multiplied in e4m3 (`codegen/runtime/fp8.py`), where a user asks for it.

    y = F.linear(x, self.up.weight)                     y = fp8.linear(x, self.up.weight)
    y = torch.addmm(self.up.bias, x, self.up.weight)    y = fp8.addmm(self.up.bias, x, self.up.weight)

    q = F.linear(x, self.q.weight)                      q, k = fp8.linears(x, (self.q.weight, self.k.weight))
    k = F.linear(x, self.k.weight)

Of stored weights whose local dims are multiples of MULTIPLE, which the fp8 units want. What stands before and after the
layers (embeddings, head) stays as it is: it is what training in fp8 is most sensitive to. Weight gradients that would
be deferred come at once, with the input's.

Layers of one x (queries, keys, values; gate and up) are one call, which casts x once. It stands where the first of them
stood. Autograd adds up what x's readers give it from the last one to the first, so layers between which something else
reads x are not joined: sums would have other roundings. torch.addmm is not joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from codegen.fusion.match import Flow
from codegen.passes.linear_calls import Layer, as_one, is_stored
from codegen.program import Call, ModuleClass, PipelineProgram, Program, Statement, TensorType, Var
from codegen.runtime.parameters import parse_placement

MULTIPLE: Final = 16

_TARGETS: Final[Mapping[str, str]] = {
    "aten.linear.default": "fp8.linear",
    "deferred.linear": "fp8.linear",
    "aten.addmm.default": "fp8.addmm",
    "deferred.addmm": "fp8.addmm",
}
_WEIGHT: Final[Mapping[str, int]] = {"fp8.linear": 1, "fp8.addmm": 2}
"""Which argument is the weight."""
_JOINED: Final = "fp8.linears"
"""The call of several layers; its second argument is a tuple of weights."""


def in_fp8(program: Program) -> Program:
    """The program with such calls replaced in its layer classes."""
    sizes = dict(zip(program.axes, program.axis_sizes, strict=True))
    rewritten = (
        replace(cls, body=tuple(_statement(statement, cls, sizes) for statement in cls.body)) for cls in program.layers
    )
    layers = tuple(map(_joined, rewritten))
    return replace(program, layers=layers, fp8=True)


def count_calls(program: Program | PipelineProgram) -> int:
    """Products in e4m3 of one forward: of each layer class, times its layers."""
    counts = (
        len(stage.paths(cls.name)) * sum(_num_products(statement) for statement in cls.body)
        for stage in program.programs
        for cls in stage.layers
    )
    return sum(counts)


def _num_products(statement: Statement) -> int:
    if not isinstance(statement, Call):
        return 0
    return len(statement.args[1]) if statement.target == _JOINED else int(statement.target in _WEIGHT)


def _statement(statement: Statement, cls: ModuleClass, sizes: Mapping[str, int]) -> Statement:
    if not isinstance(statement, Call) or statement.target not in _TARGETS or statement.kwargs:
        return statement
    target = _TARGETS[statement.target]
    weight, x = statement.args[_WEIGHT[target]], statement.args[_WEIGHT[target] - 1]
    is_trained = is_stored(weight) and weight.type.tensor[0] in cls.parameters
    fits = is_trained and weight.type.dtype == x.type.dtype and _is_whole(weight.type, sizes)
    return replace(statement, target=target) if fits else statement


def _is_whole(weight: TensorType, sizes: Mapping[str, int]) -> bool:
    """Whether a rank's part of a weight is a matrix of whole multiples."""
    shape = list(weight.shape)
    for axis, text in weight.placements:
        kind, dim, _ = parse_placement(text)
        if kind == "S":
            shape[dim] //= sizes[axis]
    return len(shape) == 2 and all(size % MULTIPLE == 0 for size in shape)


def _joined(cls: ModuleClass) -> ModuleClass:
    """The class with layers of one x as one call."""
    flow = Flow.of(cls.body, cls.outputs)
    body: list[Statement | None] = list(cls.body)
    for calls in _of_one_input(flow):
        linears = (call for index in calls if isinstance(call := cls.body[index], Call))
        layers = [Layer(call, *(*call.args, None)[:3]) for call in linears]
        body[calls[0]] = as_one(layers, _JOINED)
        for index in calls[1:]:
            body[index] = None
    return replace(cls, body=tuple(statement for statement in body if statement is not None))


def _of_one_input(flow: Flow) -> Iterator[list[int]]:
    """Positions of layers, two or more, that read one x one after another and may stand where the first does."""
    for (_, name), readers in flow.readers.items():
        calls: list[int] = []
        for index in sorted(readers):
            is_layer = index < len(flow.body) and _is_linear(flow.body[index], name)
            if is_layer and calls and flow.may_move(index, calls[0]):
                calls.append(index)
                continue
            if len(calls) > 1:
                yield calls
            calls = [index] if is_layer else []
        if len(calls) > 1:
            yield calls


def _is_linear(statement: Statement, x: str) -> bool:
    if not isinstance(statement, Call) or statement.target != "fp8.linear" or statement.divisor != 1:
        return False
    read, *stored = statement.args
    return isinstance(read, Var) and read.name == x and all(value is None or is_stored(value) for value in stored)
