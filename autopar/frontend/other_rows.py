"""Derive the graph for another number of rows, from the exported one and two recorded forwards.

An export costs a hundred times as much as a forward under `recorder.py`. A second export of the same model differs in
numbers only: sizes that grow with the batch. Two records tell these numbers. The record with the exported number of
rows must have the exported operators, in their order, with their numbers, shapes and wiring. The record with the other
number must be the same except for numbers and shapes, which are then put into the exported graph. Where either fails
(an operator that depends on the batch, one that only an export sees), a second export is needed.

These differences between a record and an export of the same forward are ignored: assertions about metadata, which only
the export has; detached copies (of the result of `arange`), which only the record has; trailing arguments with their
default value, which the record leaves out; whether a norm may use cuDNN; and the name of the operator that takes a
constant in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.frontend.fx_import import LOGITS, FlatGraph
from autopar.frontend.overloads import kept_kwargs
from autopar.frontend.recorder import Record, Source
from autopar.frontend.simplify import drop_no_effect
from autopar.ir.graph import Node, Ref, TensorMeta, batch_key, refs_in
from autopar.operators.schemas import argument_names, find_op

_LIFTED = {"aten.lift_fresh.default": "aten.lift_fresh_copy.default"}


class UnlikeError(ValueError):
    """The exported graph and the records do not determine the graph for another number of rows."""


def with_rows_of(flat: FlatGraph, exported: Record, other: Record, inputs: Mapping[str, Any]) -> FlatGraph:
    """Return `flat` with the numbers of `other`.

    flat: as imported, not simplified. exported: a record of the same forward on the same shapes. other: one on the
    shapes of `inputs` (the batch by name). Raises UnlikeError where a second export is needed.
    """
    if not _alike(exported.outside, other.outside):
        raise UnlikeError("another number of rows calls other operators")
    plain = flat.copy()
    drop_no_effect(plain)
    calls, marks = [n for n in plain.nodes if n.op != LOGITS], [n for n in plain.nodes if n.op == LOGITS]
    plain.nodes = calls
    places = Places(plain, exported).find()
    plain.nodes = [_renumbered(n, other.outside[i]) for n, i in zip(calls, places, strict=True)] + marks
    plain.inputs = {
        name: replace(meta, shape=tuple(inputs[batch_key(name)].shape)) for name, meta in flat.inputs.items()
    }
    return plain


def _alike(one: Any, two: Any) -> bool:
    """Return whether two records, or parts of them, differ in numbers and shapes only."""
    if isinstance(one, Source) or isinstance(two, Source):
        return type(one) is type(two) and bool(one == two)
    if isinstance(one, (tuple, list)):
        return type(one) is type(two) and len(one) == len(two) and all(map(_alike, one, two))
    is_number = isinstance(one, (int, float)) and not isinstance(one, bool)
    return type(one) is type(two) and (is_number or bool(one == two))


class Places:
    """Find the record's entry for each exported node."""

    def __init__(self, flat: FlatGraph, record: Record) -> None:
        self.flat = flat
        self.entries = record.outside
        self.sources: dict[Ref, Any] = {Ref(name): ("tensor", name) for name in flat.parameters}
        self.sources |= {Ref(name): ("input", batch_key(name)) for name in flat.inputs}
        for name in flat.constants:  # bound where they are first used
            del self.sources[Ref(name)]
        self.undetached: dict[Any, Any] = {}  # result of a `detach` that the export left out -> its operand

    def find(self) -> list[int]:
        """Find the entries. Raises UnlikeError unless every node has one, in order."""
        places: list[int] = []
        place = 0
        for node in self.flat.nodes:
            while not self.matches(node, place):
                self.skip(place)
                place += 1
            for index, (_, _, *itself) in enumerate(self.entries[place][2:]):
                origin = self.origin(itself[0]) if itself else ("result", place + 1, index)
                self.sources[Ref(node.name, index)] = origin
            places.append(place)
            place += 1
        for rest in range(place, len(self.entries) - 1):
            self.skip(rest)
        if not self.same(self.flat.loss, self.entries[-1][1]):
            raise UnlikeError("the loss is another tensor")
        return places

    def skip(self, place: int) -> None:
        """Skip an entry that was not exported: a `detach`, a change of grad mode, or an unused call."""
        if place >= len(self.entries) - 1:
            raise UnlikeError("an exported operator is not recorded")
        func, *rest = self.entries[place]
        if str(func) == "aten.detach.default":
            ((source,), _), *_ = rest
            self.undetached["result", place + 1, 0] = self.origin(source)

    def matches(self, node: Node, place: int) -> bool:
        if place >= len(self.entries) - 1:
            return False
        func, *rest = self.entries[place]
        name = str(func)
        if _LIFTED.get(name, name) != node.op:
            return False
        (args, kwargs), *results = rest
        named = tuple(kept_kwargs(name, dict(kwargs)).items())
        args = _as_exported(node, args)
        have, want = [(shape, dtype) for shape, dtype, *_ in results], [(m.shape, m.dtype) for m in node.outputs]
        if len(node.args) < len(args) or any(refs_in(node.args[len(args) :])):
            return False
        return have == want and self.same((node.args[: len(args)], node.kwargs), (args, named))

    def same(self, exported: Any, recorded: Any) -> bool:
        if isinstance(exported, Ref):
            if not isinstance(recorded, Source):
                return False
            origin = self.origin(recorded)
            if exported.node in self.flat.constants and origin[0] == "constant":
                return bool(self.sources.setdefault(exported, origin) == origin)
            return bool(self.sources.get(exported) == origin)
        if isinstance(exported, tuple):
            is_alike = isinstance(recorded, tuple) and len(exported) == len(recorded)
            return is_alike and all(map(self.same, exported, recorded))
        return type(exported) is type(recorded) and bool(exported == recorded)

    def origin(self, source: Source) -> Any:
        """Return the name of a source as if no run were watched, where every source is outside: ("outside", name)."""
        name = source[1]
        return self.undetached.get(name, name)


def _renumbered(node: Node, entry: list[Any]) -> Node:
    """Return `node` with the numbers and shapes of a record's entry."""
    func, (args, kwargs), *results = entry
    named = tuple(kept_kwargs(str(func), dict(kwargs)).items())
    outputs = tuple(
        TensorMeta(shape, dtype, meta.requires_grad)
        for (shape, dtype, *_), meta in zip(results, node.outputs, strict=True)
    )
    args = _as_exported(node, args)
    defaults = node.args[len(args) :]
    return replace(
        node,
        args=_numbers(node.args[: len(args)], args) + defaults,
        kwargs=_numbers(node.kwargs, named),
        outputs=outputs,
    )


def _as_exported(node: Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return recorded arguments with the export's value for cuDNN, the last argument of norms."""
    op = find_op(node.op)
    is_said = op is not None and argument_names(op)[-1:] == ("cudnn_enabled",) and len(args) == len(node.args)
    return (*args[:-1], node.args[-1]) if is_said else args


def _numbers(exported: Any, recorded: Any) -> Any:
    if isinstance(exported, Ref):
        return exported
    if isinstance(exported, tuple):
        return tuple(map(_numbers, exported, recorded))
    return recorded
