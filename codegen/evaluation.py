"""A program that follows `self.training`: normalisations by the batch's statistics, and the buffers that they write.

A trace holds what the model does in training, where `training` is True. Dropout follows the module's mode in the
run time (`Module.same_dropout`); here batch and instance norm are made to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeGuard

from codegen.program import Call, ModuleClass, Program, Raw, Statement, Var

_FLAG: Final = 5
STATISTICS: Final = (3, 4)
NORMS: Final[Mapping[str, str]] = {
    "runtime.batch_norm": "training",
    "aten.instance_norm.default": "use_input_stats",
}
"""Operator -> its flag, argument _FLAG. If that is on, arguments STATISTICS are written to, where there are any."""


def follows_training(program: Program) -> Program:
    """The program whose norms use the running statistics, and leave them as they are, unless `self.training`."""
    return replace(program, layers=tuple(map(_class, program.layers)), root=_class(program.root))


def _class(cls: ModuleClass) -> ModuleClass:
    """Raises ValueError where statistics would be written to a copy of the buffer (a reshard of it)."""
    writing = [each for each in cls.body if _writes(each)]
    if not writing:
        return cls
    written: list[str] = []
    for call in writing:
        for index in STATISTICS:
            held = call.args[index]
            if not isinstance(held, Var) or not held.is_stored or held.type.tensor[0] not in cls.buffers:
                raise ValueError(f"{call.target} would update a resharded copy of its statistics, {held}")
            written.append(held.type.tensor[0])
    body = tuple(_followed(each) if _writes(each) else each for each in cls.body)
    return replace(cls, body=body, written_buffers=tuple(dict.fromkeys(written)))


def _writes(statement: Statement) -> TypeGuard[Call]:
    return (
        isinstance(statement, Call)
        and statement.target in NORMS
        and statement.args[_FLAG] is True
        and isinstance(statement.args[STATISTICS[0]], Var)
    )


def _followed(call: Call) -> Call:
    return replace(call, args=(*call.args[:_FLAG], Raw("self.training"), *call.args[_FLAG + 1 :]))
