"""The strides of values in one rank's memory, and the calls that need such strides.

A plan changes strides: a reshard returns a contiguous tensor where the model had a transposed one, a fused kernel
returns another layout than the calls that it replaces, and a copy that the model made is gone. `view` works for some
strides and fails for others. So every value of a program has a set of strides, all those that it may have when the
program runs, and a call that fails for one of them is written otherwise:

    x.view(sizes)        x.reshape(sizes), which copies where it has to
    other calls          the operands are made contiguous first

Torch itself says which strides a result has, on meta tensors. Where kernels of several devices differ, a value has the
strides of each of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from codegen.layout_answers import Operand, Strides, answer, contiguous, evened, follows_operands, ordered_like
from codegen.program import (
    UNREAD,
    Call,
    LayerLoop,
    ModuleClass,
    Program,
    Raw,
    Reshard,
    Statement,
    TensorType,
    Var,
    reads,
)
from codegen.runtime.parameters import parse_placement

Layouts = frozenset[Strides] | None
"""All strides that a value may have; None where nothing is known of them."""

MOST_LAYOUTS, MOST_CASES = 6, 24
"""Of more layouts of a value, or of the operands of a call together, nothing is said."""

_VIEWS = {"aten.view.default": "aten.reshape.default", "aten._unsafe_view.default": "aten.reshape.default"}
"""Calls that need strides that fit -> what does the same for all strides."""

_ATTENTION = frozenset(
    (
        *("aten.scaled_dot_product_attention.default", "self.dropout_attention"),
        *("runtime.context_attention", "runtime.window_attention", "runtime.sink_attention"),
    )
)
"""Attention, whose backends return [B, H, S, D] as it is, in the memory of [B, S, H, D], or laid out as the queries."""

_LIKE_FIRST = frozenset({"self.same_dropout", "self.whole_sum"})
"""Calls of the run time whose result lies as the first operand, or is contiguous."""

_OF_CONTIGUOUS = frozenset({"runtime.batch_norm", "runtime.group_norm", "runtime.halo_convolution"})
"""Calls of the run time whose result is contiguous where all operands are."""

_ANY = ("async_tp.", "autograd_function.")
"""Calls that return whatever strides."""

_PACKED = frozenset(
    f"aten.{name}" for name in ("linear.default", "mm.default", "addmm.default", "bmm.default", "contiguous.default")
) | {"aten.layer_norm.default", "aten.embedding.default"}
"""Operators whose results are contiguous for operands of any strides, on every device."""

_SAME_MEMORY = frozenset({"for_use", "first_rank_only", "first_rank_grad"})
"""Reshards that return their operand."""


def with_strides(program: Program) -> Program:
    """The program with calls that run for all strides that their operands may have. Results have their strides."""
    memory = _Memory(program)
    root, at = memory.root()
    layers = tuple(memory.layer(layer) for layer in program.layers)
    return replace(
        program,
        layers=layers,
        root=replace(program.root, body=root),
        count_targets=memory.of_batch(program.count_targets),
        whole_sums=memory.of_batch(program.whole_sums),
        giving_logits=memory.logits,
        logits_at=at,
    )


def local_shape(tensor_type: TensorType, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one rank's part."""
    shape = list(tensor_type.shape)
    for axis, text in tensor_type.placements:
        kind, dim, _ = parse_placement(text)
        if kind == "S":
            shape[dim] //= sizes[axis]
    return tuple(shape)


