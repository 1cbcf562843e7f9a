"""Deep copies of models with any attributes.

`copy.deepcopy` fails on locks, files, generators and Python modules among the attributes, and on tensors with a graph
(old `weight_norm`). A copy here shares values that cannot be copied, and detaches such tensors from their graph.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from autopar.frontend.attributes import (
    FUNCTIONS,
    attributes_of,
    children_of,
    is_a,
    modules_of,
    named_parameters,
    parts_of,
    tensors_in,
)
from autopar.frontend.fakes import deep_stack

Module = TypeVar("Module", bound=nn.Module)

_FRAMES = 20_000
"""The most Python frames of a copy: six per nested module, without C calls in between."""


def deep_copy(model: Module, memo: dict[int, Any] | None = None) -> Module:
    """Return a deep copy of a model, as `copy.deepcopy` makes it.

    memo: copies of the model's objects, by their ids.
    """
    known_copies = dict(memo or {})
    with deep_stack(_FRAMES):
        try:
            copied: Module = copy.deepcopy(model, dict(known_copies))
        except Exception:  # any exception of an attribute's class
            return _by_attributes(model, known_copies)
        return copied if _is_apart(copied, model, known_copies) else _by_attributes(model, known_copies)


def callable_copy(function: Any) -> Any:
    """Return a copy of a callable object with its own numbers, which a call may change; tensors and modules are shared.

    Functions, and objects that cannot be copied, are returned unchanged.
    """
    is_object = not is_a(function, nn.Module, type, functools.partial, types.MethodType, *FUNCTIONS)
    if not is_object or not attributes_of(function):
        return function
    memo = {id(part): part for part in tensors_in(function)}
    memo |= {id(part): part for part in parts_of(function) if is_a(part, nn.Module)}
    try:
        return copy.deepcopy(function, memo)
    except Exception:  # any exception of an attribute's class
        return function


def _is_apart(copied: Any, model: nn.Module, memo: dict[int, Any]) -> bool:
    """Return whether a copy has its own modules and parameters: a `__deepcopy__` may return the module itself."""
    if not is_a(copied, nn.Module):
        return False
    shared = _identities(copied) & _identities(model)
    return not shared - {id(value) for value in memo.values()}


def _identities(model: nn.Module) -> set[int]:
    return {id(module) for module in modules_of(model)} | {id(tensor) for _, tensor in named_parameters(model)}


def _by_attributes(model: Module, memo: dict[int, Any]) -> Module:
    """Return a copy, made module by module and attribute by attribute."""
    waiting: list[nn.Module] = [model]
    modules: list[nn.Module] = []
    while waiting:
        module = waiting.pop()
        if id(module) in memo:
            continue
        if is_a(module, torch.jit.ScriptModule):
            _copied(module, memo, set())
            continue
        memo[id(module)] = type(module).__new__(type(module))
        modules.append(module)
        waiting += [child for _, child in children_of(module)]
    for module in modules:
        module_copy = memo[id(module)]
        for name, value in attributes_of(module).items():
            copied = _copied(value, memo, set())
            if name in vars(module):
                vars(module_copy)[name] = copied
            else:  # a slot
                object.__setattr__(module_copy, name, copied)
    whole: Module = memo[id(model)]
    return whole


def _copied(value: Any, memo: dict[int, Any], under_way: set[int]) -> Any:
    """Return a deep copy of `value` that shares values that cannot be copied, and enters them in `memo`."""
    if id(value) not in memo and not _is_copied(value, memo) and id(value) not in under_way:
        under_way.add(id(value))
        if is_a(value, Tensor):
            memo[id(value)] = value.detach().clone()
        else:
            for part in parts_of(value):
                _copied(part, memo, under_way)
            if not _is_copied(value, memo):
                memo[id(value)] = value
    return memo.get(id(value), value)


def _is_copied(value: Any, memo: dict[int, Any]) -> bool:
    """Copy `value` into `memo`, or leave `memo` as it was and return False."""
    before = len(memo)
    try:
        memo[id(value)] = copy.deepcopy(value, memo)
    except Exception:  # any exception of its class, or the class of a nested value
        for key in list(itertools.islice(reversed(memo), len(memo) - before)):
            del memo[key]
        return False
    return True
