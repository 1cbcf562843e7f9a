"""The verifier of lowered programs: values are defined before they are read, and every statement fits its types.

It runs after lowering and after each pass, so that a wrong pass fails in the compiler. `check_source.py` reads the text
that is emitted; this reads the program before there is any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from codegen.fusion import KERNELS
from codegen.fusion.template import argument_types, like_first
from codegen.logits import with_logits
from codegen.program import (
    UNREAD,
    Call,
    LayerLoop,
    ModuleClass,
    Program,
    Reshard,
    Spec,
    Statement,
    TensorType,
    Var,
    assigns,
    reads,
)
from codegen.reshards import METHODS, axis_kwargs
from codegen.runtime.parameters import parse_placement
from codegen.schemas import EmissionError
from codegen.source.idioms import IDIOMS

_LIKE_FIRST: Final = frozenset(
    {
        *("aten.silu.default", "aten.gelu.default", "aten.neg.default", "aten.contiguous.default"),
        *("self.same_dropout", "self.in_training", "self.whole_sum"),
    }
)
"""Calls whose results have the shape and dtype of the first argument."""

_NAMED: Final = {pattern.target: pattern.result_types for pattern in (*KERNELS.values(), *IDIOMS)}
"""Types of the results of kernels and idioms."""

_LINEAR: Final = frozenset(
    {
        *("aten.linear.default", "deferred.linear", "fp8.linear", "fp8.linears"),
        *("overlapped.linear", "overlapped.linears"),
        *("async_tp.all_gather_linear", "async_tp.all_gather_linears", "async_tp.linear_reduce_scatter"),
    }
)
"""Calls of x and a weight [out, in], or several."""

_ARITHMETIC: Final = frozenset(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))
_SCALARS: Final = frozenset({"runtime.cross_entropy", "runtime.count_valid"})


def check_types(program: Program) -> None:
    """Raises EmissionError, which names the class, the statement and the values, where a program contradicts itself."""
    for cls in (*program.layers, program.root):
        _Body(program, cls.name, cls).check(cls.body, cls.outputs)
    root = program.root
    _Body(program, f"{root.name}.count_targets", root).check(program.count_targets, program.target_counts)
    _Body(program, f"{root.name}.whole_sums", root).check(program.whole_sums, program.sums)
    if program.logits is not None:
        with_logits_body = with_logits(program)
        results = () if with_logits_body.logits is None else (with_logits_body.logits,)
        before = root.body[: with_logits_body.logits_at]
        _Body(program, f"{root.name}'s logits", root).check((*before, *with_logits_body.giving_logits), results)


class _Body:
    """Statements in a row, with what is known of the variables by then."""

    def __init__(self, program: Program, name: str, cls: ModuleClass) -> None:
        self.name, self.at = name, "inputs"
        self.sizes = dict(zip(program.axes, program.axis_sizes, strict=True))
        self.layers = {layer.name: layer for layer in program.layers}
        self.stored: Mapping[str, Spec] = {**cls.parameters, **cls.buffers}
        self.defined: dict[str, TensorType] = {}
        self.define(cls.inputs)

    def check(self, body: tuple[Statement, ...], outputs: tuple[Var, ...]) -> None:
        for number, statement in enumerate(body):
            self.at = f"statement {number}, {_text(statement)}"
            for variable in reads(statement):
                self.read(variable)
            if isinstance(statement, Reshard):
                self.reshard(statement)
            elif isinstance(statement, LayerLoop):
                self.loop(statement)
            else:
                self.call(statement)
            self.define(assigns(statement))
        self.at = "results"
        for variable in outputs:
            self.read(variable)

    def fail(self, problem: str, *variables: Var) -> EmissionError:
        return EmissionError(problem, ", ".join(map(_described, variables)), f"{self.name}, {self.at}")

    def define(self, variables: tuple[Var, ...]) -> None:
        """Results of one statement, or what forward takes."""
        for index, variable in enumerate(variables):
            variable_type = variable.type
            if not variable.name.isidentifier() or variable in variables[:index]:
                raise self.fail("a value needs a name of its own", variable)
            if not isinstance(getattr(torch, variable_type.dtype, None), torch.dtype):
                raise self.fail("a value without a type", variable)
            for axis, text in variable_type.placements:
                if axis not in self.sizes or parse_placement(text)[1] >= len(variable_type.shape):
                    raise self.fail(f"no tensor lies {text} on {axis} there", variable)
            self.defined[variable.name] = variable_type

    def read(self, variable: Var) -> None:
        """Check a read. A parameter or a sum over the batch is defined by its first read."""
        if variable.name not in self.defined and not variable.name.isidentifier():
            variable_type, spec = variable.type, self.stored.get(variable.type.tensor[0])
            fits = spec is not None and (variable_type.shape, variable_type.placements) == (
                _padded(spec),
                spec.placements,
            )
            if variable.is_stored and not fits:
                raise self.fail("the class stores no such tensor", variable)
            self.defined[variable.name] = variable_type
        defined = self.defined.get(variable.name)
        if defined is None:
            raise self.fail("read before it is defined", variable)
        if defined != variable.type:
            raise self.fail("the variable holds something else by then", variable, Var(variable.name, defined))

    def reshard(self, reshard: Reshard) -> None:
        axis, source, result = reshard.axis, reshard.source, reshard.result
        before, after = source.type.placement(axis), result.type.placement(axis)
        others = [[pair for pair in v.type.placements if pair[0] != axis] for v in (source, result)]
        kinds = parse_placement(before)[0], parse_placement(after)[0]
        if axis not in self.sizes or not source.type.is_alike(result.type) or others[0] != others[1]:
            raise self.fail("a reshard changes the placement on its axis alone", source, result)
        if kinds not in METHODS or before == after:
            raise self.fail("there is no reshard in one step", source, result)
        sections = self.sections(source.type, axis), self.sections(result.type, axis)
        method, has_gradient = METHODS[kinds], source.type.requires_grad
        name = "sum_over" if kinds == ("P", "R") and not has_gradient and reshard.method == "sum_over" else method.name
        wanted = axis_kwargs(before, after, sections, has_gradient)
        if (reshard.method, tuple(pair for pair in reshard.kwargs if pair != ("wait", False))) != (name, wanted):
            raise self.fail(f"the reshard is {name} with {dict(wanted)}", source, result)
        num_bytes = self.num_bytes(source.type, axis, kinds)
        sent = method.forward or "", (has_gradient and method.backward) or ""
        if (reshard.forward, reshard.backward) != sent or not math.isclose(reshard.num_bytes, num_bytes):
            raise self.fail(f"the reshard sends {num_bytes} bytes with {sent}", source, result)

    def sections(self, tensor_type: TensorType, axis: str) -> int:
        """Return the sections of the sharded dim as the local tensor has them: axes with coarser shards of it have
        split the others off."""
        _, dim, sections = parse_placement(tensor_type.placement(axis))
        others = [(other, parse_placement(text)) for other, text in tensor_type.placements if other != axis]
        coarser = (self.sizes[other] for other, (kind, d, k) in others if kind == "S" and d == dim and k < sections)
        return sections // math.prod(coarser)

    def num_bytes(self, tensor_type: TensorType, axis: str, kinds: tuple[str, str]) -> float:
        """Return the bytes of a rank's buffer: as gathered, as reduced, or as exchanged."""
        ways = math.prod(self.sizes[a] for a, text in tensor_type.placements if parse_placement(text)[0] == "S")
        if kinds[0] == "S" and kinds[1] != "S":
            ways //= self.sizes[axis]
        dtype: torch.dtype = getattr(torch, tensor_type.dtype)
        return math.prod(tensor_type.shape) * dtype.itemsize / ways

    def loop(self, loop: LayerLoop) -> None:
        layer = self.layers.get(loop.layer)
        if layer is None:
            raise self.fail("the program has no such layer")
        if (len(loop.args), len(loop.results)) != (len(layer.inputs), len(layer.outputs)):
            raise self.fail(f"the layer takes {len(layer.inputs)} and gives {len(layer.outputs)}", *loop.args)
        read_results = [pair for pair in zip(loop.results, layer.outputs, strict=True) if pair[0] != UNREAD]
        carried = [(layer.outputs[output], layer.inputs[position]) for position, output in loop.carried]
        for one, other in (*zip(loop.args, layer.inputs, strict=True), *read_results, *carried):
            if not one.type.is_alike(other.type) or one.type.placements != other.type.placements:
                raise self.fail("a layer's inputs and outputs are not alike", one, other)

    def call(self, call: Call) -> None:
        for result, wanted in zip(call.results, _results(call), strict=False):
            if result != UNREAD and wanted is not None and not result.type.is_alike(wanted):
                raise self.fail("the call makes a tensor of another shape or dtype", result, *reads(call))


