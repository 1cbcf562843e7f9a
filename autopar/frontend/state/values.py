"""Compare values in a model, its loss and their script with earlier ones.

Nothing here runs the user's code: values are read as `attributes.py` does, and equality is that of the interpreter's
own types and of the classes below.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.frontend.attributes import attribute, attributes_of, is_a, items_of
from autopar.frontend.state.reads import Fields, Line, home_of, text_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_KINDS = (*_PLAIN, np.number, enum.Enum)
_EXACT = frozenset(_PLAIN)
"""Types whose equality and hash are the interpreter's own."""
FOREIGN = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "numpy", "logging", "threading"})
"""Packages whose objects are not examined."""
_MOST_LEAVES, _MOST_DEPTH = 2000, 10

_NO_PARTS = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType, enum.Enum)

Key = tuple[str, str, tuple[Any, ...]]
"""The place of a value: a kind of place, its path, and the steps within the value there."""


@dataclass(frozen=True)
class Change:
    """One changed value. name: in words. old, new: the values. line: that read it.

    key: its place in another process; None if it cannot be moved there. buffer, parameter: the name of a buffer, or of
    a parameter whose requires_grad it is. is_of_parts: a part of the model was replaced, rather than a value in a part.
    """

    name: str
    old: Any
    new: Any
    line: str = ""
    key: Key | None = None
    buffer: str = ""
    parameter: str = ""
    parameter_values: str = ""
    is_of_parts: bool = False

    @property
    def is_of_values(self) -> bool:
        """Return whether a program may only need other numbers: any other change may decide what forward does."""
        return self.is_number or self.is_tensor

    @property
    def is_movable(self) -> bool:
        """Return whether it can be sent to another process."""
        return self.key is not None and (is_plain(self.new) or is_a(self.new, Tensor))

    @property
    def is_number(self) -> bool:
        return _are_numbers(self.old, self.new)

    @property
    def is_tensor(self) -> bool:
        return is_a(self.old, Tensor) and is_a(self.new, Tensor)

    def __str__(self) -> str:
        if self.parameter_values:
            return f"{self.name}: written"
        at = f", read at {self.line}" if self.line else ""
        return f"{self.name}: {_shown(self.old)} then, {_shown(self.new)} now{at}"


class Missing:
    """Stands for a missing value."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = Missing()


class Root:
    """A value that contains others: its place and its former contents. get, put: read and replace it."""

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
        self.is_opaque = type(self.leaves.get(())) is ByIdentity or is_plain(self.value)

    def of(self, get: Callable[[], Any]) -> Root:
        """Return the same value, read in another way."""
        root = object.__new__(Root)
        vars(root).update({**vars(self), "get": get})
        return root

    def is_same(self) -> bool:
        """Return whether nothing in it has changed."""
        now = self.get()
        return (self.is_opaque and now is self.value) or are_alike(leaves_of(now, self.fields), self.leaves)

    def changes(self) -> Iterator[Change]:
        """Yield its changes."""
        now = leaves_of(self.get(), self.fields)
        for steps in dict.fromkeys((*self.leaves, *now)):
            old, new = self.leaves.get(steps, MISSING), now.get(steps, MISSING)
            if type(old) is type(new) and old == new:
                continue
            old, new = (leaf.value if type(leaf) in (SeenTensor, PlainValue) else leaf for leaf in (old, new))
            old, new = (MISSING if type(leaf) is ByIdentity and leaf.value is MISSING else leaf for leaf in (old, new))
            kind, path, first_steps = self.key
            inner = "".join(f".{step}" if how == "." else "" if how == "#" else f"[{step!r}]" for how, step in steps)
            head, _, rest = self.name.partition(" ")
            is_movable = new is not MISSING and all(how in (".", "[") for how, _ in steps)
            key = (kind, path, (*first_steps, *steps)) if is_movable else None
            yield Change(f"{head}{inner} {rest}".strip(), old, new, line=text_of(self.line), key=key)


class SeenTensor:
    """A tensor at one time: another tensor, or another number of writes to it, is unequal."""

    def __init__(self, value: Tensor) -> None:
        self.value, self._version, self._place = value, _version(value), place_of(value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeenTensor):
            return False
        return (self.value is other.value) and (self._version, self._place) == (other._version, other._place)

    __hash__ = None  # type: ignore[assignment]


class ByIdentity:
    """An object that is compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and (other.value is self.value or _is_same_method(self.value, other.value))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


