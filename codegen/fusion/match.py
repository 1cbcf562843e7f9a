"""Where a pattern is found in a class' body, and whether its calls may become one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from codegen.fusion.template import Bindings, Bound, Either, Is, Op, Pattern, Template, Value
from codegen.program import Call, LayerLoop, Raw, Reshard, Statement, Var


@dataclass(frozen=True, slots=True)
class Flow:
    """Which statement made what a statement reads. Names may be assigned again, as in the source.

    origins: per statement (and for the returned values, last), name -> the statement that assigned it, -1 if none did.
    readers: (statement, name that it assigned) -> the statements that read that value.
    """

    body: tuple[Statement, ...]
    origins: tuple[Mapping[str, int], ...]
    readers: Mapping[tuple[int, str], frozenset[int]]

    @classmethod
    def of(cls, body: tuple[Statement, ...], outputs: tuple[str, ...]) -> Flow:
        latest: dict[str, int] = {}
        origins: list[Mapping[str, int]] = []
        readers: dict[tuple[int, str], frozenset[int]] = {}
        for index, names in enumerate([*(_reads(s) for s in body), frozenset(outputs)]):
            origins.append({name: latest.get(name, -1) for name in names})
            for name, origin in origins[-1].items():
                readers[origin, name] = readers.get((origin, name), frozenset()) | {index}
            if index < len(body):
                latest |= dict.fromkeys(_assigns(body[index]), index)
        return cls(body, tuple(origins), readers)

    def value_at(self, name: str, index: int, without: frozenset[int]) -> int:
        """The statement that assigned `name` last before `index`, if those in `without` were not there."""
        made = (i for i in range(index - 1, -1, -1) if i not in without and name in _assigns(self.body[i]))
        return next(made, -1)


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern's calls in a body. statements: their positions, of which `last` is the last."""

    pattern: Pattern
    bound: Bindings
    statements: frozenset[int]
    last: int


def matches(patterns: Iterable[Pattern], body: tuple[Statement, ...], outputs: tuple[str, ...]) -> tuple[Match, ...]:
    """Every legal match, pattern by pattern; those of different patterns may share calls. outputs: what is returned."""
    flow = Flow.of(body, outputs)
    found = (_find(pattern, position, flow) for pattern in patterns for position in range(len(body)))
    return tuple(match for match in found if match is not None)


@dataclass(frozen=True, slots=True)
class _Found:
    bound: Bindings
    statements: frozenset[int]


def _find(pattern: Pattern, position: int, flow: Flow) -> Match | None:
    """The first legal match whose last call is the statement at `position`."""
    for found in _match_call(pattern.template, position, flow, _Found({}, frozenset())):
        if _is_closed(found, position, flow) and pattern.fits(found.bound):
            return Match(pattern, found.bound, found.statements, position)
    return None


def _is_closed(found: _Found, last: int, flow: Flow) -> bool:
    """Intermediates are read inside only, and what is read from outside has the same value at the last call."""
    inner = found.statements - {last}
    for index in inner:
        if any(flow.readers.get((index, name), frozenset()) - found.statements for name in _assigns(flow.body[index])):
            return False
    leaves = [b for b in found.bound.values() if isinstance(b.value, Var)]
    return all(
        b.origin not in found.statements and flow.value_at(b.value.name, last, inner) == b.origin for b in leaves
    )


def _match(template: Template, value: Any, reader: int, flow: Flow, found: _Found) -> Iterator[_Found]:
    """The ways in which `value`, an argument of the statement `reader`, matches."""
    if isinstance(template, Either):
        for option in template.options:
            yield from _match(option, value, reader, flow, found)
    elif isinstance(template, Is):
        if not isinstance(value, Var) and value == template.value:
            yield found
    elif isinstance(template, Value):
        if not isinstance(value, Var):
            yield from _bind(template.name, Bound(value), found)
    elif isinstance(value, Var):
        origin = flow.origins[reader][value.name]
        if isinstance(template, Op):
            if origin >= 0:
                yield from _match_call(template, origin, flow, found)
            return
        call = flow.body[reader]
        held = dict(call.operands).get(value.name) if isinstance(call, Call) else None
        yield from _bind(template.name, Bound(value, held, origin), found)


def _match_call(template: Op, index: int, flow: Flow, found: _Found) -> Iterator[_Found]:
    call = flow.body[index]
    if not isinstance(call, Call) or call.target != template.target or call.divisor != 1 or len(call.results) != 1:
        return
    if len(call.args) != len(template.args) or any(key not in template.keywords for key, _ in call.kwargs):
        return
    own = {key: Bound(value) for key, value in call.kwargs} | ({template.name: Bound(call)} if template.name else {})
    start = _Found({**found.bound, **own}, found.statements | {index})
    orders = (call.args, call.args[::-1]) if template.commutes else (call.args,)
    for args in orders:
        matched: Iterator[_Found] = iter((start,))
        for wanted, value in zip(template.args, args, strict=True):
            matched = _each(matched, partial(_match, wanted, value, index, flow))
        yield from matched


def _each(founds: Iterator[_Found], step: Callable[[_Found], Iterator[_Found]]) -> Iterator[_Found]:
    for found in founds:
        yield from step(found)


def _bind(name: str, bound: Bound, found: _Found) -> Iterator[_Found]:
    """Nothing where the name stands for something else already."""
    known = found.bound.get(name)
    if known is None or (known.value, known.origin) == (bound.value, bound.origin):
        yield _Found({name: bound, **found.bound}, found.statements)


def _reads(statement: Statement) -> frozenset[str]:
    if isinstance(statement, Reshard):
        return frozenset((statement.source.name,))
    if isinstance(statement, LayerLoop):
        return frozenset(var.name for var in statement.args)
    return frozenset(_names((statement.args, tuple(value for _, value in statement.kwargs))))


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, Var):
        yield value.name
    elif isinstance(value, Raw):
        yield from re.findall(r"(?<![\w.])[A-Za-z_]\w*", value.text)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _names(item)


def _assigns(statement: Statement) -> tuple[str, ...]:
    return (statement.result,) if isinstance(statement, Reshard) else tuple(filter(None, statement.results))
