"""The loss scale of fp16, as users set it in Python or in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from autopar.errors import ConstraintError
from autopar.files.text_files import near, shown
from codegen.runtime.loss_scale import LossScale

NAMES = tuple(field.name for field in fields(LossScale))


def loss_scale_of(setting: LossScale | Mapping[str, Any] | None, precision: str) -> LossScale | None:
    """Return the loss scale of a run, which is None except in fp16. The default is that of torch.amp.GradScaler.

    Raises ConstraintError for a wrong number or name, and for a loss scale in another precision.
    """
    if precision != "fp16":
        if setting is not None:
            raise ConstraintError(
                "a loss scale needs precision 'fp16'; other precisions do not scale the loss",
                values=f"loss_scale with precision={precision!r}",
                alternatives=["precision='fp16'", "loss_scale=None"],
            )
        return None
    if setting is None or isinstance(setting, LossScale):
        return setting or LossScale()
    if not isinstance(setting, Mapping):
        raise ConstraintError(
            "loss_scale must be a mapping", values=shown(setting), alternatives=f"a mapping of {', '.join(NAMES)}"
        )
    for name in setting:
        if name not in NAMES:
            raise ConstraintError(
                "loss_scale has an unknown field", values=shown(name), alternatives=near(str(name), NAMES)
            )
    try:
        return LossScale(**setting)
    except ValueError as error:
        raise ConstraintError(str(error)) from None
