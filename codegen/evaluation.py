"""A program that follows `self.training`: normalisations by the batch's statistics, and the buffers that they write.

A trace holds what the model does in training, where `training` is True. Dropout follows the module's mode in the
run time (`Module.same_dropout`); here batch and instance norm are made to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, TypeGuard

from codegen.program import Call, ModuleClass, Program, Raw, Statement, Var

_FLAG: Final = 5
STATISTICS: Final = (3, 4)
NORMS: Final[Mapping[str, str]] = {
    "runtime.batch_norm": "training",
    "aten.instance_norm.default": "use_input_stats",
}
"""Operator -> its flag, argument _FLAG. If that is on, arguments STATISTICS are written to, where there are any."""

UPDATE: Final = "self.update_buffer"
"""The call that notes a buffer's next value (codegen/runtime/buffer_updates.py)."""


def follows_training(program: Program) -> Program:
    """The program whose norms use the running statistics, and leave them as they are, unless `self.training`."""
    return replace(program, layers=tuple(map(_class, program.layers)), root=_class(program.root))


def _class(cls: ModuleClass) -> ModuleClass:
    """Raises ValueError where a copy of the buffer (a reshard of it) would be written to."""
    writing = [statement for statement in cls.body if _writes(statement)]
    updates = [statement for statement in writing if _updates(statement)]
    written = [_stored(cls, call, call.args[index]) for call in updates for index in STATISTICS]
    updating = [statement for statement in cls.body if isinstance(statement, Call) and statement.target == UPDATE]
    return replace(
        cls,
        body=tuple(_followed(statement) if _writes(statement) else statement for statement in cls.body),
        written_buffers=tuple(dict.fromkeys(written)),
        updated_buffers=tuple(dict.fromkeys(_stored(cls, call, call.args[0]) for call in updating)),
    )


def _stored(cls: ModuleClass, call: Call, buffer: Any) -> str:
    """The name of the class' buffer that an operand is."""
    if not isinstance(buffer, Var) or not buffer.is_stored or buffer.type.tensor[0] not in cls.buffers:
        raise ValueError(f"{call.target} would write to a resharded copy of a buffer, {buffer}")
    return buffer.type.tensor[0]


def _writes(statement: Statement) -> TypeGuard[Call]:
    return (
        isinstance(statement, Call)
        and statement.target in NORMS
        and statement.args[_FLAG] is True
        and isinstance(statement.args[STATISTICS[0]], Var)
    )


def _followed(call: Call) -> Call:
    """The call with its flag by the module's mode. Statistics that it only reads in evaluation mode are there then."""
    args = [*call.args[:_FLAG], Raw("self.training"), *call.args[_FLAG + 1 :]]
    for index in () if _updates(call) else STATISTICS:
        args[index] = Raw(f"None if self.training else {args[index].name}", reads=(args[index],))
    return replace(call, args=tuple(args))


def _updates(call: Call) -> bool:
    """Whether a norm brings its statistics forward: instance norm of momentum 0 does not."""
    return call.target != "aten.instance_norm.default" or bool(call.args[_FLAG + 1])