class _Memory:
    """The layouts of a program's values. entering: of what each layer class is given, by all loops."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = dict(zip(program.axes, program.axis_sizes, strict=True))
        self.layers = {layer.name: layer for layer in program.layers}
        self.entering: dict[str, tuple[Layouts, ...]] = {}
        self.results: dict[tuple[str, tuple[Layouts, ...]], tuple[Layouts, ...]] = {}
        self.logits: tuple[Statement, ...] = ()

    # Bodies -----------------------------------------------------------------------------------------------------------

    def root(self) -> tuple[tuple[Statement, ...], int]:
        """The statements of forward, and after how many the logits are made."""
        program = self.program
        scope = _Scope(self)
        first = scope.run(program.root.body[: program.logits_at])
        aside = _Scope(self, dict(scope.layouts))
        self.logits = tuple(aside.run(program.giving_logits))
        return (*first, *scope.run(program.root.body[program.logits_at :])), len(first)

    def layer(self, layer: ModuleClass) -> ModuleClass:
        """The class for everything that its instances are given."""
        layouts = self.entering.get(layer.name, (None,) * len(layer.inputs))
        scope = _Scope(self, dict(zip((variable.name for variable in layer.inputs), layouts, strict=True)))
        return replace(layer, body=tuple(scope.run(layer.body)))

    def of_batch(self, statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(_Scope(self).run(statements))

    def loop(self, loop: LayerLoop, layouts: tuple[Layouts, ...]) -> tuple[Layouts, ...]:
        """The layouts of a loop's results; those that are carried on enter the next layer."""
        while True:
            results = self.called(loop.layer, layouts)
            again = list(layouts)
            for position, output in loop.carried:
                again[position] = _joined(again[position], results[output])
            if tuple(again) == layouts or loop.count == 1:
                break
            layouts = tuple(again)
        before = self.entering.get(loop.layer)
        self.entering[loop.layer] = layouts if before is None else tuple(map(_joined, before, layouts))
        return results

    def called(self, name: str, layouts: tuple[Layouts, ...]) -> tuple[Layouts, ...]:
        """The layouts of a layer's results."""
        if (name, layouts) not in self.results:
            layer = self.layers[name]
            scope = _Scope(self, dict(zip((variable.name for variable in layer.inputs), layouts, strict=True)))
            scope.run(layer.body)
            self.results[name, layouts] = tuple(scope.of(output) for output in layer.outputs)
        return self.results[name, layouts]