class PlainValue:
    """Plain data of a class that may define its own equality."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainValue) and is_equal(self.value, other.value)

    __hash__ = None  # type: ignore[assignment]


class KeyByIdentity:
    """A key of a dict, or an element of a set, that may define its own equality: compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyByIdentity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return _shown(self.value)


class Length(NamedTuple):
    """The class and the length of a container or an object."""

    kind: type
    size: int

    def __repr__(self) -> str:
        return f"a {self.kind.__name__} of {self.size}"


def leaves_of(value: Any, fields: Fields) -> dict[tuple[Any, ...], Any]:
    """Return the contents of a value, by the steps to them: plain values, tensors, and identities of other objects.

    fields: of objects, as `Reads` has them.
    """
    leaves: dict[tuple[Any, ...], Any] = {}
    seen: set[int] = set()

    def visit(part: Any, steps: tuple[Any, ...]) -> None:
        if type(part) in _EXACT:
            leaves[steps] = part
        elif part is MISSING:
            leaves[steps] = ByIdentity(part)
        elif issubclass(type(part), Tensor):
            leaves[steps] = SeenTensor(part)
        elif is_plain(part):
            leaves[steps] = part if _is_exact(part) else PlainValue(part)
        elif len(leaves) > _MOST_LEAVES or len(steps) >= _MOST_DEPTH or id(part) in seen:
            leaves[steps] = ByIdentity(part)
        elif (items := _items(part, fields)) is not None:
            seen.add(id(part))
            leaves[(*steps, ("#", "length"))] = Length(type(part), len(items))
            for step, inner in items:
                visit(inner, (*steps, step))
        else:
            leaves[steps] = ByIdentity(part)

    visit(value, ())
    return leaves


def are_alike(leaves: dict[tuple[Any, ...], Any], others: dict[tuple[Any, ...], Any]) -> bool:
    """Return whether two values have equal leaves; 1, 1.0 and True differ."""
    return leaves == others and all(map(operator.is_, map(type, leaves.values()), map(type, others.values())))


def _is_same_method(method: Any, other: Any) -> bool:
    if not (type(method) is type(other) is types.MethodType):
        return False
    return method.__self__ is other.__self__ and method.__func__ is other.__func__


def _items(value: Any, fields: Fields) -> list[tuple[tuple[str, Any], Any]] | None:
    """Return the parts of a container or of an object that consists of plain attributes; None for any other value."""
    kind = type(value)
    if kind is types.MappingProxyType:
        (value,) = gc.get_referents(value)  # the object that it is a view of
        kind = type(value)
    if issubclass(kind, functools.partial):
        return [((".", name), getattr(value, name)) for name in ("func", "args", "keywords")]
    if issubclass(kind, dict):
        return [(("[", _step(key)), inner) for key, inner in dict.items(value)]
    if issubclass(kind, list):
        return [(("[", index), inner) for index, inner in enumerate(list.__iter__(value))]
    if (items := items_of(value)) is not None:
        if issubclass(kind, (set, frozenset)):
            return [(("{", _step(inner)), True) for _, inner in items]
        # No other process can get one item of a tuple.
        return [(("(" if issubclass(kind, tuple) else "[", index), inner) for index, inner in items]
    if issubclass(kind, _NO_PARTS) or not (kind.__dictoffset__ or any("__slots__" in vars(k) for k in kind.__mro__)):
        return None
    home = home_of(kind)
    if home in FOREIGN or (home == "transformers" and "Config" not in kind.__name__):
        return None
    if not (attributes := attributes_of(value)) and not kind.__dictoffset__:
        return None
    if dataclasses.is_dataclass(kind):
        names = {field.name for field in dataclasses.fields(kind)}
        attributes = {name: inner for name, inner in attributes.items() if name in names}
    return [((".", name), inner) for name, inner in attributes.items() if _is_read(kind, name, fields)]


def _step(key: Any) -> Any:
    return key if _is_exact(key) else KeyByIdentity(key)


