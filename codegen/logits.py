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
    types: dict[str, TensorType] = {variable.name: variable.type for variable in program.root.inputs}
    body = program.root.body
    for at in range(len(body) + 1):
        if all(_has(types, variable) for variable in sources):
            is_between_loops = 0 < at < len(body) and all(isinstance(s, LayerLoop) for s in body[at - 1 : at + 1])
            return without_logits(program) if is_between_loops else replace(program, logits_at=at)
        if at < len(body):
            again = _again(body[at], sources, types)
            if again:
                return replace(program, logits_at=at, giving_logits=(*again, *program.giving_logits))
            types |= {variable.name: variable.type for variable in assigns(body[at])}
    return without_logits(program)


def without_logits(program: Program) -> Program:
    """The program without a place for logits."""
    return replace(program, logits=None, giving_logits=(), logits_at=0)


def _sources(program: Program) -> list[Var]:
    """Return the variables of forward that the statements read."""
    assert program.logits is not None
    computed: set[str] = set()
    sources: list[Var] = []
    for statement in program.giving_logits:
        sources += [variable for variable in reads(statement) if variable.name not in computed]
        computed |= {variable.name for variable in assigns(statement)}
    return sources if program.logits.name in computed else [*sources, program.logits]


def _has(types: dict[str, TensorType], variable: Var) -> bool:
    return variable.is_stored or types.get(variable.name) == variable.type


def _again(statement: Statement, sources: list[Var], types: dict[str, TensorType]) -> tuple[Call, ...]:
    """The calls that a joint one stands for and that make the sources of what is known before it; none if they do
    not."""
    if not isinstance(statement, Call) or not statement.members:
        return ()
    available = dict(types)
    calls: list[Call] = []
    for call in statement.original:
        if all(_has(available, variable) for variable in reads(call)):
            calls.append(replace(call, section=""))
            available |= {variable.name: variable.type for variable in call.results if variable.name}
        if all(_has(available, variable) for variable in sources):
            return tuple(calls)
    return ()
