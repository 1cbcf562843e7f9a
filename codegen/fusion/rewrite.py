"""The choice among matches, and a body with them replaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from codegen.fusion.match import Match
from codegen.program import Call, Statement


def chosen(candidates: Iterable[Match], num_token_ranks: int) -> tuple[Match, ...]:
    """The matches that pay, without any that shares calls with one before it."""
    kept: list[Match] = []
    taken: set[int] = set()
    for match in candidates:
        if match.pattern.pays(match.bound, num_token_ranks) and not match.statements & taken:
            kept.append(match)
            taken |= match.statements
    return tuple(kept)


def replaced(body: tuple[Statement, ...], fusions: Iterable[Match]) -> tuple[Statement, ...]:
    """The statements with what each pattern builds in the place of its last call, and without its others."""
    last = {match.last: match for match in fusions}
    gone = {index for match in last.values() for index in match.statements}
    statements: list[Statement] = []
    for index, statement in enumerate(body):
        if index in last:
            assert isinstance(statement, Call)
            match = last[index]
            members = tuple(call for i in sorted(match.statements) if isinstance(call := body[i], Call))
            calls = match.pattern.build(match.pattern, match.bound, statement)
            statements += [replace(c, members=members) if c.target == match.pattern.target else c for c in calls]
        elif index not in gone:
            statements.append(statement)
    return tuple(statements)
