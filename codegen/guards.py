"""Guards: values of the whole batch that a program is specialized on, such as `int(lengths.max())` as a size."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_INPUT = re.compile(r'batch\["(\w+)"\]')


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that every batch of a program must have.

    code: an expression of torch and `batch`, a mapping of tensors on the CPU. value: what it is in the example batch.
    """

    code: str
    value: Any

    @property
    def text(self) -> str:
        """The code with the names of inputs alone."""
        return _INPUT.sub(r"\1", self.code)

    @property
    def inputs(self) -> frozenset[str]:
        """The names of the inputs in the expression."""
        return frozenset(_INPUT.findall(self.code))

    @property
    def source(self) -> str:
        """The entry in `Module.GUARDS`."""
        return f"{json.dumps(self.text, ensure_ascii=False)}: (lambda batch: {self.code}, {self.value!r})"

    def of(self, batch: Mapping[str, Any]) -> Any:
        """Return the value of a batch."""
        return eval(self.code, {"torch": torch, "batch": batch})  # noqa: S307  # code of `batch_values.expression`
