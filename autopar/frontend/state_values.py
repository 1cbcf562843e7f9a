"""Values that a model, its loss and their script hold: what is in them, and whether they are as they were."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import numbers
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from autopar.frontend.state_reads import ClassData, Fields, Globals, Line, text_of

_PLAIN = (bool, int, float, complex, np.number, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
FOREIGN = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "numpy", "logging", "threading"})
"""Packages whose objects are not looked into."""
_MOST_LEAVES, _MOST_DEPTH = 2000, 6

Key = tuple[str, str, tuple[Any, ...]]
"""Where a value is: a kind of place, the path of it, and the steps within what is there."""


@dataclass(frozen=True)
class Change:
    """One thing that is no longer as it was. name: in words. old, new: the values. line: that read it.

    key: where another process has it; None for what cannot be moved there. buffer: its name, of a buffer. is_of_parts:
    of what the model is made of, and not of what is in it.
    """

    name: str
    old: Any
    new: Any
    line: str = ""
    key: Key | None = None
    buffer: str = ""
    is_of_parts: bool = False

    @property
    def is_followable(self) -> bool:
        return self.is_number or self.is_tensor

    @property
    def is_movable(self) -> bool:
        """Whether another process can be given it."""
        return self.key is not None and (is_plain(self.new) or isinstance(self.new, Tensor))

    @property
    def is_number(self) -> bool:
        return _are_numbers(self.old, self.new)

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.old, Tensor) and isinstance(self.new, Tensor)

    def __str__(self) -> str:
        at = f", read at {self.line}" if self.line else ""
        return f"{self.name}: {_shown(self.old)} then, {_shown(self.new)} now{at}"


class Missing:
    """Stands for the value of something that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class Root:
    """A value that holds others: where it is, and what was in it. get, put: read and replace it."""

    def __init__(
        self,
        key: Key,
        name: str,
        line: Line | None,
        get: Callable[[], Any],
        put: Callable[[Any], None] | None,
        fields: Fields,
    ) -> None:
        self.key, self.name, self.line, self.get, self.put = key, name, line, get, put
        self.value, self.fields = get(), fields
        self.leaves = leaves_of(self.value, fields)
        self.is_opaque = isinstance(self.leaves.get(()), Held) or is_plain(self.value)

    def of(self, get: Callable[[], Any]) -> Root:
        """The same value, read in another way."""
        made = object.__new__(Root)
        vars(made).update({**vars(self), "get": get})
        return made

    def is_same(self) -> bool:
        """Whether nothing in it has changed."""
        now = self.get()
        return (self.is_opaque and now is self.value) or leaves_of(now, self.fields) == self.leaves

    def changes(self) -> Iterator[Change]:
        """What has changed in it."""
        now = leaves_of(self.get(), self.fields)
        for steps in dict.fromkeys((*self.leaves, *now)):
            old, new = self.leaves.get(steps, MISSING), now.get(steps, MISSING)
            if old == new:
                continue
            old, new = (each.tensor if isinstance(each, SeenTensor) else each for each in (old, new))
            kind, path, own = self.key
            inner = "".join(f".{step}" if how == "." else f"[{step!r}]" if how == "[" else "" for how, step in steps)
            head, _, rest = self.name.partition(" ")
            is_movable = new is not MISSING and not any(how == "#" for how, _ in steps)
            key = (kind, path, (*own, *steps)) if is_movable else None
            yield Change(f"{head}{inner} {rest}".strip(), old, new, line=text_of(self.line), key=key)


class SeenTensor:
    """A tensor as it was: another one, or another number of writes to it, is not equal."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self._version, self._place = tensor, _version(tensor), place_of(tensor)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeenTensor):
            return False
        return (self.tensor is other.tensor) and (self._version, self._place) == (other._version, other._place)

    __hash__ = None  # type: ignore[assignment]


def leaves_of(value: Any, fields: Fields) -> dict[tuple[Any, ...], Any]:
    """What is in a value, by the steps to it: plain values, tensors, and the identities of all else.

    fields: of objects, as `Reads` has them.
    """
    found: dict[tuple[Any, ...], Any] = {}
    seen: set[int] = set()

    def visit(each: Any, steps: tuple[Any, ...]) -> None:
        if is_plain(each):
            found[steps] = each
        elif isinstance(each, Tensor):
            found[steps] = SeenTensor(each)
        elif len(found) > _MOST_LEAVES or len(steps) >= _MOST_DEPTH or id(each) in seen:
            found[steps] = id(each)
        elif (items := _items(each, fields)) is not None:
            seen.add(id(each))
            found[(*steps, ("#", "length"))] = (type(each), len(items))
            for step, inner in items:
                visit(inner, (*steps, step))
        else:
            found[steps] = Held(each)

    visit(value, ())
    return found


class Held:
    """An object of which only the identity counts."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and (other.value is self.value or _is_same_method(self.value, other.value))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def _is_same_method(one: Any, other: Any) -> bool:
    return isinstance(one, types.MethodType) and isinstance(other, types.MethodType) and one == other


