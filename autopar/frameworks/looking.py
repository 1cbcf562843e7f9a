"""Which of a user's functions may look at the model, whose own tensors are old between a program's steps.

A function cannot be asked. It may look if it names a model, if its object holds anything but plain values (an average
of the model's weights, the Trainer), or if it refers to a module or Trainer from outside. What is found too often costs
a gathering of the values, what is found too seldom would be silently wrong.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from pathlib import PurePath
from types import CodeType
from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler

logger = logging.getLogger("autopar")

PLAIN = (int, float, complex, str, bytes, PurePath, logging.Logger, type(None))
FROM_OUTSIDE = (nn.Module, Trainer)


class LookingHandler(CallbackHandler):  # type: ignore[misc]
    """A CallbackHandler that has the trained values in the model before it calls who may look at them.

    take_values: puts them there; collective, as every rank has the same callbacks.
    """

    take_values: Callable[[], None]
    looked: dict[tuple[type, str], bool]

    def call_event(self, event: str, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """As transformers' own."""
        if any(self._looks(each, event) for each in self.callbacks):
            self.take_values()
        return super().call_event(event, args, state, control, **named)

    def _looks(self, callback: TrainerCallback, event: str) -> bool:
        key = type(callback), event
        if key not in self.looked:
            function = getattr(type(callback), event, None)
            is_own = not type(callback).__module__.startswith("transformers.")
            is_empty = function is getattr(TrainerCallback, event, None)
            self.looked[key] = found = is_own and not is_empty and (may_look(function) or holds_more(callback))
            if found:
                logger.info("%s.%s may look at the model: it has the trained values then", key[0].__name__, event)
        return self.looked[key]


def may_look(function: Any) -> bool:
    """Whether a function's code names a model, or refers to a module or a Trainer from outside."""
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    if "model" in _names(code):
        return True
    found = inspect.getclosurevars(function)
    return any(isinstance(each, FROM_OUTSIDE) for each in (*found.nonlocals.values(), *found.globals.values()))


def _names(code: CodeType) -> set[Any]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    texts = {each for each in code.co_consts if isinstance(each, str)}
    return {*code.co_names, *code.co_varnames, *code.co_freevars, *texts}.union(*(_names(each) for each in inner))


def holds_more(held: Any) -> bool:
    """Whether an object's attributes are more than plain values: numbers, texts, paths, lists and mappings of them."""
    return any(not _is_plain(value) for value in getattr(held, "__dict__", {}).values())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in (*value.keys(), *value.values()))
    return isinstance(value, PLAIN)
