"""The error for a change of the model that a program cannot follow, and the remedies that it names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.errors import ModelError
from autopar.frontend.state.values import Change

AGAIN = [
    "compile the changed model again, and resume from a checkpoint",
    "pass what changes while training as an input of the batch",
]
FULL = "compile the model with that module on, and switch it off before the first step"
THAW = [
    "requires_grad_(True) on them before the model is compiled, and requires_grad_(False) before the first step",
    "compile the changed model again, and resume from a checkpoint",
]
_ELSEWHERE = "of Accelerate accelerator.unwrap_model(model), of Lightning trainer.strategy.values.take(), instead"
STALE = [
    "program.update_model(step) on every rank before the change: the buffer's value in the model is an old one",
    _ELSEWHERE,
]
OLD = [
    "program.update_model(step) on every rank before a script writes to the model's parameters: these are old values",
    _ELSEWHERE,
    "step.load(values), for values that do not depend on the model's",
    "a copy.deepcopy of the model, for values that you evaluate and do not train",
    "an optimizer whose step() writes them, where callbacks of a Trainer do: these see old values",
]


def change_error(changes: Sequence[Change], instead: Any, reason: str = "") -> ModelError:
    """Return the error that names the changes. instead: what a user can do."""
    some = [str(change) for change in changes[:5]] + ([f"and {len(changes) - 5} more"] if len(changes) > 5 else [])
    return ModelError(
        "the program cannot follow a change of the model between steps",
        values="\n".join([*some, *([reason] if reason else [])]),
        alternatives=instead,
    )


def require(is_met: bool, changes: Sequence[Change], instead: Any) -> None:
    """Raise ModelError unless a condition is met."""
    if not is_met:
        raise change_error(changes, instead)
