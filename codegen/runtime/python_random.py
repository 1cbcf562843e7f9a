"""Numbers of Python's `random` and of `numpy.random` as torch's: within `by_torch` their functions call torch's.

So what draws torch's numbers by counters (a trace, `reference.SameDropout`) draws these, too. A trace gets tensors
without dims, which a program computes with. Where Python must know the number (`if`, `range`, an index), the trace
fails. The model on one process gets Python's own numbers.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

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

    def replaced(name: str, own: Callable[..., Any], draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return own(*args, **kwargs)
            noted(name)
            if kwargs.pop("size", None) is not None:
                raise ArrayError(name)
            try:
                return draw(number, *args, **kwargs)
            except TypeError:
                raise ArrayError(name) from None

        return call

    with contextlib.ExitStack() as stack:
        for module in (random, np.random):
            for attribute, draw in FUNCTIONS[module.__name__].items():
                own = getattr(module, attribute)
                setattr(module, attribute, replaced(f"{module.__name__}.{attribute}", own, draw))
                stack.callback(setattr, module, attribute, own)
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


FUNCTIONS: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    "random": {
        "random": _plain_uniform,
        "uniform": _uniform,
        "gauss": _normal,
        "normalvariate": _normal,
        "expovariate": _by_rate,
        "randint": _randint,
        "randrange": _range,
    },
    "numpy.random": {
        **dict.fromkeys(("rand", "random", "random_sample"), _plain_uniform),
        **dict.fromkeys(("randn", "standard_normal"), _plain_normal),
        "uniform": _uniform,
        "normal": _normal,
        "exponential": _by_scale,
        "randint": _numpy_integers,
    },
}
"""By module, functions that draw one number."""
