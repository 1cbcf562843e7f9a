"""Which functions of a script may look at the model, found from their code."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import tests.autopar.frameworks as own_module
from autopar.frameworks.script_callbacks import LookingHandler, holds_more, may_look

logger = logging.getLogger(__name__)
layer = nn.Linear(2, 2)
holder: Any = type("Holder", (), {})()
holder.layer = layer


def norm_of_it() -> float:
    return float(layer.weight.norm())


def norm_by_another() -> float:
    return norm_of_it()


def plain() -> str:
    return json.dumps({"at": time.time()})


def itself(count: int) -> int:
    return itself(count - 1) if count else 0


@pytest.mark.parametrize(
    ("function", "looks"),
    [
        (lambda control, **named: logger.info("%s", plain()), False),
        (lambda control, **named: print(torch.zeros(2).sum(), itself(3)), False),
        (lambda control, model, **named: None, True),
        (lambda control, **named: named["model"], True),
        (lambda control, **named: norm_of_it(), True),
        (lambda control, **named: norm_by_another(), True),
        (lambda control, **named: holder.layer, True),
        (lambda control, **named: own_module.__doc__, True),
        (len, True),
    ],
)
def test_a_function_may_look_by_its_code_and_by_what_it_calls(function: Callable[..., Any], looks: bool) -> None:
    assert may_look(function) == looks


def test_an_object_holds_more_than_plain_values() -> None:
    callback: Any = type("Callback", (), {})()
    callback.losses, callback.best = [1.0, 2.0], {"step": 3}
    assert not holds_more(callback)
    callback.average = [layer.weight]
    assert holds_more(callback)


class Late(TrainerCallback):
    """Holds what it is given, which may be in the midst of training."""

    def __init__(self, average: Any = None) -> None:
        self.average = average

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        print(self.average)


class ByHelper(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        self.told()

    def told(self) -> None:
        print(norm_of_it())


def test_objects_of_one_class_are_asked_one_by_one_and_each_time() -> None:
    handler = LookingHandler.__new__(LookingHandler)
    handler.looked = {}
    first, second = Late(), Late(layer)
    assert [handler._looks(callback, "on_step_end") for callback in (first, second)] == [False, True]
    first.average = layer
    assert handler._looks(first, "on_step_end") and not handler._looks(first, "on_epoch_end")


def test_what_a_callback_does_by_another_method_is_its_own() -> None:
    handler = LookingHandler.__new__(LookingHandler)
    handler.looked = {}
    assert handler._looks(ByHelper(), "on_step_end")
