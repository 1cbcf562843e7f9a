"""How values lie in one rank's memory, and the calls that need them to lie so.

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
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from codegen.program import UNREAD, Call, LayerLoop, ModuleClass, Program, Raw, Reshard, Statement, TensorType, Var
from codegen.program import assigns, reads
from codegen.runtime.parameters import parse_placement

Strides = tuple[int, ...]
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

_asked: dict[tuple[str, ...], tuple[Strides, ...] | None] = {}
"""What torch said, by call and layouts of the operands."""
_MOST_ASKED = 20_000


@dataclass(frozen=True, slots=True)
class _Operand:
    """A tensor as torch is asked about it."""

    shape: tuple[int, ...]
    strides: Strides
    dtype: str

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=getattr(torch, self.dtype), device="meta")


def with_strides(program: Program) -> Program:
    """The program with calls that run for all strides that their operands may have. Results have their strides."""
    found = _Memory(program)
    root, at = found.root()
    layers = tuple(found.layer(layer) for layer in program.layers)
    return replace(
        program,
        layers=layers,
        root=replace(program.root, body=root),
        count_targets=found.of_batch(program.count_targets),
        whole_sums=found.of_batch(program.whole_sums),
        giving_logits=found.logits,
        logits_at=at,
    )


def contiguous(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor."""
    steps = itertools.accumulate((max(size, 1) for size in reversed(shape[1:])), lambda a, b: a * b, initial=1)
    return tuple(steps)[::-1] if shape else ()


