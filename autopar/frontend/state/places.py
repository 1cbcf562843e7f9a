"""Places of values in a model, its loss and their script: how to read and replace them."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.frontend.attributes import is_a
from autopar.frontend.state.reads import ClassData, Environment, Globals
from autopar.frontend.state.values import MISSING, KeyByIdentity


def held_by(label: str, function: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None] | None]]:
    """Yield (name, how to get it, how to replace it) of values that a function carries."""
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
    except ValueError:  # an empty cell
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


def put_within(owner: Any, steps: tuple[Any, ...], value: Any) -> None:
    """Replace the value some steps within an owner; of a module's buffer its elements."""
    *inner, last = steps
    for step in inner:
        owner = get_step(owner, step)
    if not inner and is_a(owner, nn.Module) and is_a(owner._buffers.get(last), Tensor):
        with torch.no_grad():
            owner._buffers[last].copy_(value)
    else:
        set_step(owner, last, value)


def put_parameter(parameter: nn.Parameter, kind: str, value: Any) -> None:
    """Replace a parameter's "values", or its "requires_grad"."""
    with torch.no_grad():
        parameter.requires_grad_(value) if kind == "requires_grad" else parameter.copy_(value)


def names_in(path: str, table: Mapping[str, Any]) -> list[str]:
    """Return the names, within the model, in a module's table."""
    return [f"{path}.{name}" if path else name for name in table]


def named(path: str, table: Mapping[str, Tensor | None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a module's table, by their names within the model."""
    for name, tensor in zip(names_in(path, table), table.values(), strict=True):
        if tensor is not None:
            yield name, tensor


def _parsed(step: Any) -> tuple[str, Any]:
    how, name = step if isinstance(step, tuple) else (".", step)
    return how, name.value if isinstance(name, KeyByIdentity) else name