def _is_read(kind: type, name: str, fields: Fields) -> bool:
    """Return whether forward reads an attribute of a class's objects, also by its alias in a transformers config."""
    names = fields.get(kind)
    if names is None or name in names or "__dict__" in names:
        return True
    aliases = attribute(kind, "attribute_map")
    return is_a(aliases, dict) and any(own_name == name and alias in names for alias, own_name in dict.items(aliases))


def object_kinds(values: Iterable[Any]) -> set[type]:
    """Return the classes of objects with attributes in these values."""
    kinds: set[type] = set()
    seen: set[int] = set()
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or is_plain(value) or is_a(value, Tensor) or len(seen) > _MOST_LEAVES:
            continue
        seen.add(id(value))
        items = _items(value, {})
        if items and items[0][0][0] == ".":
            kinds.add(type(value))
        waiting += [inner for _, inner in items or ()]
    return kinds


def _are_numbers(old: Any, new: Any) -> bool:
    """Return whether both are numbers, or tuples that differ in numbers alone."""
    if type(old) is tuple and type(new) is tuple and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return all(_are_numbers(*pair) or (type(pair[0]) is type(pair[1]) and is_equal(*pair)) for pair in pairs)
    return all(is_a(value, int, float, np.number) and not is_a(value, bool, enum.Enum) for value in (old, new))


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text, a member of an enum or the like, or a tuple of those."""
    kind = type(value)
    if kind in _EXACT:
        return True
    if issubclass(kind, tuple):
        return all(type(item) in _EXACT or issubclass(type(item), _KINDS) for item in tuple.__iter__(value))
    return issubclass(kind, _KINDS)


def _is_exact(value: Any) -> bool:
    """Return whether a value's equality is the interpreter's."""
    return type(value) in _EXACT or (type(value) is tuple and all(type(item) in _EXACT for item in value))


def is_class_data(value: Any) -> bool:
    """Return whether a class attribute is data."""
    return is_plain(value) or is_a(value, list, dict, set, Tensor, types.SimpleNamespace)


def is_equal(value: Any, other: Any) -> bool:
    """Return whether plain values are equal; other values are compared by identity."""
    kind = type(value)
    if value is other:
        return True
    if kind is not type(other) or issubclass(kind, enum.Enum):
        return False
    if kind in _EXACT:
        return bool(value == other or (value != value and other != other))
    if issubclass(kind, tuple):
        some, others = list(tuple.__iter__(value)), list(tuple.__iter__(other))
        return len(some) == len(others) and all(map(is_equal, some, others))
    plain: Any = next((plain_type for plain_type in _PLAIN if issubclass(kind, plain_type)), object)
    return plain.__eq__(value, other) is True or (
        plain.__ne__(value, value) is True and plain.__ne__(other, other) is True
    )


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def place_of(tensor: Tensor) -> int:
    if is_a(tensor, FakeTensor):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a tensor without memory
        return 0


def has_moved(old: Tensor, new: Tensor) -> bool:
    """Return whether one tensor has the values of another, as after a visit to another device, or was freed."""
    is_alike = (old.shape, old.dtype) == (new.shape, new.dtype) and not (old.is_meta or new.is_meta)
    return is_freed(old, new) or (is_alike and torch.equal(old.cpu(), new.cpu()))


def is_freed(old: Tensor, new: Tensor) -> bool:
    """Return whether a tensor is unchanged, or on meta now: a script frees its memory."""
    return old is new or (new.is_meta and (old.shape, old.dtype) == (new.shape, new.dtype))


def unlike(then: tuple[Any, ...], now: tuple[Any, ...]) -> tuple[Any, Any]:
    pair = next(((a, b) for a, b in zip(then, now, strict=False) if a is not b), None)
    return pair if pair is not None else (f"{len(then)} of them", f"{len(now)} of them")


def _shown(value: Any) -> str:
    kind = type(value)
    if issubclass(kind, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if issubclass(kind, enum.Enum):
        return f"{kind.__name__}.{value._name_}"
    if issubclass(kind, types.FunctionType):
        return f"a function of line {value.__code__.co_firstlineno}"
    if not (_is_exact(value) or kind in (Missing, ByIdentity, Length)):
        if issubclass(kind, np.number):
            return _short(repr(np.generic.item(value)))
        plain: Any = next((plain_type for plain_type in _PLAIN if issubclass(kind, plain_type)), None)
        return f"a {kind.__name__}" if plain is None else _short(plain.__repr__(value))
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."
