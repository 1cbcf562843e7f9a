"""Matches of a pattern in a class' body, and whether their calls may become one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from codegen.fusion.template import Behind, Bindings, Bound, Either, Is, Op, Pattern, Template, Value
from codegen.program import UNREAD, Call, Statement, Var, assigns, reads


@dataclass(frozen=True, slots=True)
class Flow:
    """The statement that made what a statement reads. Names may be assigned again, as in the source.

    origins: per statement (and for the returned values, last), name -> the statement that assigned it, -1 if none did.
    readers: (statement, name that it assigned) -> the statements that read that value.
    calls: target -> the calls of it. assigned: name -> the statements that assign it.
    """

    body: tuple[Statement, ...]
    origins: tuple[Mapping[str, int], ...]
    readers: Mapping[tuple[int, str], frozenset[int]]
    calls: Mapping[str, tuple[int, ...]]
    assigned: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, body: tuple[Statement, ...], outputs: tuple[Var, ...]) -> Flow:
        latest: dict[str, int] = {}
        origins: list[Mapping[str, int]] = []
        readers: dict[tuple[int, str], frozenset[int]] = {}
        calls: dict[str, tuple[int, ...]] = {}
        assigned: dict[str, tuple[int, ...]] = {}
        for index, variables in enumerate([*map(reads, body), outputs]):
            origins.append({variable.name: latest.get(variable.name, -1) for variable in variables})
            for name, origin in origins[-1].items():
                readers[origin, name] = readers.get((origin, name), frozenset()) | {index}
            if index < len(body):
                statement = body[index]
                for name in _assigns(statement):
                    latest[name] = index
                    assigned[name] = (*assigned.get(name, ()), index)
                if isinstance(statement, Call):
                    calls[statement.target] = (*calls.get(statement.target, ()), index)
        return cls(body, tuple(origins), readers, calls, assigned)

    def value_at(self, name: str, index: int, without: frozenset[int]) -> int:
        """The statement that assigned `name` last before `index`, if those in `without` were not there."""
        earlier = (i for i in reversed(self.assigned.get(name, ())) if i < index and i not in without)
        return next(earlier, -1)

    def may_move(self, index: int, to: int) -> bool:
        """Whether the results of the statement at `index` may have their names from the earlier `to` on."""
        between = range(to, index)
        names = _assigns(self.body[index])
        return not any(name in self.origins[i] or i in self.assigned[name] for name in names for i in between)


@dataclass(frozen=True, slots=True)
class Match:
    """A pattern's calls in a body. statements: their positions, of which `last` is the last."""

    pattern: Pattern
    bound: Bindings
    statements: frozenset[int]
    last: int


def matches(patterns: Iterable[Pattern], body: tuple[Statement, ...], outputs: tuple[Var, ...]) -> tuple[Match, ...]:
    """Every legal match, pattern by pattern; those of different patterns may share calls. outputs: what is returned."""
    flow = Flow.of(body, outputs)
    places = ((pattern, index) for pattern in patterns for index in flow.calls.get(pattern.template.target, ()))
    matched = (_find(pattern, index, flow) for pattern, index in places)
    return tuple(match for match in matched if match is not None)


@dataclass(frozen=True, slots=True)
class _Found:
    bound: Bindings
    statements: frozenset[int]


def _find(pattern: Pattern, position: int, flow: Flow) -> Match | None:
    """The first legal match whose last call is the statement at `position`."""
    founds = _match_call(pattern.template, position, flow, _Found({}, frozenset()))
    for beside in pattern.beside:
        founds = _each(founds, partial(_match_before, beside, position, flow))
    for state in founds:
        bound = _closed(pattern, state, position, flow)
        if bound is not None and pattern.fits(bound):
            return Match(pattern, bound, state.statements, position)
    return None


def _match_before(template: Op, position: int, flow: Flow, state: _Found) -> Iterator[_Found]:
    """The ways in which a call before `position` matches that is not part of it yet, the nearest first."""
    for index in reversed(flow.calls.get(template.target, ())):
        if index < position and index not in state.statements:
            yield from _match_call(template, index, flow, state)


