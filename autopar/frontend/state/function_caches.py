"""Clear caches outside a model that its forward fills: `functools.lru_cache`, globals, classes, default arguments.

A forward on fake tensors leaves fake tensors there, which neither the next trace nor the user's forward can use.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.frontend.attributes import attributes_of, dict_of, is_a, items_of, modules_of
from autopar.frontend.state.reads import home_of

_LIBRARIES = frozenset({"torch", "numpy", "transformers", "autopar", "codegen", "builtins", "functools", "typing"})
_CACHED: type = functools._lru_cache_wrapper
_MOST_FUNCTIONS = 2000


@contextlib.contextmanager
def without_fakes(model: nn.Module, functions: tuple[Any, ...] = ()) -> Iterator[None]:
    """Context manager before and after which no cache that the model's functions name has fake tensors."""
    caches = _caches(model, functions)
    _drop_fakes(caches)
    try:
        yield
    finally:
        _drop_fakes(caches)


def _drop_fakes(caches: list[Any]) -> None:
    """Remove fake tensors from caches."""
    for cache in caches:
        if is_a(cache, _CACHED):
            if cache.cache_info().currsize and _has_fakes(cache, deepest=6):
                cache.cache_clear()
        elif is_a(cache, dict):
            for key in [key for key, value in dict.items(cache) if _has_fakes(value)]:
                dict.__delitem__(cache, key)
        elif is_a(cache, list) and any(map(_has_fakes, list.__iter__(cache))):
            cache[:] = [value for value in list.__iter__(cache) if not _has_fakes(value)]


def is_filled(value: Any) -> bool:
    """Return whether a container has only values that forwards on fake tensors have put there."""
    items = items_of(value) if is_a(value, dict, list) else None
    return bool(items) and all(_has_fakes(item) for _, item in items or ())


def _has_fakes(value: Any, deepest: int = 3) -> bool:
    if is_a(value, FakeTensor):
        return True
    if deepest <= 0 or is_a(value, nn.Module, type, types.ModuleType, types.FunctionType):
        return False
    if is_a(value, _CACHED) or type(value).__name__ == "_lru_list_elem":
        return any(_has_fakes(part, deepest - 1) for part in gc.get_referents(value))
    return any(_has_fakes(part, deepest - 1) for _, part in items_of(value) or ())


def _caches(model: nn.Module, functions: tuple[Any, ...]) -> list[Any]:
    return [value for value in named_by_functions(model, functions) if is_a(value, dict, list, _CACHED)]


def functions_of(model: nn.Module, functions: tuple[Any, ...] = ()) -> list[types.FunctionType]:
    """Return the functions that a forward may call: of its modules' classes, `functions`, and functions
    that they name.
    """
    return [value for value in named_by_functions(model, functions) if is_a(value, types.FunctionType)]


def named_by_functions(model: nn.Module, functions: tuple[Any, ...]) -> list[Any]:
    """Return functions, cached functions and containers: of modules' classes, `functions`, and those that they name."""
    kinds = dict.fromkeys(kind for module in modules_of(model) for kind in type(module).__mro__)
    waiting: list[Any] = [*kinds, *functions]
    waiting += [member for module in modules_of(model) for member in attributes_of(module).values() if callable(member)]
    values: dict[int, Any] = {}
    while waiting and len(values) < _MOST_FUNCTIONS:
        value = waiting.pop()
        value = value.__func__ if is_a(value, types.MethodType) else value
        if id(value) in values:
            continue
        if is_a(value, dict, list):
            values[id(value)] = value
        elif is_a(value, _CACHED):
            values[id(value)] = value
            waiting.append(value.__wrapped__)
        elif is_a(value, type) and home_of(value) not in _LIBRARIES:
            values[id(value)] = value
            waiting += [_function(member) for member in vars(value).values()]
        elif is_a(value, types.FunctionType) and (value.__module__ or "").partition(".")[0] not in _LIBRARIES:
            values[id(value)] = value
            waiting += _named(value)
    return list(values.values())


def _function(value: Any) -> Any:
    if is_a(value, staticmethod, classmethod):
        return value.__func__
    return value.fget if is_a(value, property) else value


def _named(function: types.FunctionType) -> list[Any]:
    """Return the objects that a function names: globals, names of modules among them, closures, defaults, its
    attributes.
    """
    names = _names(function.__code__)
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    for space in [value for value in values if is_a(value, types.ModuleType)]:
        members = dict_of(space)
        if str(members.get("__name__")).partition(".")[0] not in _LIBRARIES:
            values += [members[name] for name in names if name in members]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]
    return [value for value in values if is_a(value, dict, list, type, types.FunctionType, types.MethodType, _CACHED)]


def _names(code: types.CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if is_a(constant, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))
