"""Statements -> source lines: calls chained where the line stays short, reshards with their comments, layer loops."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from codegen.evaluation import UPDATE
from codegen.program import UNREAD, Call, LayerLoop, Program, Raw, Reshard, Statement, Var, assigns, reads
from codegen.schemas import makes_list
from codegen.source.expressions import expression, is_atom, is_method, literal
from codegen.source.reshard_words import Dims, in_words
from codegen.source.text import plain

CHAIN_WIDTH = 104


@dataclass(frozen=True, slots=True)
class _Chain:
    """The line `target = text`. head: target and text of its first call, () where that is a method or stands above."""

    target: str
    text: str
    head: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Aside:
    """Lines after `at` statements that assign nothing to what follows. reads: the variables that they read."""

    at: int
    reads: frozenset[Var]
    lines: tuple[str, ...]


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


def joint_axes(program: Program) -> tuple[tuple[str, ...], ...]:
    """The axes of the mesh that calls take as one."""
    bodies = (cls.body for cls in (*program.layers, program.root))
    calls = (statement for body in bodies for statement in body if isinstance(statement, Call))
    values = (value for call in calls for value in call.args if isinstance(value, Raw) and value.joint)
    return tuple(dict.fromkeys(value.joint for value in values))


def indented(lines: list[str]) -> list[str]:
    """The lines indented as the body of a method, and wrapped."""
    return [f"        {line}" if line else "" for line in lines]


def source_lines(
    body: tuple[Statement, ...],
    outputs: tuple[Var, ...],
    dims: Dims,
    depth: int = 1,
    parted: frozenset[str] = frozenset(),
    aside: Aside | None = None,
) -> list[str]:
    """Source lines, with calls chained and a comment where the user's module (to `depth` names) changes.

    parted: layer classes whose layers are in several loops. aside: what else is written.
    """
    lines: list[str] = []
    section = ""
    chain: _Chain | None = None  # what the last line says, if it can be chained
    written = 0  # statements, so far
    uses = _uses_after(body, outputs)
    masked = _masked_operands(body, uses, aside)
    for position, statement in enumerate(body):
        if aside is not None and position == aside.at:
            lines += aside.lines
            chain = None
        if position < written or position in masked:
            continue
        operands = [reshard for reader, reshard in masked.values() if reader == position]
        if operands and isinstance(statement, Call):
            statement = _with_operands(statement, operands)
        if isinstance(statement, Call):
            here = _section(statement.section, depth)
            text = expression(statement)
            target = ", ".join(_name(result) for result in statement.results)
            if len(statement.results) == 1 and makes_list(statement.target):
                target = f"({target},)"
            longer = _chain(statement, target, text, chain) if chain is not None else None
            if chain is not None and longer is not None:
                lines.pop()
                lines += [" = ".join(chain.head)] if chain.head and not longer.head else []
            elif here != section and here:
                lines.append(f"# {plain(here)}")
                section = here
            lines += [f"# {_last_name(reshard.source)}: {in_words(reshard, dims)}" for reshard in operands]
            chain = longer or _Chain(target, text, () if is_method(statement) else (target, text))
            lines.append(chain.text if statement.target == UPDATE else f"{target} = {chain.text}")
            results = statement.results
            is_read_aside = aside is not None and position < aside.at and results[0] in aside.reads
            if len(results) > 1 or uses[position].get(results[0], 0) != 1 or is_read_aside:
                chain = None
        elif isinstance(statement, Reshard):
            lines.append(_reshard(statement, dims))
            chain = None
        else:
            read_later = {v.name for v in statement.args if uses[position][v]}
            turns = _turns(body[position:])
            if turns is not None:
                lines += turns.lines(lines, read_later)
            else:
                lines += _loop(statement, statement.layer in parted, lines, read_later)
            written, section, chain = position + (turns.num_loops if turns else 1), "", None
    return [*lines, *(aside.lines if aside is not None and aside.at >= len(body) else ())]


def returning(lines: list[str], outputs: tuple[Var, ...]) -> list[str]:
    """With the return of a forward, whose only result gets no name of its own where the last line makes it."""
    names = ", ".join(output.name for output in outputs)
    assignment = f"{names} = "
    if len(outputs) == 1 and lines and lines[-1].startswith(assignment):
        return [*lines[:-1], "return " + lines[-1].removeprefix(assignment)]
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


def _uses_after(body: tuple[Statement, ...], outputs: tuple[Var, ...]) -> list[dict[Var, int]]:
    """Return, by statement, how often what it reads or assigns is read after it before it is assigned again."""
    counts, uses = Counter(outputs), []
    for statement in reversed(body):
        read, assigned = reads(statement), assigns(statement)
        uses.append({variable: counts[variable] for variable in (*read, *assigned)})
        for variable in assigned:
            counts[variable] = 0
        counts.update(read)
    return uses[::-1]


def _masked_operands(
    body: tuple[Statement, ...], uses: list[dict[Var, int]], aside: Aside | None
) -> dict[int, tuple[int, Reshard]]:
    """Return reshards that are written inside the call that alone reads them: position -> (that of the call, reshard).

    These are biases that only the first rank of an axis adds, and so send nothing.
    """
    masked = {}
    for position, reshard in enumerate(body):
        if not isinstance(reshard, Reshard) or reshard.method != "first_rank_only":
            continue
        result = reshard.result
        reader = next((at for at in range(position + 1, len(body)) if result in reads(body[at])), None)
        is_read_once = uses[position][result] == 1 and (aside is None or result not in aside.reads)
        if is_read_once and reader is not None and isinstance(body[reader], Call) and _is_stored(reshard.source):
            masked[position] = reader, reshard
    return masked


def _with_operands(call: Call, reshards: list[Reshard]) -> Call:
    """Return the call with the text of reshards in the place of their results."""
    texts = {reshard.result: Raw(_reshard_call(reshard), (reshard.source,)) for reshard in reshards}

    def written(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(written, value))
        return texts.get(value, value) if isinstance(value, Var) else value

    return replace(call, args=written(call.args), kwargs=tuple((name, written(value)) for name, value in call.kwargs))


def _is_stored(source: Var) -> bool:
    """Whether a variable is a parameter or buffer, which no statement assigns."""
    return source.name.startswith("self.")


def _last_name(source: Var) -> str:
    return source.name.rpartition(".")[2]


def _name(result: Var) -> str:
    return "_" if result == UNREAD else result.name


def _reshard(statement: Reshard, dims: Dims) -> str:
    return f"{statement.result.name} = {_reshard_call(statement)}  # {in_words(statement, dims)}"


def _reshard_call(statement: Reshard) -> str:
    kwargs = "".join(f", {key}={literal(value)}" for key, value in statement.kwargs)
    return f"{statement.axis}.{statement.method}({statement.source.name}{kwargs})"


def _loop(loop: LayerLoop, is_part: bool, before: list[str], read_later: set[str]) -> list[str]:
    """Carried values get the result names before the loop starts, in the line that makes them if that is the last one.

    is_part: other loops have layers of the class too. before: the lines so far. read_later: arguments that are.
    """
    lines, arguments = [], [var.name for var in loop.args]
    for position, output in loop.carried:
        lines += _handed_over(loop.results[output].name, position, arguments, before, read_later)
    where = (str(loop.first), str(loop.first + loop.count)) if is_part else ()
    return [*lines, *_loop_lines(loop, where, arguments)]


def _handed_over(name: str, position: int, arguments: list[str], before: list[str], read_later: set[str]) -> list[str]:
    """Lines that give an argument another name, which it gets in `arguments` too."""
    argument, lines = arguments[position], list[str]()
    if (
        before
        and before[-1].startswith(f"{argument} = ")
        and arguments.count(argument) == 1
        and argument not in read_later
    ):
        before[-1] = name + before[-1].removeprefix(argument)
    elif argument != name:
        lines.append(f"{name} = {argument}")
    arguments[position] = name
    return lines


def _loop_lines(loop: LayerLoop, where: tuple[str, ...], arguments: list[str]) -> list[str]:
    """The loop itself, over the layers from one number to another, or over all of the class."""
    instances = f"self.layers_of({', '.join((loop.layer, *where))})"
    targets = ", ".join(_name(result) for result in loop.results)
    return [f"for layer in {instances}:", f"    {targets} = layer({', '.join(arguments)})"]


@dataclass(frozen=True, slots=True)
class _Turns:
    """Loops that come again and again in one order, `count` times, each over the layers that follow its last ones.

    entering: arguments of the first loop that are results of the turn before it, by the names that they have there.
    """

    loops: tuple[LayerLoop, ...]
    strides: tuple[int, ...]
    entering: tuple[tuple[int, str], ...]
    count: int

    @property
    def num_loops(self) -> int:
        return len(self.loops) * self.count

    def lines(self, before: list[str], read_later: set[str]) -> list[str]:
        """One loop over the turns."""
        lines, inner = list[str](), list[str]()
        for number, (loop, stride) in enumerate(zip(self.loops, self.strides, strict=True)):
            arguments = [var.name for var in loop.args]
            for position, name in () if number else self.entering:
                lines += _handed_over(name, position, arguments, before, read_later)
            for position, output in loop.carried:
                inner += _handed_over(loop.results[output].name, position, arguments, [], set())
            start = "turn" if stride == 1 else f"{stride} * turn"
            where = (start if not at else f"{start} + {at}" for at in (loop.first, loop.first + loop.count))
            inner += _loop_lines(loop, tuple(where), arguments)
        return [*lines, f"for turn in range({self.count}):", *(f"    {line}" for line in inner)]


def _turns(body: tuple[Statement, ...]) -> _Turns | None:
    """The turns that the first statements are, of the fewest loops each; None where they are none."""
    loops = []
    for statement in body:
        if not isinstance(statement, LayerLoop):
            break
        loops.append(statement)
    for length in range(1, len(loops) // 2 + 1):
        first, second, *others = (tuple(loops[i : i + length]) for i in range(0, len(loops) - length + 1, length))
        if any(a.layer != b.layer for a, b in zip(first, second, strict=True)):
            continue
        strides = tuple(b.first - a.first for a, b in zip(first, second, strict=True))
        result_names = {_name(result) for result in first[-1].results}
        entering = tuple((i, var.name) for i, var in enumerate(second[0].args) if var.name in result_names)
        if not _is_entered(first, entering):
            continue
        count = 1
        for other in (second, *others):
            if not _comes_again(first, strides, entering, count, other):
                break
            count += 1
        if count > 1:
            return _Turns(first, strides, entering, count)
    return None


def _is_entered(turn: tuple[LayerLoop, ...], entering: tuple[tuple[int, str], ...]) -> bool:
    """Whether nothing in the turn reads, under one of these names, what was there before it."""
    carried, positions = {name for _, name in entering}, {position for position, _ in entering}
    if any(var.name in carried for i, var in enumerate(turn[0].args) if i not in positions):
        return False
    for before, loop in itertools.pairwise(turn):
        carried -= {_name(result) for result in before.results}
        if any(var.name in carried for var in loop.args):
            return False
    return True


def _comes_again(
    turn: tuple[LayerLoop, ...],
    strides: tuple[int, ...],
    entering: tuple[tuple[int, str], ...],
    number: int,
    other: tuple[LayerLoop, ...],
) -> bool:
    """Whether the numbered turn is the first one with later layers."""
    here = [_written(loop, loop.first + number * by) for loop, by in zip(turn, strides, strict=True)]
    for position, name in entering:
        here[0][0][position] = name
    return here == [_written(loop, loop.first) for loop in other]


def _written(loop: LayerLoop, first: int) -> tuple[list[str], tuple[object, ...]]:
    """The names of a loop's arguments, and all else that its lines say."""
    results = [_name(result) for result in loop.results]
    return [var.name for var in loop.args], (loop.layer, first, loop.count, loop.carried, results)
