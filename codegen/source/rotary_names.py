"""One name for a tensor before and after it is rotated: `query, key = rotary(query, key, cos, sin)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from codegen.program import Call, LayerLoop, ModuleClass, Program, Raw, Reshard, Statement, Var, assigns, reads

ROTATIONS = ("idioms.rotary", "kernels.rotary")
"""Calls whose results are their first operands, rotated."""


def with_rotary_names(program: Program) -> Program:
    """Return the program with the operands of rotations called as the results, where nothing else has the name."""
    read_aside = {var for statement in program.giving_logits for var in reads(statement)}
    root = _renamed(program.root, read_aside)
    return replace(program, root=root, layers=tuple(_renamed(layer, set()) for layer in program.layers))


def _renamed(cls: ModuleClass, read_aside: set[Var]) -> ModuleClass:
    """read_aside: variables of the class that statements outside of its body read."""
    body, taken = list(cls.body), {*cls.inputs, *cls.outputs, *read_aside}
    for position, statement in enumerate(body):
        if not isinstance(statement, Call) or statement.target not in ROTATIONS:
            continue
        before, after = body[:position], body[position + 1 :]
        defined = {var for call in before for var in (*reads(call), *assigns(call))} | taken
        kept = {var for call in after for var in reads(call)} | {var for call in before for var in _expressions(call)}
        names = {
            operand.name: result.name
            for operand, result in zip(statement.args, statement.results, strict=False)
            if isinstance(operand, Var) and not operand.is_stored
            if operand not in kept | taken and result not in defined
        }
        body[position] = replace(statement, args=_with(names, statement.args))
        body[:position] = [_statement(call, names) for call in before]
    return replace(cls, body=tuple(body))


def _expressions(value: Any) -> Iterator[Var]:
    """The variables in expressions that are text."""
    if isinstance(value, Raw):
        yield from value.reads
    elif isinstance(value, tuple):
        for item in value:
            yield from _expressions(item)
    elif isinstance(value, Call):
        yield from _expressions((value.args, tuple(argument for _, argument in value.kwargs)))


def _statement(statement: Statement, names: Mapping[str, str]) -> Statement:
    if isinstance(statement, Reshard):
        return replace(statement, source=_with(names, statement.source), result=_with(names, statement.result))
    results = _with(names, statement.results)
    if isinstance(statement, LayerLoop):
        return replace(statement, args=_with(names, statement.args), results=results)
    return replace(statement, args=_with(names, statement.args), kwargs=_with(names, statement.kwargs), results=results)


def _with(names: Mapping[str, str], value: Any) -> Any:
    """A value with variables of these names called otherwise."""
    if isinstance(value, Var):
        return replace(value, name=names.get(value.name, value.name))
    if isinstance(value, tuple):
        return tuple(_with(names, item) for item in value)
    return value
