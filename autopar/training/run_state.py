"""State of a run that a checkpoint holds besides parameters and optimizer: schedule, position in the data, best metric.

It goes into the manifest's notes, which are texts.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch

from autopar.errors import CheckpointError


@runtime_checkable
class Stateful(Protocol):
    """An object that remembers its position, such as torchdata's StatefulDataLoader or torch's schedulers."""

    def state_dict(self) -> Any:
        """Return the position."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continue from there."""
        ...


def state_text(name: str, value: Stateful) -> str:
    """Return the state as a text. Raises CheckpointError for a state that cannot be read back safely."""
    state = value.state_dict()
    file = io.BytesIO()
    try:
        torch.save(state, file)
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    except Exception as error:  # pickle and torch raise many kinds
        raise CheckpointError(
            f"the state of the {name} cannot be saved",
            values=f"{type(value).__name__}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            alternatives="keep numbers, texts, tensors, and lists and dicts of them in its state_dict()",
        ) from None
    return base64.b64encode(file.getvalue()).decode()


def restore_state(value: Stateful, text: str) -> None:
    """Continue from the text of `state_text`."""
    value.load_state_dict(torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True))


class Best:
    """The best evaluation so far, and the number of evaluations since then.

    patience: evaluations without an improvement after which `is_over`; None for never.
    """

    def __init__(self, metric: str, greater_is_better: bool, min_delta: float, patience: int | None) -> None:
        self.metric, self._sign = metric, -1.0 if greater_is_better else 1.0
        self._min_delta, self._patience = min_delta, patience
        self.value: float | None = None
        self.num_without = 0

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take one evaluation. Raises KeyError where it lacks the metric."""
        value = self._sign * metrics[self.metric]
        if self.value is None or value < self._sign * self.value - self._min_delta:
            self.value, self.num_without = self._sign * value, 0
        else:
            self.num_without += 1

    @property
    def is_over(self) -> bool:
        """Whether training should stop for lack of improvement."""
        return self._patience is not None and self.num_without >= self._patience

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "num_without": self.num_without}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value, self.num_without = state["value"], state["num_without"]