class _Scope:
    """Statements in order, with the layouts of their variables; what has none here is stored, or of the batch, and so
    contiguous."""

    def __init__(self, memory: _Memory, layouts: dict[str, Layouts] | None = None) -> None:
        self.memory = memory
        self.layouts = layouts or {}

    def of(self, variable: Var) -> Layouts:
        default = frozenset({contiguous(self.shape(variable))})
        return self.layouts.get(variable.name, default)

    def shape(self, variable: Var) -> tuple[int, ...]:
        return local_shape(variable.type, self.memory.sizes)

    def run(self, statements: Iterable[Statement]) -> list[Statement]:
        """The statements as they run for all layouts, with those of their results."""
        done: list[Statement] = []
        for statement in statements:
            if isinstance(statement, Reshard):
                layouts: tuple[Layouts, ...] = (self.reshard(statement),)
            elif isinstance(statement, LayerLoop):
                layouts = self.memory.loop(statement, tuple(map(self.of, statement.args)))
            else:
                before, statement = self.fitting(statement)
                done += before
                layouts = self.call(statement)
            done.append(self.noted(statement, layouts))
        return done

    def noted(self, statement: Statement, layouts: tuple[Layouts, ...]) -> Statement:
        """The statement whose results have these layouts."""
        results = (statement.result,) if isinstance(statement, Reshard) else statement.results
        noted_results = []
        for result, result_layouts in itertools.zip_longest(results, layouts[: len(results)]):
            if result != UNREAD:
                self.layouts[result.name] = result_layouts
                result = replace(result, type=replace(result.type, strides=result_layouts))
            noted_results.append(result)
        if isinstance(statement, Reshard):
            return replace(statement, result=noted_results[0])
        return replace(statement, results=tuple(noted_results))

    def reshard(self, reshard: Reshard) -> Layouts:
        packed = frozenset({contiguous(self.shape(reshard.result))})
        if self.memory.sizes[reshard.axis] == 1 or reshard.method == "for_use":
            return self.of(reshard.source)
        return _joined(packed, self.of(reshard.source)) if reshard.method in _SAME_MEMORY else packed

    # Calls ------------------------------------------------------------------------------------------------------------

    def fitting(self, call: Call) -> tuple[list[Call], Call]:
        """The call, as one that runs for all layouts of its operands, and what is called before it."""
        if not _is_operator(call):
            return [], call
        operands = self.operands(call)
        if call.target in _VIEWS and operands is None:
            return [], replace(call, target=_VIEWS[call.target])
        cases = self.cases(call) if operands is not None else []
        if all(answer(call, case) is not None for case in cases):
            return [], _named_view(call)
        if call.target in _VIEWS:
            return [], replace(call, target=_VIEWS[call.target])
        return self.packed(call), call

    def packed(self, call: Call) -> list[Call]:
        """Calls that make a call's operands contiguous; none where torch does not take those either."""
        packed = {operand.name: _operand(operand, self.shape(operand)) for operand in reads(call)}
        if answer(call, packed) is None:
            return []
        before: list[Call] = []
        for variable in dict.fromkeys(reads(call)):
            if self.of(variable) != frozenset({packed[variable.name].strides}) and not variable.is_stored:
                before.append(Call("aten.contiguous.default", (variable,), (), (variable,), section=call.section))
                self.layouts[variable.name] = frozenset({packed[variable.name].strides})
        return before

    def operands(self, call: Call) -> list[frozenset[Strides]] | None:
        """The layouts of what a call reads; None where one of them may be any."""
        layouts_of = [self.of(variable) for variable in dict.fromkeys(reads(call))]
        known_layouts = [operand_layouts for operand_layouts in layouts_of if operand_layouts is not None]
        return known_layouts if len(known_layouts) == len(layouts_of) else None

    def cases(self, call: Call) -> list[dict[str, Operand]]:
        """Every choice of one layout for each operand."""
        variables = list(dict.fromkeys(reads(call)))
        layouts = [sorted(self.of(variable) or ()) for variable in variables]
        choices = itertools.product(*layouts)
        return [
            {
                variable.name: _operand(variable, self.shape(variable), strides)
                for variable, strides in zip(variables, case, strict=True)
            }
            for case in itertools.islice(choices, MOST_CASES + 1)
        ]

    def call(self, call: Call) -> tuple[Layouts, ...]:
        """The layouts of a call's results."""
        count = len(call.results)
        packed = tuple(frozenset({contiguous(self.shape(result))}) for result in call.results)
        if call.target in _ATTENTION:
            return (self.attention(call), *packed[1:])
        if call.target.startswith(_ANY):
            return (None,) * count
        if call.target in _LIKE_FIRST:
            return (_joined(packed[0], self.of(call.args[0])),)
        if (call.target in _PACKED and not call.kwargs) or not reads(call):
            return packed
        if _is_operator(call):
            return self.operator(call)
        if call.members:
            inner = _Scope(self.memory, dict(self.layouts))
            inner.run(call.original)
            return tuple(
                _joined(result_layouts, inner.of(result))
                for result_layouts, result in zip(packed, call.results, strict=True)
            )
        is_packed = all(self.of(variable) == frozenset({contiguous(self.shape(variable))}) for variable in reads(call))
        return packed if is_packed or call.target not in _OF_CONTIGUOUS else (None,) * count

    def attention(self, call: Call) -> Layouts:
        shape, queries = self.shape(call.results[0]), self.of(call.args[0])
        layouts = {contiguous(shape)}
        if len(shape) == 4:
            batch, heads, length, width = shape
            layouts.add(evened(shape, (heads * length * width, width, heads * width, 1)))
        if queries is None:
            return None
        layouts |= {evened(shape, ordered_like(shape, strides)) for strides in queries}
        return _few(layouts)

    def operator(self, call: Call) -> tuple[Layouts, ...]:
        """Return what torch says of each case."""
        count, layouts = len(call.results), [set[Strides]() for _ in call.results]
        cases = self.cases(call) if self.operands(call) is not None else []
        if not cases or len(cases) > MOST_CASES:
            return (None,) * count
        for case in cases:
            said = answer(call, case)
            if said is None or len(said) < count:
                return (None,) * count
            is_packed = all(operand.strides == contiguous(operand.shape) for operand in case.values())
            for number, strides in enumerate(said[:count]):
                shape = self.shape(call.results[number]) if call.results[number] != UNREAD else ()
                layouts[number].add(strides)
                if not is_packed and not follows_operands(call.target) and len(shape) == len(strides):
                    layouts[number].add(contiguous(shape))  # as kernels of another device may have it
                if call.target == "aten.matmul.default" and len(strides) > 2 and len(strides) == len(shape):
                    layouts[number].add(evened(shape, (*contiguous(shape)[:-2], 1, shape[-2])))
        return tuple(map(_few, layouts))


def _is_operator(call: Call) -> bool:
    """Whether torch can be asked about a call."""
    values = (*call.args, *(value for _, value in call.kwargs))
    return call.target.count(".") == 2 and not call.target.startswith(_ANY) and not any(map(_is_raw, values))


def _is_raw(value: Any) -> bool:
    return isinstance(value, Raw) or (isinstance(value, tuple) and any(map(_is_raw, value)))


def _named_view(call: Call) -> Call:
    """`_unsafe_view`, whose word for it a reader does not know, is `view`."""
    return replace(call, target="aten.view.default") if call.target == "aten._unsafe_view.default" else call


def _operand(variable: Var, shape: tuple[int, ...], strides: Strides | None = None) -> Operand:
    return Operand(shape, contiguous(shape) if strides is None else strides, variable.type.dtype)


def _joined(one: Layouts, other: Layouts) -> Layouts:
    return None if one is None or other is None else _few(one | other)


def _few(layouts: Iterable[Strides]) -> Layouts:
    kept = frozenset(layouts)
    return kept if len(kept) <= MOST_LAYOUTS else None
