"""Callbacks: methods of a user's class that run while training runs, and that may end it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import ConstraintError


@dataclass(slots=True)
class TrainState:
    """The state of training, as callbacks see it.

    step: optimizer steps done, of `steps`. first_step: of this run, 0 unless it was resumed. record: the log record of
    the last step (`records.py`) or of the last evaluation. learning_rates: by parameter group.
    """

    step: int
    steps: int
    first_step: int
    record: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: Sequence[float] = ()


class Callback:
    """A base class whose methods do nothing. autopar calls them on rank 0 only, in the order of the list of callbacks.

    A method that returns True ends training after the step, on all ranks, as if it were the last: a checkpoint is
    written, and the model has the trained values. After `fit` a callback has the attributes that it set, also where
    ranks were other processes, as far as they can be pickled.
    """

    def on_start(self, state: TrainState) -> bool | None:
        """The first step is about to run."""

    def on_step(self, state: TrainState) -> bool | None:
        """A step is done; `state.record` has its loss, rate and seconds."""

    def on_evaluation(self, state: TrainState) -> bool | None:
        """An evaluation is done; `state.record` has its metrics."""

    def on_checkpoint(self, state: TrainState) -> bool | None:
        """A checkpoint was written; `state.record["checkpoint"]` is its folder."""

    def on_end(self, state: TrainState) -> bool | None:
        """Training has ended."""


class Callbacks:
    """The callbacks of a run. wants_stop: on every rank, the name of the callback that asked for an end; "" without."""

    def __init__(self, callbacks: Sequence[Callback], is_first: bool) -> None:
        self.callbacks, self._is_first = callbacks, is_first
        self.wants_stop = ""

    def tell(self, event: str, state: TrainState) -> None:
        """Call `on_EVENT` of all callbacks, on rank 0."""
        for callback in self.callbacks if self._is_first else ():
            if getattr(callback, f"on_{event}")(state) is True:
                self.wants_stop = self.wants_stop or type(callback).__name__

    def agree(self) -> bool:
        """Return rank 0's decision whether to end. Collective where there are callbacks."""
        if self.callbacks and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            box: list[Any] = [self.wants_stop]
            dist.broadcast_object_list(box, src=0, device=device())
            self.wants_stop = box[0]
        return bool(self.wants_stop)


def check_callbacks(callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """Return the callbacks. Raises ConstraintError for a value that is no callback."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConstraintError(
                "a callback is an instance of a class derived from autopar.Callback",
                values=callback.__name__ + ", a class" if isinstance(callback, type) else type(callback).__name__,
                alternatives="class Mine(autopar.Callback) with a method on_step(self, state); callbacks=[Mine()]",
            )
    return tuple(callbacks)


def sendable_attributes(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    """Return the attributes of each callback, as far as another process can send them back."""
    return [{name: value for name, value in _attributes(c).items() if _is_sendable(value)} for c in callbacks]


def set_attributes(callbacks: Sequence[Callback], attributes: Sequence[Mapping[str, Any]]) -> None:
    """Set the attributes that `sendable_attributes` returned for the same callbacks in another process."""
    for callback, values in zip(callbacks, attributes, strict=True):
        for name, value in values.items():
            object.__setattr__(callback, name, value)  # also of a frozen dataclass


def _attributes(callback: Callback) -> dict[str, Any]:
    """Return a callback's attributes: its __dict__ and the slots of its classes."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(callback).__mro__)
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    values = {name: getattr(callback, name) for name in names if not name.startswith("__") and hasattr(callback, name)}
    return values | getattr(callback, "__dict__", {})


def _is_sendable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # any error of a value inside
        return False
    return True


def device() -> torch.device:
    """Return the device of tensors that ranks exchange."""
    is_nccl = dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda" if is_nccl else "cpu")