def _items(value: Any, fields: Fields) -> list[tuple[tuple[str, Any], Any]] | None:
    """The parts of a container or of an object that is made of plain attributes; None of all else."""
    if isinstance(value, Mapping):
        return [(("[", key), inner) for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [(("[", index), inner) for index, inner in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return [(("[", key), True) for key in value if isinstance(key, _PLAIN)]
    home = type(value).__module__.partition(".")[0]
    is_namespace = isinstance(value, (types.SimpleNamespace, argparse.Namespace))
    if isinstance(value, (type, nn.Module)) or (callable(value) and not hasattr(value, "__dict__")):
        return None
    if home in FOREIGN or (home == "transformers" and "Config" not in type(value).__name__):
        return None
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial, types.ModuleType)):
        return None
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value) if _is_read(value, each.name, fields)]
        return [((".", name), getattr(value, name, MISSING)) for name in names]
    if is_namespace or hasattr(value, "__dict__"):
        return [((".", name), inner) for name, inner in vars(value).items() if _is_read(value, name, fields)]
    return None


def _is_read(value: Any, name: str, fields: Fields) -> bool:
    """Whether forward reads an attribute of an object, also under the name that a configuration of transformers has
    for it."""
    known = fields.get(type(value))
    if known is None or name in known or "__dict__" in known:
        return True
    return any(own == name and alias in known for alias, own in getattr(type(value), "attribute_map", {}).items())


def object_kinds(values: Iterable[Any]) -> set[type]:
    """The classes of objects with attributes that are in these values."""
    found: set[type] = set()
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_plain(value) or isinstance(value, Tensor) or len(seen) > _MOST_LEAVES:
            continue
        seen.add(id(value))
        items = _items(value, {})
        if items and items[0][0][0] == ".":
            found.add(type(value))
        waiting += [inner for _, inner in items or ()]
    return found


def held_by(label: str, function: Any) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None] | None]]:
    """(name, how to get it, how to replace it) of what a function brings with it."""
    if isinstance(function, functools.partial):
        yield f"the arguments of {label}", lambda: (function.args, function.keywords), None
        yield from held_by(label, function.func)
    elif isinstance(function, types.MethodType):
        if not isinstance(function.__self__, nn.Module):
            yield f"self of {label}", lambda: function.__self__, None
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = f"{name} in the closure of {label}"
            yield place, functools.partial(_cell, cell), functools.partial(setattr, cell, "cell_contents")
        if function.__defaults__ or function.__kwdefaults__:
            yield f"the defaults of {label}", lambda: (function.__defaults__, function.__kwdefaults__), None
    elif function is not None and not isinstance(function, (type, nn.Module, types.BuiltinFunctionType)):
        yield label, lambda: function, None


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it holds nothing yet
        return MISSING


def get_step(owner: Any, step: Any) -> Any:
    how, name = step if isinstance(step, tuple) else (".", step)
    if how == "[":
        return owner[name]
    return owner.values[name] if isinstance(owner, (Globals, ClassData)) else getattr(owner, name)


def set_step(owner: Any, step: Any, value: Any) -> None:
    how, name = step if isinstance(step, tuple) else (".", step)
    if how == "[":
        owner[name] = value
    elif isinstance(owner, ClassData):
        setattr(owner.kind, name, value)
    elif isinstance(owner, Globals):
        owner.values[name] = value
    else:
        setattr(owner, name, value)


def _are_numbers(old: Any, new: Any) -> bool:
    """Whether both are numbers, or tuples that differ in numbers alone."""
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return all(_are_numbers(*pair) or (type(pair[0]) is type(pair[1]) and is_equal(*pair)) for pair in pairs)
    return all(isinstance(each, numbers.Real) and not isinstance(each, bool) for each in (old, new))


def is_plain(value: Any) -> bool:
    if isinstance(value, tuple) and type(value) is not torch.Size:
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)


def is_class_data(value: Any) -> bool:
    """Whether a class attribute is data."""
    return is_plain(value) or isinstance(value, (list, dict, set, Tensor, types.SimpleNamespace))


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return one is other
    try:
        return type(one) is type(other) and bool(one == other or (one != one and other != other))
    except Exception:  # whatever a class's own comparison raises
        return False


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def place_of(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory
        return 0


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__}"
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"a function of line {value.__code__.co_firstlineno}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