def local_shape(held: TensorType, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of one rank's part."""
    shape = list(held.shape)
    for axis, text in held.placements:
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
        known = _Scope(self)
        first = known.run(program.root.body[: program.logits_at])
        aside = _Scope(self, dict(known.layouts))
        self.logits = tuple(aside.run(program.giving_logits))
        return (*first, *known.run(program.root.body[program.logits_at :])), len(first)

    def layer(self, layer: ModuleClass) -> ModuleClass:
        """The class for everything that its instances are given."""
        given = self.entering.get(layer.name, (None,) * len(layer.inputs))
        scope = _Scope(self, dict(zip((each.name for each in layer.inputs), given, strict=True)))
        return replace(layer, body=tuple(scope.run(layer.body)))

    def of_batch(self, statements: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(_Scope(self).run(statements))

    def loop(self, loop: LayerLoop, given: tuple[Layouts, ...]) -> tuple[Layouts, ...]:
        """The layouts of a loop's results; those that are carried on enter the next layer."""
        while True:
            results = self.called(loop.layer, given)
            again = list(given)
            for position, output in loop.carried:
                again[position] = _joined(again[position], results[output])
            if tuple(again) == given or loop.count == 1:
                break
            given = tuple(again)
        before = self.entering.get(loop.layer)
        self.entering[loop.layer] = given if before is None else tuple(map(_joined, before, given))
        return results

    def called(self, name: str, given: tuple[Layouts, ...]) -> tuple[Layouts, ...]:
        """The layouts of a layer's results."""
        if (name, given) not in self.results:
            layer = self.layers[name]
            scope = _Scope(self, dict(zip((each.name for each in layer.inputs), given, strict=True)))
            scope.run(layer.body)
            self.results[name, given] = tuple(scope.of(output) for output in layer.outputs)
        return self.results[name, given]


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
                *before, statement = self.fitting(statement)
                done += before
                layouts = self.call(statement)
            done.append(self.noted(statement, layouts))
        return done

    def noted(self, statement: Statement, layouts: tuple[Layouts, ...]) -> Statement:
        """The statement whose results have these layouts."""
        if isinstance(statement, Reshard):
            results = (statement.result,)
        else:
            results = statement.results
        made = []
        for result, known in itertools.zip_longest(results, layouts[: len(results)]):
            if result != UNREAD:
                self.layouts[result.name] = known
                result = replace(result, type=replace(result.type, strides=known))
            made.append(result)
        if isinstance(statement, Reshard):
            return replace(statement, result=made[0])
        return replace(statement, results=tuple(made))

    def reshard(self, reshard: Reshard) -> Layouts:
        packed = frozenset({contiguous(self.shape(reshard.result))})
        if self.memory.sizes[reshard.axis] == 1 or reshard.method == "for_use":
            return self.of(reshard.source)
        return _joined(packed, self.of(reshard.source)) if reshard.method in _SAME_MEMORY else packed

    # Calls ------------------------------------------------------------------------------------------------------------

    def fitting(self, call: Call) -> list[Statement]:
        """The call, as one that runs for all layouts of its operands."""
        if not _is_operator(call):
            return [call]
        operands = self.operands(call)
        if call.target in _VIEWS and operands is None:
            return [replace(call, target=_VIEWS[call.target])]
        cases = self.cases(call) if operands is not None else []
        if all(_answer(call, case) is not None for case in cases):
            return [_named_view(call)]
        if call.target in _VIEWS:
            return [replace(call, target=_VIEWS[call.target])]
        return self.packed(call)

    def packed(self, call: Call) -> list[Statement]:
        """The call of contiguous operands; itself where torch does not take those either."""
        packed = {each.name: _operand(each, self.shape(each)) for each in reads(call)}
        if _answer(call, packed) is None:
            return [call]
        before: list[Statement] = []
        for variable in dict.fromkeys(reads(call)):
            if self.of(variable) != frozenset({packed[variable.name].strides}) and not variable.is_stored:
                before.append(Call("aten.contiguous.default", (variable,), (), (variable,), section=call.section))
                self.layouts[variable.name] = frozenset({packed[variable.name].strides})
        return [*before, call]

    def operands(self, call: Call) -> list[frozenset[Strides]] | None:
        """The layouts of what a call reads; None where one of them may be any."""
        found = [self.of(variable) for variable in dict.fromkeys(reads(call))]
        known = [each for each in found if each is not None]
        return known if len(known) == len(found) else None

    def cases(self, call: Call) -> list[dict[str, _Operand]]:
        """Every choice of one layout for each operand."""
        variables = list(dict.fromkeys(reads(call)))
        layouts = [sorted(self.of(each) or ()) for each in variables]
        choices = itertools.product(*layouts)
        return [
            {each.name: _operand(each, self.shape(each), strides) for each, strides in zip(variables, case, strict=True)}
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
        if call.target in _PACKED or not reads(call):
            return packed
        if _is_operator(call):
            return self.operator(call)
        if call.members:
            inner = _Scope(self.memory, dict(self.layouts))
            inner.run(call.original)
            return tuple(_joined(own, inner.of(result)) for own, result in zip(packed, call.results, strict=True))
        is_packed = all(self.of(each) == frozenset({contiguous(self.shape(each))}) for each in reads(call))
        return packed if is_packed or call.target not in _OF_CONTIGUOUS else (None,) * count

    def attention(self, call: Call) -> Layouts:
        shape, queries = self.shape(call.results[0]), self.of(call.args[0])
        found = {contiguous(shape)}
        if len(shape) == 4:
            batch, heads, length, width = shape
            found.add(_even(shape, (heads * length * width, width, heads * width, 1)))
        if queries is None:
            return None
        found |= {_even(shape, _ordered(shape, strides)) for strides in queries}
        return _few(found)

    def operator(self, call: Call) -> tuple[Layouts, ...]:
        """What torch says of each case."""
        count, found = len(call.results), [set[Strides]() for _ in call.results]
        cases = self.cases(call) if self.operands(call) is not None else []
        if not cases or len(cases) > MOST_CASES:
            return (None,) * count
        for case in cases:
            answer = _answer(call, case)
            if answer is None or len(answer) < count:
                return (None,) * count
            is_packed = all(each.strides == contiguous(each.shape) for each in case.values())
            for number, strides in enumerate(answer[:count]):
                shape = self.shape(call.results[number]) if call.results[number] != UNREAD else ()
                found[number].add(strides)
                if not is_packed and not _follows(call.target) and len(shape) == len(strides):
                    found[number].add(contiguous(shape))  # as kernels of another device may have it
                if call.target == "aten.matmul.default" and len(strides) > 2 and len(strides) == len(shape):
                    found[number].add(_even(shape, (*contiguous(shape)[:-2], 1, shape[-2])))
        return tuple(map(_few, found))


def _is_operator(call: Call) -> bool:
    """Whether torch can be asked about a call."""
    values = (*call.args, *(value for _, value in call.kwargs))
    return call.target.count(".") == 2 and not call.target.startswith(_ANY) and not any(map(_is_raw, values))


def _is_raw(value: Any) -> bool:
    return isinstance(value, Raw) or (isinstance(value, tuple) and any(map(_is_raw, value)))


def _named_view(call: Call) -> Call:
    """`_unsafe_view`, whose word for it a reader does not know, is `view`."""
    return replace(call, target="aten.view.default") if call.target == "aten._unsafe_view.default" else call


def _operand(variable: Var, shape: tuple[int, ...], strides: Strides | None = None) -> _Operand:
    return _Operand(shape, contiguous(shape) if strides is None else strides, variable.type.dtype)


def _answer(call: Call, operands: Mapping[str, _Operand]) -> tuple[Strides, ...] | None:
    """The strides of the results for these operands; None where torch does not take them."""
    args, kwargs = _filled(call.args, operands), {name: _filled(value, operands) for name, value in call.kwargs}
    key = call.target, repr(args), repr(kwargs)
    if key not in _asked:
        if len(_asked) >= _MOST_ASKED:
            _asked.clear()
        _asked[key] = _ask(call.target, args, kwargs)
    return _asked[key]


def _filled(value: Any, operands: Mapping[str, _Operand]) -> Any:
    if isinstance(value, Var):
        return operands[value.name]
    return [_filled(item, operands) for item in value] if isinstance(value, tuple) else value


def _ask(target: str, args: Any, kwargs: Mapping[str, Any]) -> tuple[Strides, ...] | None:
    operator: Any = torch.ops
    try:
        for part in target.split("."):
            operator = getattr(operator, part)
        with torch.no_grad():
            result = operator(*_made(args), **{name: _made(value) for name, value in kwargs.items()})
    except Exception:  # of whatever class: torch does not take these operands, or has no such operator for meta tensors
        return None
    results = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(_even(tuple(each.shape), each.stride()) for each in results if isinstance(each, torch.Tensor))


def _made(value: Any) -> Any:
    if isinstance(value, _Operand):
        return value.made()
    return [_made(item) for item in value] if isinstance(value, list) else value


def _follows(target: str) -> bool:
    """Whether an operator's result lies as its operands say on every device: a view, or elementwise."""
    operator: Any = torch.ops
    for part in target.split("."):
        operator = getattr(operator, part, None)
    is_alias = any(each.alias_info is not None for each in operator._schema.returns)
    return is_alias or torch.Tag.pointwise in operator.tags


def _ordered(shape: tuple[int, ...], like: Strides) -> Strides:
    """Strides of a tensor without gaps whose dims are in the order of those of `like`."""
    if len(like) != len(shape):
        return contiguous(shape)
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        strides[dim], step = step, step * max(shape[dim], 1)
    return tuple(strides)


def _even(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Strides with those of dims of one element as of a contiguous tensor: they say nothing."""
    if 0 in shape:
        return contiguous(shape)
    found, step = list(strides), 1
    for dim in reversed(range(len(shape))):
        if shape[dim] == 1:
            found[dim] = step
        step = found[dim] * shape[dim]
    packed = contiguous(shape)
    is_packed = all(size == 1 or a == b for size, a, b in zip(shape, found, packed, strict=True))
    return packed if is_packed else tuple(found)


def _joined(one: Layouts, other: Layouts) -> Layouts:
    return None if one is None or other is None else _few(one | other)


def _few(found: Iterable[Strides]) -> Layouts:
    kept = frozenset(found)
    return kept if len(kept) <= MOST_LAYOUTS else None
