"""Sizes of one rank by name, where a program knows what a dim is: `x.view(BATCH, SEQUENCE, HEADS, HEAD_DIM)`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from codegen.program import Call, Program, Raw, Statement, assigns, axes_text, reads
from codegen.runtime.parameters import parse_placement

_SIZES: Mapping[str, int] = {
    "aten.view.default": 1,
    "aten.reshape.default": 1,
    "aten.expand.default": 1,
    "aten.arange.default": 0,
}
"""Call -> which argument has the sizes of all dims of the result."""

_OF_ONE_RANK: Mapping[str, str] = {"BATCH": "rows", "HEADS": "heads", "KV_HEADS": "heads of keys and values"}
"""Roles whose names mean one rank's share where ranks share them."""

_ORDER: Mapping[str, int] = {"BATCH": 0, "HEADS": 2, "KV_HEADS": 3, "HEAD_DIM": 4}
"""Lengths of sequences, which have several names, come after the batch."""


@dataclass(frozen=True, slots=True)
class Size:
    """One rank's part of a dim: what the dim is, its whole size, and the axes that cut it, with their sizes."""

    role: str
    whole: int
    cuts: tuple[tuple[str, int], ...]

    @property
    def local(self) -> int:
        """How many of the dim one rank has."""
        return self.whole // math.prod(size for _, size in self.cuts)


def with_sizes(program: Program) -> tuple[Program, Mapping[str, str]]:
    """The program with names for sizes, and the line that defines each name, in the order in which they stand.

    A role that ranks cut in several ways keeps its numbers, as does one whose name the program has for something else.
    """
    root = program.root
    bodies = [("", body) for body in (root.body, program.count_targets, program.whole_sums)]
    bodies += [(layer.name, layer.body) for layer in program.layers]
    used = {size for scope, body in bodies for s in body for size in _sizes(program, scope, s).values()}
    names = _names(used, _taken(program))

    def named(scope: str, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(_named(s, {n: names.get(z, "") for n, z in _sizes(program, scope, s).items()}) for s in body)

    found = replace(
        program,
        root=replace(root, body=named("", root.body)),
        layers=tuple(replace(layer, body=named(layer.name, layer.body)) for layer in program.layers),
        count_targets=named("", program.count_targets),
        whole_sums=named("", program.whole_sums),
    )
    lines: dict[str, str] = {}
    for size in sorted(names, key=lambda size: (_ORDER.get(size.role, 1), size.role, size.cuts)):
        lines |= _definitions(program, size, names[size])
    return found, lines


def needed(lines: Mapping[str, str], text: str) -> list[str]:
    """The definitions of the names that a file's text has, and of those that they need."""
    kept: list[str] = []
    for name, line in reversed(list(lines.items())):
        if re.search(rf"\b{name}\b", "\n".join((text, *kept))):
            kept.append(line)
    return kept[::-1]


def _sizes(program: Program, scope: str, statement: Statement) -> Mapping[int, Size]:
    """Number of a dim -> its size, of those that a call is given and that the program knows."""
    given = _given(statement)
    if not given or not isinstance(statement, Call):
        return {}
    held = statement.results[0].type
    roles = program.dims.get((scope, *held.tensor), ())
    if not len(given) == len(roles) == len(held.shape):
        return {}
    ranks = dict(zip(program.axes, program.axis_sizes, strict=True))
    placed = [(axis, *parse_placement(text)[:2]) for axis, text in held.placements if ranks[axis] > 1]
    found = {}
    for dim, (role, whole, number) in enumerate(zip(roles, held.shape, given, strict=True)):
        size = Size(role, whole, tuple((axis, ranks[axis]) for axis, kind, at in placed if kind == "S" and at == dim))
        if role and (number == size.local or number == -1):
            found[dim] = size
    return found


def _given(statement: Statement) -> tuple[Any, ...]:
    """The sizes that a call is given; () where it is given none."""
    place = _SIZES.get(statement.target, -1) if isinstance(statement, Call) else -1
    if not isinstance(statement, Call) or not 0 <= place < len(statement.args):
        return ()
    given = statement.args[place]
    return given if isinstance(given, tuple) else (given,)


def _named(statement: Statement, names: Mapping[int, str]) -> Statement:
    """The call with these sizes by name; a name is "" where the number stays."""
    if not isinstance(statement, Call) or not any(names.values()):
        return statement
    place = _SIZES[statement.target]
    sizes = tuple(Raw(names[n]) if names.get(n) else number for n, number in enumerate(_given(statement)))
    argument = sizes if isinstance(statement.args[place], tuple) else sizes[0]
    return replace(statement, args=(*statement.args[:place], argument, *statement.args[place + 1 :]))


def _taken(program: Program) -> set[str]:
    """Names that the program's files have for something else."""
    classes = (program.root, *program.layers)
    bodies = (program.count_targets, program.whole_sums, *(cls.body for cls in classes))
    found = {var.name for body in bodies for statement in body for var in (*reads(statement), *assigns(statement))}
    found |= {var.name for cls in classes for var in cls.inputs}
    return found.union(*({cls.name, *(layout.name for layout in cls.layouts)} for cls in classes))


def _names(used: Iterable[Size], taken: Collection[str]) -> dict[Size, str]:
    """HEADS for one rank's share, and LOCAL_HEADS where HEADS are all of them; a length that is cut is always local."""
    by_role: dict[str, list[Size]] = {}
    for size in used:
        by_role.setdefault(size.role, []).append(size)
    found: dict[Size, str] = {}
    for role, sizes in by_role.items():
        num_cut = sum(bool(size.cuts) for size in sizes)
        is_local = len(sizes) > 1 or role not in _OF_ONE_RANK
        if num_cut <= 1 and not {role, f"LOCAL_{role}"} & set(taken):
            found |= {size: f"LOCAL_{role}" if size.cuts and is_local else role for size in sizes}
    return found


def _definitions(program: Program, size: Size, name: str) -> dict[str, str]:
    """Name -> line: `HEADS = 4 // 2  # heads of one rank: 4 over tp2`."""
    over = f" over {axes_text(*zip(*size.cuts, strict=True))}" if size.cuts else ""
    divided = "".join(f" // {ranks}" for _, ranks in size.cuts)
    if name != size.role:
        return {
            size.role: f"{size.role} = {size.whole}",
            name: f"{name} = {size.role}{divided}  # one rank's part, cut{over}",
        }
    whole, parts = size.whole, ""
    if size.role == "BATCH" and 1 < program.num_micro_batches == program.global_batch_size / whole:
        whole, parts = program.global_batch_size, f" in {program.num_micro_batches} micro-batches"
        divided = f" // {program.num_micro_batches}{divided}"
    words = f"  # {_OF_ONE_RANK[name]} of one rank: {whole}{parts}{over}" if divided else ""
    return {name: f"{name} = {whole}{divided}{words}"}
