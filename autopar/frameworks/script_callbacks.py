"""A user's callbacks of transformers' Trainer: which may look at the model, and which requests all ranks must share.

The model's tensors are old between a program's steps, so a callback that may look at them needs current ones. A
function may look if it, or another method of its class, names a model; if its object holds anything but plain values
(an average of the model's weights, the Trainer); or if it refers to anything outside that may have a model: a module, a
Trainer, an object or module of the script, a function that may look. A needless answer costs a gathering of the values;
a missed one would be silently wrong.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import PurePath
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from codegen.runtime.processes import Ending

logger = logging.getLogger("autopar")

PLAIN = (int, float, complex, str, bytes, PurePath, logging.Logger, type(None))
ASKED = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
OF_A_STEP = ("on_step_begin", "on_substep_end", "on_optimizer_step", "on_step_end")
AGREED_AFTER = ("on_train_begin", "on_epoch_begin", *OF_A_STEP, "on_evaluate", "on_epoch_end")
"""Events that the Trainer's loop has on all ranks."""


class LookingHandler(CallbackHandler):  # type: ignore[misc]
    """A CallbackHandler that updates the model's values before it calls a callback that may look at them.

    take_values: updates them; collective, as every rank has the same callbacks. ending: notes SIGTERM while the Trainer
    trains. is_ending: whether the signal came.
    """

    ending: Ending | None
    is_ending = False

    take_values: Callable[[], None]
    looked: dict[tuple[type, str], bool]
    """By class and event. It holds the answers that follow from code; attributes of an object may change."""

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Call the event as transformers does. All ranks take over what a callback requests on one, by its clock or
        rank."""
        if any(self._looks(callback, event) for callback in self.callbacks):
            self.take_values()
        control = super().call_event(event, args, state, control, **named)
        if event in AGREED_AFTER and any(_has_handler(callback, event) for callback in self.callbacks):
            _agree(control, args.device)
        if event == "on_step_end" and self.ending is not None and self.ending.is_told():
            self.is_ending = control.should_save = control.should_training_stop = True
        return control

    def _looks(self, callback: TrainerCallback, event: str) -> bool:
        if not _has_handler(callback, event):
            return False
        key = type(callback), event
        if key not in self.looked:
            self.looked[key] = any(map(may_look, (getattr(type(callback), event), *_helpers(type(callback)))))
            if self.looked[key]:
                logger.info("%s.%s may look at the model: it has the trained values then", key[0].__name__, event)
        return self.looked[key] or holds_more(callback)


def _has_handler(callback: TrainerCallback, event: str) -> bool:
    """Return whether a script's class, and not one of transformers, handles an event."""
    is_empty = getattr(type(callback), event, None) is getattr(TrainerCallback, event, None)
    return not is_empty and not type(callback).__module__.startswith("transformers.")


def _helpers(kind: type) -> list[Any]:
    """Return the methods of a script's class that the Trainer does not call itself."""
    methods = {name: value for base in kind.__mro__ for name, value in vars(base).items() if inspect.isfunction(value)}
    return [value for name, value in methods.items() if not (name.startswith("__") or hasattr(TrainerCallback, name))]


def _agree(control: Any, device: torch.device) -> None:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    asked = torch.tensor([int(getattr(control, name)) for name in ASKED], device=device)
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    for name, value in zip(ASKED, asked.tolist(), strict=True):
        setattr(control, name, bool(value))


def may_look(function: Any, seen: frozenset[Any] = frozenset()) -> bool:
    """Return whether a function's code names a model, or refers to an outside object that is one or may have one.

    seen: functions that are being examined.
    """
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if "model" in _names(code):
        return True
    references = inspect.getclosurevars(function)
    outside = (*references.nonlocals.values(), *references.globals.values())
    return any(_reaches(value, seen | {function}) for value in outside if not isinstance(value, PLAIN))


def _reaches(value: Any, seen: frozenset[Any]) -> bool:
    """Return whether a value may reach a model. Installed packages and classes do not; a script's modules and objects
    may, without a closer look."""
    if inspect.isfunction(value):
        return not _is_installed(inspect.getmodule(value)) and value not in seen and may_look(value, seen)
    if inspect.ismodule(value):
        return not _is_installed(value)
    return not (inspect.isbuiltin(value) or isinstance(value, type) or _is_plain(value))


def _is_installed(module: Any) -> bool:
    name, file = (getattr(module, key, None) or "" for key in ("__name__", "__file__"))
    return name.partition(".")[0] in sys.stdlib_module_names - {"__main__"} or "-packages" in file


def _names(code: CodeType) -> set[Any]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    texts = {constant for constant in code.co_consts if isinstance(constant, str)}
    return {*code.co_names, *code.co_varnames, *code.co_freevars, *texts}.union(*map(_names, inner))


def holds_more(value: Any) -> bool:
    """Return whether an object has attributes other than plain values: numbers, texts, paths, and containers of
    them."""
    return any(not _is_plain(attribute) for attribute in getattr(value, "__dict__", {}).values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    return isinstance(value, PLAIN)
