"""Statements -> source lines: calls chained where the line stays short, reshards with their comments, layer loops."""

from __future__ import annotations

import re
from collections.abc import Iterable

from codegen.expressions import expression, is_atom, is_method, literal
from codegen.program import Call, LayerLoop, Program, Reshard, Statement, Var
from codegen.text import plain

CHAIN_WIDTH = 104


def axes(program: Program, statements: Iterable[Statement]) -> list[str]:
    """`dp, tp = self.mesh.dp, self.mesh.tp` for the axes that the statements name."""
    used = set()
    for statement in statements:
        if isinstance(statement, Reshard):
            used.add(statement.axis)
        elif isinstance(statement, Call):
            text = expression(statement)
            used |= {axis for axis in program.axes if re.search(rf"(?<![\w.]){axis}\b(?!=)", text)}
    named = [axis for axis in program.axes if axis in used]
    if not named:
        return []
    return [f"{', '.join(named)} = {', '.join(f'self.mesh.{axis}' for axis in named)}"]


def indented(lines: list[str]) -> list[str]:
    """As the body of a method."""
    return [f"        {line}" if line else "" for line in lines]


def source_lines(
    body: tuple[Statement, ...], outputs: tuple[str, ...], depth: int = 1, parted: frozenset[str] = frozenset()
) -> list[str]:
    """Source lines, with calls chained and a comment where the user's module (to `depth` names) changes.

    parted: layer classes whose layers are in several loops.
    """
    lines: list[str] = []
    section = ""
    previous: tuple[str, str] | None = None  # (variable, expression) of the last line if it can be chained
    for position, statement in enumerate(body):
        if isinstance(statement, Call):
            here = _section(statement.section, depth)
            text = expression(statement)
            target = ", ".join(name or "_" for name in statement.results)
            chained = _chain(statement, text, previous, CHAIN_WIDTH - len(target))
            if chained is not None:
                lines.pop()
                text = chained
            elif here != section and here:
                lines.append(f"# {plain(here)}")
                section = here
            lines.append(f"{target} = {text}")
            is_single = len(statement.results) == 1 and _uses_after(position, target, body, outputs) == 1
            previous = (target, text) if is_single else None
        elif isinstance(statement, Reshard):
            lines.append(_reshard(statement))
            previous = None
        else:
            lines += _loop(statement, statement.layer in parted)
            section, previous = "", None
    return lines


def _section(module: str, depth: int) -> str:
    """The part of a module path that a reader wants as a heading."""
    return ".".join(module.split(".")[:depth])


def _chain(call: Call, text: str, previous: tuple[str, str] | None, width: int) -> str | None:
    """`call` appended to the line before it, if it is a method of that line's result and its only use."""
    if previous is None or not is_method(call) or not isinstance(call.args[0], Var):
        return None
    variable, before = previous
    if call.args[0].name != variable or not text.startswith(f"{variable}."):
        return None
    joined = before + text.removeprefix(variable)
    return joined if before.endswith((")", "]")) and is_atom(before) and len(joined) < width else None


def _uses_after(position: int, name: str, body: tuple[Statement, ...], outputs: tuple[str, ...]) -> int:
    """How often the variable assigned at `position` is read before it is assigned again."""
    count = 0
    for statement in body[position + 1 :]:
        count += _names_in(statement).count(name)
        if name in _assigned(statement):
            return count
    return count + outputs.count(name)


def _assigned(statement: Statement) -> tuple[str, ...]:
    return (statement.result,) if isinstance(statement, Reshard) else statement.results


def _names_in(statement: Statement) -> list[str]:
    if isinstance(statement, Reshard):
        return [statement.source.name]
    if isinstance(statement, LayerLoop):
        return [var.name for var in statement.args]
    return re.findall(r"(?<![\w.])[A-Za-z_]\w*", expression(statement))


def _reshard(statement: Reshard) -> str:
    kwargs = "".join(f", {key}={literal(value)}" for key, value in statement.kwargs)
    text = f"{statement.result} = {statement.axis}.{statement.method}({statement.source.name}{kwargs})"
    return f"{text}  # {plain(statement.comment)}"


def _loop(loop: LayerLoop, is_part: bool) -> list[str]:
    """Carried values get the result names before the loop starts. is_part: other loops have layers of the class too."""
    carried = dict(loop.carried)
    lines = []
    arguments = [var.name for var in loop.args]
    for position, output in carried.items():
        if arguments[position] != loop.results[output]:
            lines.append(f"{loop.results[output]} = {arguments[position]}")
        arguments[position] = loop.results[output]
    instances = f"self.layers_of({loop.layer})"
    if is_part:
        instances = f"self.layers_of({loop.layer}, {loop.first}, {loop.first + loop.count})"
    targets = ", ".join(name or "_" for name in loop.results)
    return [*lines, f"for layer in {instances}:", f"    {targets} = layer({', '.join(arguments)})"]
