"""Where values are that a model, its loss and their script hold: how they are reached and replaced."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.frontend.attributes import is_a
from autopar.frontend.state_reads import ClassData, Environment, Globals
from autopar.frontend.state_values import MISSING, KeyOf


def held_by(label: str, function: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None] | None]]:
    """(name, how to get it, how to replace it) of what a function brings with it."""
    if is_a(function, functools.partial):
        yield f"the arguments of {label}", lambda: (function.args, function.keywords), None
        yield from held_by(label, function.func)
    elif is_a(function, types.MethodType):
        if not is_a(function.__self__, nn.Module):
            yield f"self of {label}", lambda: function.__self__, None
    elif is_a(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = f"{name} in the closure of {label}"
            yield place, functools.partial(_cell, cell), functools.partial(setattr, cell, "cell_contents")
        if function.__defaults__ or function.__kwdefaults__:
            yield f"the defaults of {label}", lambda: (function.__defaults__, function.__kwdefaults__), None
    elif function is not None and not is_a(function, type, nn.Module, types.BuiltinFunctionType):
        yield label, lambda: function, None


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it holds nothing yet
        return MISSING


def get_step(owner: Any, step: Any) -> Any:
    how, name = _parsed(step)
    if how != ".":
        return owner[name]
    return owner.values[name] if type(owner) in (Globals, ClassData) else getattr(owner, name)


def set_step(owner: Any, step: Any, value: Any) -> None:
    how, name = _parsed(step)
    if how != ".":
        owner[name] = value
    elif type(owner) is ClassData:
        setattr(owner.kind, name, value)
    elif type(owner) in (Globals, Environment):
        owner.values[name] = value
    else:
        setattr(owner, name, value)


def _parsed(step: Any) -> tuple[str, Any]:
    how, name = step if isinstance(step, tuple) else (".", step)
    return how, name.value if isinstance(name, KeyOf) else name
