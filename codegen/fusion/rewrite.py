"""A program with matches replaced."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from codegen.fusion.match import Match, matches
from codegen.fusion.template import Pattern
from codegen.program import Call, ModuleClass, Program, Statement

DATA_AXES = frozenset({"ddp", "dp"})
"""Axes whose ranks share the rows of a micro-batch."""


def fused(program: Program, patterns: tuple[Pattern, ...]) -> Program:
    """The program with every match replaced in all classes; where two share calls, the earlier pattern's."""
    layers = tuple(_fuse_class(cls, program, patterns) for cls in program.layers)
    return replace(program, layers=layers, root=_fuse_class(program.root, program, patterns))


def chosen(found: Iterable[Match], num_data_ranks: int) -> tuple[Match, ...]:
    """The matches that pay, without any that shares calls with one before it."""
    kept: list[Match] = []
    taken: set[int] = set()
    for match in found:
        if match.pattern.pays(match.bound, num_data_ranks) and not match.statements & taken:
            kept.append(match)
            taken |= match.statements
    return tuple(kept)


def replaced(body: tuple[Statement, ...], found: Iterable[Match], program: Program) -> tuple[Statement, ...]:
    """The statements with what each pattern builds in the place of its last call, and without its others."""
    last = {match.last: match for match in found}
    gone = {index for match in last.values() for index in match.statements}
    made: list[Statement] = []
    for index, statement in enumerate(body):
        if index in last:
            assert isinstance(statement, Call)
            match = last[index]
            members = tuple(call for i in sorted(match.statements) if isinstance(call := body[i], Call))
            calls = match.pattern.build(match.bound, statement, program)
            made += [replace(c, members=members) if c.target == match.pattern.target else c for c in calls]
        elif index not in gone:
            made.append(statement)
    return tuple(made)


def _fuse_class(cls: ModuleClass, program: Program, patterns: tuple[Pattern, ...]) -> ModuleClass:
    sizes = zip(program.axes, program.axis_sizes, strict=True)
    num_data_ranks = math.prod(size for axis, size in sizes if axis in DATA_AXES)
    found = chosen(matches(patterns, cls.body, cls.outputs), num_data_ranks)
    return replace(cls, body=replaced(cls.body, found, program))