def _results(call: Call) -> Iterator[TensorType | None]:
    """Global shape and dtype of the results; nothing, or None, where they cannot be told from the arguments' types."""
    target, args = call.target, call.args
    types = argument_types(call)
    if target in _NAMED:
        yield from _NAMED[target](call)
    elif target in _LIKE_FIRST:
        yield from like_first(call)
    elif target in _SCALARS:
        yield TensorType((), call.results[0].type.dtype)
    elif target in _ARITHMETIC and len(types) == 2 and types[0] and types[1] and types[0].dtype == types[1].dtype:
        yield TensorType(_broadcast(types[0].shape, types[1].shape), types[0].dtype)
    elif target == "aten.to.dtype" and types[0]:
        yield TensorType(types[0].shape, str(args[1]).removeprefix("torch."))
    elif target in _LINEAR and types[0]:
        x, weights = types[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        for weight in (weight_var.type for weight_var in weights):
            yield TensorType((*x.shape[:-1], *weight.shape[:-1]), x.dtype)


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    count = max(len(one), len(other))
    padded = zip((1,) * (count - len(one)) + one, (1,) * (count - len(other)) + other, strict=True)
    return tuple(b if a == 1 else a for a, b in padded)


def _text(statement: Statement) -> str:
    """`q, k = overlapped.linears`."""
    results = ", ".join(result.name or "_" for result in assigns(statement))
    if isinstance(statement, Reshard):
        return f"{results} = {statement.axis}.{statement.method}"
    return f"{results} = {statement.target if isinstance(statement, Call) else statement.layer}"


def _described(variable: Var) -> str:
    """`x: float32 [8, 16], tp S(1)`."""
    places = "".join(f", {axis} {text}" for axis, text in variable.type.placements)
    return f"{variable.name}: {variable.type.dtype} {list(variable.type.shape)}{places}"


def _padded(spec: Spec) -> tuple[int, ...]:
    """The shape of the program's own tensor, of which the user's is the beginning of each section."""
    if not spec.padding:
        return spec.shape
    _, dim, sections = parse_placement(spec.padded)
    return (*spec.shape[:dim], spec.shape[dim] + sections * spec.padding, *spec.shape[dim + 1 :])
