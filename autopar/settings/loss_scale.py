"""The loss scale of fp16 as users give it, in Python or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autopar.errors import ConstraintError
from autopar.files.text_files import near
from codegen.runtime.loss_scale import LossScale

NAMES = tuple(field.name for field in fields(LossScale))


def loss_scale_of(given: LossScale | Mapping[str, Any] | None, precision: str) -> LossScale | None:
    """How a run in this precision scales its loss: in fp16 as given, by default as torch.amp.GradScaler, else not.

    Raises ConstraintError for a wrong number or name, and for a scale of another precision, which does nothing.
    """
    if precision != "fp16":
        if given is not None:
            raise ConstraintError(
                "a loss scale is for precision 'fp16', whose gradients are too small without one",
                values=f"loss_scale with precision={precision!r}",
                alternatives=["precision='fp16'", "loss_scale=None"],
            )
        return None
    if given is None or isinstance(given, LossScale):
        return given or LossScale()
    if not isinstance(given, Mapping):
        raise ConstraintError("loss_scale is a mapping", values=repr(given), alternatives=", ".join(NAMES))
    for name in given:
        if name not in NAMES:
            raise ConstraintError(f"loss_scale has no {name!r}", alternatives=near(str(name), NAMES))
    try:
        return LossScale(**given)
    except ValueError as error:
        raise ConstraintError(str(error)) from None
