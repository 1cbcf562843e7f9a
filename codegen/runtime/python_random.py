"""Numbers of Python's `random` and of `numpy.random` as torch's: within `by_torch` their functions call torch's.

So what draws torch's numbers by counters (a trace, `reference.SameDropout`) draws these, too. A trace gets tensors
without dims, which a program computes with. Where Python must know the number (`if`, `range`, an index), the trace
fails. The model on one process gets Python's own numbers.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .python_distributions import NUMPY, PYTHON, Distribution

Number = Callable[[Tensor], Any]
"""What a caller gets of a tensor without dims."""


class ArrayError(NotImplementedError):
    """A draw that is no single number."""


@contextlib.contextmanager
def by_torch(number: Number, noted: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Within it, in this thread, the functions of FUNCTIONS are torch's. noted: is told the name of each
    that is called.

    Raises ArrayError where numpy is asked for an array.
    """
    thread = threading.get_ident()

    def replaced(name: str, original: Callable[..., Any], draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            noted(name)
            if kwargs.pop("size", None) is not None:
                raise ArrayError(name)
            try:
                return draw(number, *args, **kwargs)
            except TypeError:
                raise ArrayError(name) from None

        return call

    with contextlib.ExitStack() as stack:
        calls: dict[int, Callable[..., Any]] = {}
        for module in (random, np.random):
            for attribute, draw in FUNCTIONS[module.__name__].items():
                original = getattr(module, attribute)
                calls[id(original)] = call = replaced(f"{module.__name__}.{attribute}", original, draw)
                setattr(module, attribute, call)
                stack.callback(setattr, module, attribute, original)
        for space, name, value in _held(calls):
            space[name] = calls.get(id(value)) or _Generator(value, replaced)
            stack.callback(space.__setitem__, name, value)
        yield


def _uniform(number: Number, low: float = 0.0, high: float = 1.0) -> Any:
    return _moved(number(torch.rand(())), low, high - low)


def _plain_uniform(number: Number) -> Any:
    return number(torch.rand(()))


def _normal(number: Number, mean: float = 0.0, std: float = 1.0) -> Any:
    return _moved(number(torch.randn(())), mean, std)


def _plain_normal(number: Number) -> Any:
    return number(torch.randn(()))


def _moved(value: Any, start: float, scale: float) -> Any:
    scaled = value if scale == 1 else value * scale
    return scaled if start == 0 else scaled + start


def _by_rate(number: Number, lambd: float = 1.0) -> Any:
    return number(torch.empty(()).exponential_()) / lambd


def _by_scale(number: Number, scale: float = 1.0) -> Any:
    return number(torch.empty(()).exponential_()) * scale


def _randint(number: Number, a: int, b: int) -> Any:
    """Python's, which includes b."""
    return number(torch.randint(a, b + 1, ()))


def _range(number: Number, start: int, stop: int | None = None, step: int = 1) -> Any:
    values = range(start) if stop is None else range(start, stop, step)
    drawn = number(torch.randint(0, len(values), ()))
    return _moved(drawn, values.start, values.step)


def _numpy_integers(number: Number, low: int, high: int | None = None) -> Any:
    return number(torch.randint(0, low, ()) if high is None else torch.randint(low, high, ()))


def _generator_integers(number: Number, low: int, high: int | None = None, *, endpoint: bool = False) -> Any:
    first, last = (0, low) if high is None else (low, high)
    return number(torch.randint(first, last + endpoint, ()))


def _made(distribution: Distribution) -> Callable[..., Any]:
    def draw(number: Number, *args: Any, **kwargs: Any) -> Any:
        return number(distribution(*args, **kwargs))

    return draw


_OF_NUMPY: Mapping[str, Callable[..., Any]] = {
    **{name: _made(distribution) for name, distribution in NUMPY.items()},
    "random": _plain_uniform,
    "standard_normal": _plain_normal,
    "uniform": _uniform,
    "normal": _normal,
    "exponential": _by_scale,
}

FUNCTIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "random": {
        **{name: _made(distribution) for name, distribution in PYTHON.items()},
        "random": _plain_uniform,
        "uniform": _uniform,
        "gauss": _normal,
        "normalvariate": _normal,
        "expovariate": _by_rate,
        "randint": _randint,
        "randrange": _range,
    },
    "numpy.random": {
        **_OF_NUMPY,
        **dict.fromkeys(("rand", "random_sample", "ranf", "sample"), _plain_uniform),
        "randn": _plain_normal,
        "randint": _numpy_integers,
    },
}
"""By module, functions that draw one number."""

_METHODS: Mapping[type, Mapping[str, Callable[..., Any]]] = {
    random.Random: FUNCTIONS["random"],
    np.random.RandomState: FUNCTIONS["numpy.random"],
    np.random.Generator: {**_OF_NUMPY, "integers": _generator_integers},
}
"""By class of generators, methods that draw one number."""


class _Generator:
    """Stands for a generator of Python's or numpy's: what draws single numbers draws torch's."""

    def __init__(self, generator: Any, replaced: Callable[[str, Callable[..., Any], Callable[..., Any]], Any]) -> None:
        kind = next(kind for kind in _METHODS if isinstance(generator, kind))
        for name, draw in _METHODS[kind].items():
            if hasattr(generator, name):
                setattr(self, name, replaced(f"{kind.__name__}.{name}", getattr(generator, name), draw))
        self._own = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


_STANDARD = sysconfig.get_paths()["stdlib"]
_LIBRARIES = ("torch", "numpy", "autopar", "codegen", "random")
_libraries: dict[str, Any] = {}
"""Modules of _LIBRARIES and of Python's own, by name. They are thousands, and are passed over."""
_searched: dict[str, tuple[int, int]] = {}
"""Other modules without any of these, as they were when they were looked through."""


def _held(calls: Mapping[int, Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(namespace, name, value) where a module has one of these functions by name (`from random import ...`), by their
    ids, or a generator."""
    for name, module in list(sys.modules.items()):
        if _libraries.get(name) is module:
            continue
        space = getattr(module, "__dict__", None)
        if type(space) is not dict or _searched.get(name) == (id(space), len(space)):
            continue
        if _is_library(name, space):
            _libraries[name] = module
            continue
        members = [
            (key, member)
            for key, member in list(space.items())
            if id(member) in calls or isinstance(member, tuple(_METHODS))
        ]
        if not members:
            _searched[name] = id(space), len(space)
        yield from ((space, key, value) for key, value in members)


def _is_library(name: str, space: Mapping[str, Any]) -> bool:
    file = space.get("__file__")
    is_standard = type(file) is str and file.startswith(_STANDARD) and "-packages" not in file
    return is_standard or name.partition(".")[0] in _LIBRARIES
