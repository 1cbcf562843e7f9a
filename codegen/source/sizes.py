"""Sizes of one rank by name, where a program knows what a dim is: `x.view(BATCH, SEQUENCE, HEADS, HEAD_DIM)`."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from codegen.program import Call, Program, Raw, Statement, TensorType, assigns
from codegen.runtime.parameters import parse_placement
from codegen.source.text import axes_text

_SIZES: Mapping[str, int] = {
    "aten.view.default": 1,
    "aten.reshape.default": 1,
    "aten.expand.default": 1,
    "aten.arange.default": 0,
}
"""Call -> which argument has the sizes of all dims of the result."""

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
        """Return how many of the dim one rank has."""
        return self.whole // math.prod(size for _, size in self.cuts)


def with_sizes(program: Program) -> tuple[Program, Mapping[str, str]]:
    """The program with names for sizes, and the line that defines each name, in the order in which they stand.

    A role that ranks cut in several ways keeps its numbers, as does one whose name the program has for something else.
    """
    scopes = [("", program.root), *((layer.name, layer) for layer in program.layers)]
    sizes_of = {scope: [_known(program, scope, statement) for statement in cls.body] for scope, cls in scopes}
    names = _names(
        {size for sizes_of_scope in sizes_of.values() for sizes in sizes_of_scope for size in sizes if size},
        _taken(program),
    )
    root, *layers = (
        replace(cls, body=tuple(_named(s, sizes, names) for s, sizes in zip(cls.body, sizes_of[scope], strict=True)))
        for scope, cls in scopes
    )
    order = sorted(names, key=lambda size: (_ORDER.get(size.role, 1), size.role, size.cuts))
    lines = {names[size]: _definition(program, size, names[size]) for size in order}
    return replace(program, root=root, layers=tuple(layers)), lines


def needed(lines: Mapping[str, str], text: str) -> list[str]:
    """The definitions of the names that a file's text has, and of those that they need."""
    kept: list[str] = []
    for name, line in reversed(list(lines.items())):
        if re.search(rf"\b{name}\b", "\n".join((text, *kept))):
            kept.append(line)
    return kept[::-1]


def _given(statement: Statement) -> tuple[Any, ...]:
    """The sizes that a call is given; () where it is given none."""
    if not isinstance(statement, Call) or statement.target not in _SIZES:
        return ()
    sizes = statement.args[_SIZES[statement.target]]
    return sizes if isinstance(sizes, tuple) else (sizes,)


def _known(program: Program, scope: str, statement: Statement) -> tuple[Size | None, ...]:
    """Return the meaning of each size of a call, where it is known."""
    numbers = _given(statement)
    tensor_type = assigns(statement)[0].type if numbers and assigns(statement) else TensorType((), "")
    roles = program.dims.get((scope, *tensor_type.tensor), ())
    if not len(numbers) == len(roles) == len(tensor_type.shape):
        return (None,) * len(numbers)
    ranks = dict(zip(program.axes, program.axis_sizes, strict=True))
    lies = [(axis, *parse_placement(text)[:2]) for axis, text in tensor_type.placements if ranks[axis] > 1]
    sizes = []
    for dim, (role, whole, number) in enumerate(zip(roles, tensor_type.shape, numbers, strict=True)):
        size = Size(role, whole, tuple((axis, ranks[axis]) for axis, kind, at in lies if kind == "S" and at == dim))
        sizes.append(size if role and number in (size.local, -1) else None)
    return tuple(sizes)


def _named(statement: Statement, sizes_of_dims: tuple[Size | None, ...], names: Mapping[Size, str]) -> Statement:
    if not isinstance(statement, Call) or not names.keys() & set(sizes_of_dims):
        return statement
    pairs = zip(sizes_of_dims, _given(statement), strict=True)
    sizes = tuple(Raw(names[size]) if size and size in names else number for size, number in pairs)
    args = list(statement.args)
    args[_SIZES[statement.target]] = sizes if isinstance(args[_SIZES[statement.target]], tuple) else sizes[0]
    return replace(statement, args=tuple(args))


def _taken(program: Program) -> set[str]:
    """Names that the program has for something else."""
    classes = (program.root, *program.layers)
    assigned = {var.name for cls in classes for statement in cls.body for var in assigns(statement)}
    return assigned.union(*({cls.name, *(var.name for var in cls.inputs)} for cls in classes))


def _names(used: Iterable[Size], taken: Collection[str]) -> dict[Size, str]:
    """HEADS, or where all of them and one rank's are both used HEADS and LOCAL_HEADS. A name has one size, or is not
    given."""
    by_role: dict[str, list[Size]] = {}
    for size in used:
        by_role.setdefault(size.role, []).append(size)
    names: dict[Size, str] = {}
    for role, sizes in by_role.items():
        others = {name for other in by_role if other != role for name in (other, f"LOCAL_{other}")}
        is_one = len({size.whole for size in sizes}) == 1 and sum(bool(size.cuts) for size in sizes) <= 1
        if is_one and not {role, f"LOCAL_{role}"} & others.union(taken):
            names |= {size: f"LOCAL_{role}" if size.cuts and len(sizes) > 1 else role for size in sizes}
    return names


def _definition(program: Program, size: Size, name: str) -> str:
    """`HEADS = 4 // 2  # of this rank: 4 over tp2`."""
    divided = "".join(f" // {ranks}" for _, ranks in size.cuts)
    over = f" over {axes_text(*zip(*size.cuts, strict=True))}" if size.cuts else ""
    if name != size.role:
        return f"{name} = {size.role}{divided}  # of this rank, cut{over}"
    whole, parts = size.whole, ""
    if size.role == "BATCH" and 1 < program.num_micro_batches == program.global_batch_size / whole:
        whole, parts = program.global_batch_size, f" in {program.num_micro_batches} micro-batches"
        divided = f" // {program.num_micro_batches}{divided}"
    return f"{name} = {whole}{divided}" + (f"  # of this rank: {whole}{parts}{over}" if divided else "")
