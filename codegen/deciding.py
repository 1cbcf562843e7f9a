"""A value of the whole batch that decides what forward does, such as `int(lengths.max())` where it is a size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_INPUT = re.compile(r'batch\["(\w+)"\]')


@dataclass(frozen=True, slots=True)
class DecidingValue:
    """code: an expression of torch and `batch`, a mapping of tensors on the CPU. value: the one that a program is made
    for."""

    code: str
    value: Any

    @property
    def text(self) -> str:
        """The code with the names of inputs alone."""
        return _INPUT.sub(r"\1", self.code)

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs that it is computed of."""
        return frozenset(_INPUT.findall(self.code))

    @property
    def source(self) -> str:
        """Its entry in `Module.DECIDING`."""
        return f"{json.dumps(self.text, ensure_ascii=False)}: (lambda batch: {self.code}, {self.value!r})"

    def of(self, batch: Mapping[str, Any]) -> Any:
        """What it is in a batch."""
        return eval(self.code, {"torch": torch, "batch": batch})  # noqa: S307  # code of `batch_values.expression`
