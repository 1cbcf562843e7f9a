"""The logits of a program's model: statements in the middle of forward, run where an evaluation asks for logits.

They read a variable that forward has for a while anyway, and stand where it has it, so that nothing lives longer for
their sake. A pass may have put one call in the place of the one that made such a variable (a loss of a linear layer
that never has the logits); then the calls that it stands for are run before it, in such an evaluation alone.
"""

from __future__ import annotations

from dataclasses import replace

from codegen.program import Call, LayerLoop, Program, Statement, TensorType, Var, assigns, reads


def with_logits(program: Program) -> Program:
    """The program with a place for the statements that give its logits; without logits where there is none."""
    if program.logits is None:
        return program
    sources = _sources(program)
    known: dict[str, TensorType] = {each.name: each.type for each in program.root.inputs}
    body = program.root.body
    for at in range(len(body) + 1):
        if all(_has(known, each) for each in sources):
            is_between_loops = 0 < at < len(body) and all(isinstance(s, LayerLoop) for s in body[at - 1 : at + 1])
            return without_logits(program) if is_between_loops else replace(program, logits_at=at)
        if at < len(body):
            again = _again(body[at], sources, known)
            if again:
                return replace(program, logits_at=at, giving_logits=(*again, *program.giving_logits))
            known |= {each.name: each.type for each in assigns(body[at])}
    return without_logits(program)


def without_logits(program: Program) -> Program:
    """The program without a place for logits."""
    return replace(program, logits=None, giving_logits=(), logits_at=0)


def _sources(program: Program) -> list[Var]:
    """What the statements read of forward."""
    assert program.logits is not None
    made: set[str] = set()
    found: list[Var] = []
    for statement in program.giving_logits:
        found += [each for each in reads(statement) if each.name not in made]
        made |= {each.name for each in assigns(statement)}
    return found if program.logits.name in made else [*found, program.logits]


def _has(known: dict[str, TensorType], variable: Var) -> bool:
    return variable.is_stored or known.get(variable.name) == variable.type


def _again(statement: Statement, sources: list[Var], known: dict[str, TensorType]) -> tuple[Call, ...]:
    """The calls that a joint one stands for and that make the sources of what is known before it; none if they do
    not."""
    if not isinstance(statement, Call) or not statement.members:
        return ()
    made = dict(known)
    calls: list[Call] = []
    for call in statement.original:
        if all(_has(made, each) for each in reads(call)):
            calls.append(replace(call, section=""))
            made |= {each.name: each.type for each in call.results if each.name}
        if all(_has(made, each) for each in sources):
            return tuple(calls)
    return ()