def _closed(pattern: Pattern, state: _Found, last: int, flow: Flow) -> Bindings | None:
    """The bindings, with UNREAD for results that nobody reads; None where the last call cannot stand for all.

    It can where intermediates are read inside only, results after it, and what is read from outside has the same value
    there. A result that is read after it was not assigned again since.
    """
    results = {state.bound[result.name].origin: result.name for result in pattern.results}
    inner = state.statements - {last}
    bound = dict(state.bound)
    for index in inner:
        outside = frozenset[int]().union(*(flow.readers.get((index, name), ()) for name in _assigns(flow.body[index])))
        outside -= state.statements
        if outside and (index not in results or min(outside) < last):
            return None
        if index in results and not outside:
            call: Call = bound[results[index]].value
            bound[results[index]] = replace(bound[results[index]], value=replace(call, results=(UNREAD,)))
    leaves = [b for b in bound.values() if isinstance(b.value, Var)]
    is_same = all(
        b.origin not in state.statements and flow.value_at(b.value.name, last, inner) == b.origin for b in leaves
    )
    return bound if is_same else None


def _match(template: Template, value: Any, reader: int, flow: Flow, state: _Found) -> Iterator[_Found]:
    """The ways in which `value`, an argument of the statement `reader`, matches."""
    if isinstance(template, Either):
        for option in template.options:
            yield from _match(option, value, reader, flow, state)
    elif isinstance(template, Behind):
        origin = flow.origins[reader][value.name] if isinstance(value, Var) else -1
        call = flow.body[origin] if origin >= 0 else None
        if isinstance(call, Call) and call.target in template.targets and call.divisor == 1 == len(call.results):
            through = replace(state, statements=state.statements | {origin})
            yield from _match(template, call.args[0], origin, flow, through)
        yield from _match(template.x, value, reader, flow, state)
    elif isinstance(template, tuple):
        if isinstance(value, tuple) and len(value) == len(template):
            yield from _match_all(template, value, reader, flow, state)
    elif isinstance(template, Is):
        if not isinstance(value, Var) and value == template.value:
            yield state
    elif isinstance(template, Value):
        if not isinstance(value, Var):
            yield from _bind(template.name, Bound(value), state)
    elif isinstance(value, Var):
        origin = flow.origins[reader][value.name]
        if isinstance(template, Op):
            if origin >= 0:
                yield from _match_call(template, origin, flow, state)
            return
        yield from _bind(template.name, Bound(value, origin), state)


def _match_call(template: Op, index: int, flow: Flow, state: _Found) -> Iterator[_Found]:
    call = flow.body[index]
    if not isinstance(call, Call) or call.target != template.target or call.divisor != 1 or len(call.results) != 1:
        return
    if len(call.args) != len(template.args) or any(key not in template.keywords for key, _ in call.kwargs):
        return
    orders = (call.args, (*call.args[1::-1], *call.args[2:])) if template.commutes else (call.args,)
    possible = [args for args in orders if _may_match(template.args, args, index, flow)]
    if not possible:
        return
    start = iter((_Found(state.bound, state.statements | {index}),))
    captured = [(key, Bound(value)) for key, value in call.kwargs]
    for name, bound in [*captured, *([(template.name, Bound(call, index))] if template.name else [])]:
        start = _each(start, partial(_bind, name, bound))
    for state_bound in start:
        for args in possible:
            yield from _match_all(template.args, args, index, flow, state_bound)


def _may_match(templates: tuple[Template, ...], values: tuple[Any, ...], reader: int, flow: Flow) -> bool:
    """A look at the calls behind arguments: most orders and options are no match already there, and it costs little."""
    for template, value in zip(templates, values, strict=True):
        if isinstance(template, Op):
            origin = flow.origins[reader][value.name] if isinstance(value, Var) else -1
            call = flow.body[origin] if origin >= 0 else None
            if not isinstance(call, Call) or call.target != template.target:
                return False
        elif isinstance(template, Either):
            if not any(_may_match((option,), (value,), reader, flow) for option in template.options):
                return False
        elif isinstance(template, (Is, Value)) and isinstance(value, Var):
            return False
    return True


def _match_all(
    templates: tuple[Template, ...], values: tuple[Any, ...], reader: int, flow: Flow, state: _Found
) -> Iterator[_Found]:
    matched: Iterator[_Found] = iter((state,))
    for wanted, value in zip(templates, values, strict=True):
        matched = _each(matched, partial(_match, wanted, value, reader, flow))
    yield from matched


def _each(founds: Iterator[_Found], step: Callable[[_Found], Iterator[_Found]]) -> Iterator[_Found]:
    for state in founds:
        yield from step(state)


def _bind(name: str, bound: Bound, state: _Found) -> Iterator[_Found]:
    """The match with a name bound; nothing where the name stands for something else already."""
    earlier = state.bound.get(name)
    if earlier is None or (earlier.value, earlier.origin) == (bound.value, bound.origin):
        yield _Found({name: bound, **state.bound}, state.statements)


def _assigns(statement: Statement) -> tuple[str, ...]:
    return tuple(variable.name for variable in assigns(statement))
