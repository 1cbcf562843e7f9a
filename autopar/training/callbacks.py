"""What a user's code is told while training runs, and how it may end it."""

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
    """Where training is, as callbacks see it.

    step: optimiser steps done, of `steps`. first_step: of this run, 0 unless it was resumed. record: what is logged of
    the last step (`records.py`), or of the last evaluation. learning_rates: of each group.
    """

    step: int
    steps: int
    first_step: int
    record: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: Sequence[float] = ()


class Callback:
    """A base class whose methods do nothing; they are called on rank 0 only, in the order in which callbacks are given.

    A method that returns True ends training after the step, on all ranks, as if it were the last: a checkpoint is
    written, and the model has the trained values. What a callback notes in attributes is there after `fit`, also where
    the ranks were other processes, as far as it can be pickled.
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
    """The callbacks of a run. wants_stop: the name of the one that asked for an end, on every rank; "" if none did."""

    def __init__(self, callbacks: Sequence[Callback], is_first: bool) -> None:
        self.callbacks, self._is_first = callbacks, is_first
        self.wants_stop = ""

    def tell(self, event: str, state: TrainState) -> None:
        """Call `on_EVENT` of all on rank 0."""
        for each in self.callbacks if self._is_first else ():
            if getattr(each, f"on_{event}")(state) is True:
                self.wants_stop = self.wants_stop or type(each).__name__

    def agree(self) -> bool:
        """Whether to end, as rank 0 has it. Collective where there are callbacks."""
        if self.callbacks and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            said: list[Any] = [self.wants_stop]
            dist.broadcast_object_list(said, src=0, device=device())
            self.wants_stop = said[0]
        return bool(self.wants_stop)


def check_callbacks(callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """The callbacks. Raises ConstraintError for what is none."""
    for each in callbacks:
        if not isinstance(each, Callback):
            raise ConstraintError(
                "a callback is a value of a class derived from autopar.Callback",
                values=each.__name__ + ", a class" if isinstance(each, type) else type(each).__name__,
                alternatives="class Mine(autopar.Callback) with a method on_step(self, state); callbacks=[Mine()]",
            )
    return tuple(callbacks)


def noted(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    """What each callback has in its attributes, as far as another process can send it back."""
    return [{name: value for name, value in _attributes(each).items() if _is_sendable(value)} for each in callbacks]


def note(callbacks: Sequence[Callback], found: Sequence[Mapping[str, Any]]) -> None:
    """Puts what `noted` gave of the same callbacks, in another process, into these."""
    for callback, attributes in zip(callbacks, found, strict=True):
        for name, value in attributes.items():
            object.__setattr__(callback, name, value)  # a frozen dataclass noted it in what it holds


def _attributes(callback: Callback) -> dict[str, Any]:
    """What lies in a callback's __dict__ and in the slots of its classes."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(callback).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    held = {name: getattr(callback, name) for name in names if not name.startswith("__") and hasattr(callback, name)}
    return held | getattr(callback, "__dict__", {})


def _is_sendable(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a value in it raises
        return False
    return True


def device() -> torch.device:
    """Return where tensors that ranks exchange are."""
    is_nccl = dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda" if is_nccl else "cpu")
