"""Read modules, tensors and attributes of a user's model without running the user's code.

A model may hold anything: None among its modules, tuples whose `__len__` raises, proxies that raise when asked for
their class, lists that contain themselves. So containers are read by the methods of list, tuple, set and dict, kinds
come from `type(value)`, and no attribute is looked up on an object that may override the lookup.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Kind = TypeVar("Kind")

SCALARS = (bool, int, float, str, bytes, complex, type(None))
_MOST_BYTES = 2**16  # of a numpy array that is compared by its values
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_DEEPEST = 8
_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_SEQUENCES: tuple[type, ...] = (list, tuple, collections.deque, set, frozenset)


def is_a(value: Any, *kinds: type) -> bool:
    """Return whether `value` is an instance of one of `kinds`, as `isinstance` does, without calling the
    value's code.
    """
    return issubclass(type(value), kinds)


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """Return `value.name`, or `default` where the lookup raises any exception."""
    try:
        return getattr(value, name, default)
    except Exception:  # a property, or a __getattr__ of the user's
        return default


def dict_of(value: Any) -> dict[str, Any]:
    """Return an object's `__dict__` itself, not a copy."""
    return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the values in an object's `__dict__` and its slots, by name."""
    attributes: dict[str, Any] = {}
    for kind in type(value).__mro__:
        for name, member in vars(kind).items():
            if type(member) is types.MemberDescriptorType and name not in ("__dict__", "__weakref__"):
                try:
                    attributes[name] = member.__get__(value)
                except AttributeError:  # an empty slot
                    continue
    try:
        members = object.__getattribute__(value, "__dict__")
    except Exception:
        return attributes
    return attributes | dict.copy(members) if is_a(members, dict) else attributes


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Return the items of a list, tuple, set, deque or dict as (index or key, item); None for any other value."""
    if is_a(value, dict):
        return list(dict.items(value))
    for kind in _SEQUENCES:
        if is_a(value, kind):
            return list(enumerate(kind.__iter__(value)))  # type: ignore[attr-defined]
    return None


def parts_of(value: Any) -> list[Any]:
    """Return the values that an object refers to: items and keys of a container, arguments of a partial, attributes."""
    if is_a(value, *SCALARS, types.ModuleType, *FUNCTIONS[:2], type, Tensor):
        return []
    parts: list[Any] = []
    if is_a(value, functools.partial):
        parts += [value.func, value.args, value.keywords]
    for key, item in items_of(value) or ():
        parts += [key, item]
    return parts + list(attributes_of(value).values())


def summary(value: Any, fallback: Callable[[Any], Hashable], deepest: int = _DEEPEST) -> Hashable:
    """Return a comparable summary of `value`: plain data by value, containers by their contents.

    other: summarizes any other value, and values nested deeper than `deepest`.
    """
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return kind, str(value._name_)
    for plain in SCALARS:
        if issubclass(kind, plain):
            plain_repr: Any = plain.__repr__
            return kind, str(plain_repr(value))
    if kind in _VALUES:
        return kind, repr(value)
    if issubclass(kind, np.generic) or (issubclass(kind, np.ndarray) and not value.dtype.hasobject):
        return _array(np.asarray(value)) if value.nbytes <= _MOST_BYTES else fallback(value)
    if deepest < 0:
        return fallback(value)

    def inner(item: Any) -> Hashable:
        return summary(item, fallback, deepest - 1)

    if issubclass(kind, dict):
        return kind, tuple([(inner(key), inner(item)) for key, item in dict.items(value)])
    if issubclass(kind, (set, frozenset)):
        return kind, frozenset(inner(item) for _, item in items_of(value) or ())
    if issubclass(kind, _SEQUENCES):
        return kind, tuple([inner(item) for _, item in items_of(value) or ()])
    if issubclass(kind, functools.partial):
        return kind, inner(value.func), inner(value.args), inner(value.keywords)
    if dataclasses.is_dataclass(kind):
        return kind, inner(attributes_of(value))
    return fallback(value)


def _array(array: np.ndarray[Any, Any]) -> Hashable:
    return np.ndarray, str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).digest()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value: itself, or in containers and objects, except in modules."""
    tensors: list[Tensor] = []
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if id(part) in seen or (is_a(part, nn.Module) and part is not value):
            continue
        seen.add(id(part))
        if is_a(part, Tensor):
            tensors.append(part)
        else:
            waiting += parts_of(part)
    return tensors


# --- modules, whatever their own named_modules() and named_parameters() say -------------------------------------------


def named_modules(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model with their paths, as `nn.Module.named_modules` does."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if remove_duplicate and id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        prefix = f"{path}." if path else ""
        waiting += [(prefix + name, child) for name, child in children_of(module)][::-1]


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield every module of a model once."""
    return (module for _, module in named_modules(model))


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the direct submodules by name, without those that are None."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def blocks_of(modules: nn.ModuleList) -> list[nn.Module | None]:
    """Return the entries of a ModuleList, None included, for any class of list."""
    return list(modules._modules.values())


INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


def named_parameters(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of a model by name, as `nn.Module.named_parameters` does."""
    return _named(model, "_parameters", remove_duplicate)


def named_buffers(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of a model by name, as `nn.Module.named_buffers` does."""
    return _named(model, "_buffers", remove_duplicate)


def named_tensors(model: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and then the buffers of a model by name."""
    yield from named_parameters(model, remove_duplicate)
    yield from named_buffers(model, remove_duplicate)


def persistent_names(model: nn.Module) -> set[str]:
    """Return the names of all parameters and persistent buffers; tied tensors have all their names."""
    names = {name for name, _ in named_parameters(model, remove_duplicate=False)}
    for path, module in named_modules(model, remove_duplicate=False):
        prefix = f"{path}." if path else ""
        buffers = (name for name, buffer in module._buffers.items() if buffer is not None)
        names |= {prefix + name for name in buffers if name not in module._non_persistent_buffers_set}
    return names


def _named(model: nn.Module, table: str, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for path, module in named_modules(model, remove_duplicate):
        for name, tensor in getattr(module, table).items():
            if tensor is not None and not (remove_duplicate and id(tensor) in seen):
                seen.add(id(tensor))
                yield (f"{path}.{name}" if path else name), tensor
