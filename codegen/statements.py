"""Statements -> source lines: calls chained where the line stays short, reshards with their comments, layer loops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from codegen.expressions import expression, is_atom, is_method, literal
from codegen.program import UNREAD, Call, LayerLoop, Program, Raw, Reshard, Statement, Var, assigns, reads
from codegen.reshard_words import Dims, in_words
from codegen.text import plain

CHAIN_WIDTH = 104


@dataclass(frozen=True, slots=True)
class _Chain:
    """The line `target = text`. head: target and text of its first call, () where that is a method or stands above."""

    target: str
    text: str
    head: tuple[str, ...] = ()


def axes(program: Program, statements: Iterable[Statement]) -> list[str]:
    """`dp, tp = self.mesh.dp, self.mesh.tp` for the axes that the statements name."""
    used = set()
    for statement in statements:
        if isinstance(statement, Reshard):
            used.add(statement.axis)
        elif isinstance(statement, Call):
            values = (*statement.args, *(value for _, value in statement.kwargs))
            used |= {value.text for value in values if isinstance(value, Raw)}
    named = [axis for axis in program.axes if axis in used]
    if not named:
        return []
    return [f"{', '.join(named)} = {', '.join(f'self.mesh.{axis}' for axis in named)}"]


def indented(lines: list[str]) -> list[str]:
    """The lines indented as the body of a method, and wrapped."""
    return [f"        {line}" if line else "" for line in lines]


def source_lines(
    body: tuple[Statement, ...],
    outputs: tuple[Var, ...],
    dims: Dims,
    depth: int = 1,
    parted: frozenset[str] = frozenset(),
) -> list[str]:
    """Source lines, with calls chained and a comment where the user's module (to `depth` names) changes.

    parted: layer classes whose layers are in several loops.
    """
    lines: list[str] = []
    section = ""
    chain: _Chain | None = None  # what the last line says, if it can be chained
    for position, statement in enumerate(body):
        if isinstance(statement, Call):
            here = _section(statement.section, depth)
            text = expression(statement)
            target = ", ".join(_name(result) for result in statement.results)
            longer = _chain(statement, target, text, chain) if chain is not None else None
            if chain is not None and longer is not None:
                lines.pop()
                lines += [" = ".join(chain.head)] if chain.head and not longer.head else []
            elif here != section and here:
                lines.append(f"# {plain(here)}")
                section = here
            chain = longer or _Chain(target, text, () if is_method(statement) else (target, text))
            lines.append(f"{target} = {chain.text}")
            results = statement.results
            if len(results) > 1 or _uses_after(position, results[0], body, outputs) != 1:
                chain = None
        elif isinstance(statement, Reshard):
            lines.append(_reshard(statement, dims))
            chain = None
        else:
            read_later = {v.name for v in statement.args if _uses_after(position, v, body, outputs)}
            lines += _loop(statement, statement.layer in parted, lines, read_later)
            section, chain = "", None
    return lines


def returning(lines: list[str], outputs: tuple[Var, ...]) -> list[str]:
    """With the return of a forward, whose only result gets no name of its own where the last line makes it."""
    names = ", ".join(output.name for output in outputs)
    own = f"{names} = "
    if len(outputs) == 1 and lines and lines[-1].startswith(own):
        return [*lines[:-1], "return " + lines[-1].removeprefix(own)]
    return [*lines, f"return {names}"]


def _section(module: str, depth: int) -> str:
    """The part of a module path that a reader wants as a heading."""
    return ".".join(module.split(".")[:depth])


def _chain(call: Call, target: str, text: str, before: _Chain) -> _Chain | None:
    """`call` appended to the line before it, if it is a method of that line's result and its only use.

    Where that line gets too long, all methods go to one of their own, behind the first call's result.
    """
    if not is_method(call) or not isinstance(call.args[0], Var) or call.args[0].name != before.target:
        return None
    if not text.startswith(f"{before.target}.") or not before.text.endswith((")", "]")) or not is_atom(before.text):
        return None
    method = text.removeprefix(before.target)
    if len(before.text + method) < CHAIN_WIDTH - len(target):
        return replace(before, target=target, text=before.text + method)
    if not before.head or before.text == before.head[1]:
        return None
    apart = before.head[0] + before.text.removeprefix(before.head[1]) + method
    return _Chain(target, apart) if len(apart) < CHAIN_WIDTH - len(target) else None


def _uses_after(position: int, variable: Var, body: tuple[Statement, ...], outputs: tuple[Var, ...]) -> int:
    """How often the variable assigned at `position` is read before it is assigned again."""
    count = 0
    for statement in body[position + 1 :]:
        count += reads(statement).count(variable)
        if variable in assigns(statement):
            return count
    return count + outputs.count(variable)


def _name(result: Var) -> str:
    return "_" if result == UNREAD else result.name


def _reshard(statement: Reshard, dims: Dims) -> str:
    kwargs = "".join(f", {key}={literal(value)}" for key, value in statement.kwargs)
    text = f"{statement.result.name} = {statement.axis}.{statement.method}({statement.source.name}{kwargs})"
    return f"{text}  # {in_words(statement, dims)}"


def _loop(loop: LayerLoop, is_part: bool, before: list[str], read_later: set[str]) -> list[str]:
    """Carried values get the result names before the loop starts, in the line that makes them if that is the last one.

    is_part: other loops have layers of the class too. before: the lines so far. read_later: arguments that are.
    """
    carried = dict(loop.carried)
    lines = []
    arguments = [var.name for var in loop.args]
    for position, output in carried.items():
        name, given = loop.results[output].name, arguments[position]
        if before and before[-1].startswith(f"{given} = ") and arguments.count(given) == 1 and given not in read_later:
            before[-1] = name + before[-1].removeprefix(given)
        elif given != name:
            lines.append(f"{name} = {given}")
        arguments[position] = name
    instances = f"self.layers_of({loop.layer})"
    if is_part:
        instances = f"self.layers_of({loop.layer}, {loop.first}, {loop.first + loop.count})"
    targets = ", ".join(_name(result) for result in loop.results)
    return [*lines, f"for layer in {instances}:", f"    {targets} = layer({', '.join(arguments)})"]
