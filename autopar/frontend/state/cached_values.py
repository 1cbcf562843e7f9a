"""Decide whether a forward that caches values of its first call (a table by length) computes the same later.

Two recorded forwards are read as expressions: of inputs, of tensors of the model, and of values that the first has
left. A tensor in memory is its content and the writes to its views. The second forward reads values of the first as the
written expressions, if these depend on nothing that changes between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from autopar.frontend.recorder import Record, Source, sources_in
from autopar.ir.graph import base_name
from autopar.operators.traits import JOINS, MOVING, PERMUTATIONS

Name = tuple[Any, ...]
"""The origin of a tensor in a record."""
_IDENTITIES = MOVING - PERMUTATIONS - JOINS - {"repeat_interleave"} | {"copy", "type_as"}
"""Operators that return a constant unchanged if shape and dtype stay."""


def compute_alike(first: Record, second: Record, named: Mapping[str, Tensor], fixed: Iterable[str]) -> bool:
    """Return whether two consecutive forwards compute the same loss and leave the same values in the model's tensors.

    named: the model's tensors when the second began. fixed: those whose values stay, unless a forward writes to them.
    """
    written: set[Name] = set()
    for record in (first, second):
        written |= _Reader(_Symbols(set(), set()), record, {}, lambda tensor: None).written
    symbols = _Symbols({("tensor", name) for name in fixed} - written, written)
    before = _Reader(symbols, first, {}, lambda tensor: None)
    start = {("tensor", name): memory for name, memory in before.left(first, named)}

    def kept(tensor: Tensor) -> int | None:
        name = first.name_of(tensor)
        return None if name is None else symbols.old(before.read(before.place(name)))

    now = _Reader(symbols, second, start, kept)
    return before.loss == now.loss and all(before.final(name) == now.final(name) for name in written)


@dataclass(frozen=True, slots=True)
class _Step:
    """One operator that takes a view. is_same: the view has the shape and dtype of its base."""

    operator: OpOverload
    rest: Any
    is_same: bool


@dataclass(slots=True)
class _Memory:
    """The content of a tensor, and the writes to views of it since."""

    content: int
    writes: list[tuple[tuple[_Step, ...], int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Place:
    """A view of a tensor in memory."""

    root: Name
    path: tuple[_Step, ...] = ()


class _Symbols:
    """Expressions by number; equal ones have one number."""

    def __init__(self, fixed: set[Name], written: set[Name]) -> None:
        self._fixed_names, self._written = fixed, written
        self._numbers: dict[Any, int] = {}
        self._is_fixed: list[bool] = []

    def of(self, key: Any, is_fixed: bool) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        if number == len(self._is_fixed):
            self._is_fixed.append(is_fixed)
        return number

    def leaf(self, name: Name) -> int:
        is_fixed = name not in self._written and (name in self._fixed_names or name[0] == "constant")
        return self.of(("leaf", name), is_fixed)

    def is_fixed(self, number: int) -> bool:
        return self._is_fixed[number]

    def old(self, number: int) -> int:
        """Return an expression of an earlier forward: itself, or an earlier value."""
        return number if self.is_fixed(number) else self.of(("old", number), is_fixed=False)

    def view(self, number: int, step: _Step) -> int:
        if step.is_same and self.is_fixed(number) and base_name(str(step.operator)) in _IDENTITIES:
            return number
        return self.of((step.operator, ("#", number), step.rest), self.is_fixed(number))


class _Reader:
    """One record, as expressions. start: contents of memory before it, by name. kept: expressions of an earlier
    record's tensors.
    """

    def __init__(
        self,
        symbols: _Symbols,
        record: Record,
        start: Mapping[Name, _Memory],
        kept: Callable[[Tensor], int | None],
    ) -> None:
        self._symbols, self._kept = symbols, kept
        self._memories = {name: _Memory(memory.content, list(memory.writes)) for name, memory in start.items()}
        self._places: dict[Name, _Place] = {}
        self._is_differentiable, self._num_draws = True, 0
        self._metas = {source.name: source.meta for source in record.recorder.origins.values()}
        self.loss: Any = None
        self.written: set[Name] = set()
        for position, entry in enumerate(record.outside):
            if entry[0] == "grad mode":
                self._is_differentiable = entry[1]
            elif entry[0] == "loss":
                self.loss = self._described(entry[1])
            elif isinstance(entry[0], OpOverload):
                self._call(position + 1, *entry)

    def place(self, name: Name) -> _Place:
        """Return the memory of a tensor, and the view of it."""
        if name not in self._places:
            self._places[name] = _Place(name)
        return self._places[name]

    def read(self, place: _Place) -> int:
        """Return the present value of a view of a tensor."""
        memory = self._memory(place.root)
        for path, value in reversed(memory.writes):
            if place.path[: len(path)] != path:
                written = tuple((path, ("#", value)) for path, value in memory.writes)
                key = ("written", ("#", memory.content), written, place.path)
                values = (memory.content, *(value for _, value in memory.writes))
                return self._symbols.of(key, all(map(self._symbols.is_fixed, values)))
            return self._viewed(value, place.path[len(path) :])
        return self._viewed(memory.content, place.path)

    def final(self, name: Name) -> int:
        return self.read(_Place(name))

    def left(self, record: Record, named: Mapping[str, Tensor]) -> list[tuple[str, _Memory]]:
        """Return the contents of the model's tensors for the next forward."""
        memories = []
        for tensor_name, tensor in named.items():
            name = record.name_of(tensor)
            if name == ("tensor", tensor_name):
                memory = self._memory(name)
                if all(self._symbols.is_fixed(value) for _, value in memory.writes):
                    memories.append((tensor_name, memory))
            elif name is not None:
                memories.append((tensor_name, _Memory(self._symbols.old(self.read(self.place(name))))))
        return memories

    def _memory(self, root: Name) -> _Memory:
        if root not in self._memories:
            tensor = getattr(root[2], "tensor", None) if root[0] == "constant" else None
            kept = None if tensor is None else self._kept(tensor)
            self._memories[root] = _Memory(self._symbols.leaf(root) if kept is None else kept)
        return self._memories[root]

    def _viewed(self, number: int, path: tuple[_Step, ...]) -> int:
        for step in path:
            number = self._symbols.view(number, step)
        return number

    def _described(self, value: Any) -> Any:
        """Return arguments with tensors replaced by numbers of expressions."""
        if isinstance(value, Source):
            return "#", self.read(self.place(value[1]))
        if isinstance(value, (tuple, list)):
            return tuple(map(self._described, value))
        return (type(value), value) if isinstance(value, (bool, int, float)) else value

    def _call(self, number: int, operator: OpOverload, operands: Any, *results: Any) -> None:
        described, sources = self._described(operands), list(sources_in(operands))
        values = list(_numbers(described))
        is_fixed = all(map(self._symbols.is_fixed, values))
        key: tuple[Any, ...] = (operator, described)
        if torch.Tag.nondeterministic_seeded in operator.tags:
            self._num_draws, is_fixed = self._num_draws + 1, False
            key = (*key, self._num_draws)
        if not is_fixed:
            key = (*key, self._is_differentiable)
        targets = _targets(operator, operands)
        for index, source in enumerate(targets):
            value = self._symbols.of((*key, "written", index), is_fixed)
            is_copy = base_name(str(operator)) == "copy" and len(sources) == 2
            if is_copy and self._meta(sources[0]) == self._meta(sources[1]):
                value = values[1]
            place = self.place(source[1])
            self._memory(place.root).writes.append((place.path, value))
            if place.root[0] != "result":
                self.written.add(place.root)
        for index, result in enumerate(results):
            name, meta = ("result", number, index), tuple(result)
            if len(meta) > 2:  # one of the operands
                continue
            self._metas[name] = meta
            step = _Step(operator, (_plain((operands[0][1:], operands[1])), index), is_same=len(sources) == 1)
            if sources and step.is_same:
                step = replace(step, is_same=self._meta(sources[0]) == meta)
            if index < len(targets):
                self._places[name] = self.place(targets[index][1])
            elif len(sources) == 1 and _is_view(operator):
                base = self.place(sources[0][1])
                self._places[name] = _Place(base.root, (*base.path, step))
            elif len(sources) == 1 and base_name(str(operator)) in _IDENTITIES:
                self._memories[name] = _Memory(self._symbols.view(values[0], step))
            else:
                self._memories[name] = _Memory(self._symbols.of((*key, index), is_fixed))

    def _meta(self, source: Source) -> Any:
        return self._metas.get(source[1])


def _targets(operator: OpOverload, operands: Any) -> list[Source]:
    """Return the operands that an operator writes to."""
    args, kwargs = operands[0], dict(operands[1])
    sources: list[Source] = []
    for index, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            sources += sources_in(args[index] if index < len(args) else kwargs.get(argument.name))
    return sources


def _is_view(operator: OpOverload) -> bool:
    arguments, returns = operator._schema.arguments, operator._schema.returns
    shared = arguments[0].alias_info if arguments else None
    return shared is not None and not shared.is_write and any(result.alias_info for result in returns)


def _numbers(described: Any) -> Iterator[int]:
    """Yield the expressions in a result of `_described`."""
    if isinstance(described, tuple):
        if len(described) == 2 and described[0] == "#":
            yield described[1]
        else:
            for item in described:
                yield from _numbers(item)


def _plain(value: Any) -> Any:
    """Return arguments without tensors, distinguished by type."""
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    return (type(value), value) if isinstance(value, (bool, int, float)) else value
