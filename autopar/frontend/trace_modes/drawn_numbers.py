"""Random numbers that forward draws from Python or numpy instead of torch's default generator, while it is traced.

Python's and numpy's numbers become tensors without dims, and so do results of `float`, `round`, `min`, `math` and numpy
on them. A number that decides what forward does (`if`, `range`, an index) cannot be traced.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from autopar.errors import TraceError
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.trace_modes.constants import is_static
from codegen.runtime.python_random import FUNCTIONS, ArrayError, by_torch

_DRAWS = frozenset({"rand", "randn", "uniform_", "normal_", "exponential_", "bernoulli", "bernoulli_", "rand_like"})
"""Functions of torch whose results of one element may be asked for as a number."""
_NAMES = {name for names in FUNCTIONS.values() for name in names} | _DRAWS | {"random"}
_UNARY = ("sqrt", "exp", "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "tanh", "fabs", "floor")


@contextlib.contextmanager
def drawn_numbers(names: list[str]) -> Iterator[None]:
    """Context manager in which random numbers of Python and numpy are tensors without dims.

    names: gets the functions that are called. Raises TraceError for draws that no program can repeat: numpy arrays, and
    the model's generators.
    """
    with _Drawn() as drawn, _mathematics(drawn), by_torch(drawn.noted, names.append):
        try:
            yield
        except ArrayError as error:
            raise TraceError(
                "forward draws a numpy array, or calls a random function of Python in an unsupported form",
                values=str(error),
                alternatives=[
                    "use torch.rand, torch.randn or torch.randint of the same shape",
                    "draw one number at a time",
                ],
            ) from None


@contextlib.contextmanager
def floats_of_draws(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Context manager in which `float` and the like keep drawn numbers as tensors, in files whose functions draw and
    call them.
    """
    spaces: dict[int, dict[str, Any]] = {}
    for function in functions:
        asked = set(function.__code__.co_names)
        if asked & _NAMES and asked & _BUILTINS.keys():
            spaces[id(function.__globals__)] = function.__globals__
    with contextlib.ExitStack() as stack:
        for space in spaces.values():
            for name in _BUILTINS.keys() - space.keys():
                space[name] = _BUILTINS[name]
                stack.callback(space.pop, name)
        yield


class _Drawn(TorchFunctionMode):
    """Track the numbers that were drawn, or computed from drawn ones alone.

    Refuse a torch.Generator as an argument: its state belongs to the model, and differs between ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, Tensor] = {}  # by id, which stays unique while the tensor lives

    def __enter__(self) -> Any:
        _modes.append(self)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        _modes.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def noted(self, tensor: Tensor) -> Tensor:
        """Return the tensor, which is a drawn number from now on."""
        self._numbers[id(tensor)] = tensor
        return tensor

    def is_drawn(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self._numbers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise TraceError(
                "forward draws random numbers from a torch.Generator, whose state no plan can follow",
                values=f"{name or func}(..., generator=...)",
                alternatives=[
                    "drop the generator: torch's default one draws alike under every plan, by the seed of the step",
                    "for fixed noise: fill a buffer in the constructor",
                ],
            )
        if name == "item" and self.is_drawn(args[0]):
            return self.noted(args[0].reshape(()))
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point() and is_static(result) and result.numel() == 1:
            tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
            if name in _DRAWS or (tensors and all(map(self.is_drawn, tensors))):
                self.noted(result)
        return result


_modes: list[_Drawn] = []


def _is_drawn(value: Any) -> bool:
    return any(mode.is_drawn(value) for mode in _modes)


class _FloatKind(type):
    """Replace `float`: as a class it is that, and a drawn number stays a tensor."""

    def __call__(cls, *args: Any) -> Any:
        return args[0].reshape(()) if args and _is_drawn(args[0]) else builtins.float(*args)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.float)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, builtins.float)


class _Float(metaclass=_FloatKind):
    pass


def _round(number: Any, digits: int | None = None) -> Any:
    if digits is not None and _is_drawn(number):
        return torch.round(number, decimals=digits)
    return builtins.round(number, digits)


def _constant(number: Any) -> Tensor:
    tensor = torch.tensor(builtins.float(number))
    return _modes[-1].noted(tensor)


def _largest(original: Callable[..., Any], tensors: Callable[..., Tensor]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) < 2 or not any(map(_is_drawn, args)):
            return original(*args, **kwargs)
        first, *others = (number if isinstance(number, Tensor) else _constant(number) for number in args)
        for number in others:
            first = tensors(first, number)
        return first

    return call


_BUILTINS: Mapping[str, Any] = {
    "float": _Float,
    "round": _round,
    "min": _largest(min, torch.minimum),
    "max": _largest(max, torch.maximum),
}


@contextlib.contextmanager
def _mathematics(drawn: _Drawn) -> Iterator[None]:
    """Context manager in which functions of `math` and numpy take drawn numbers."""

    def taking(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return (function if any(map(drawn.is_drawn, args)) else original)(*args, **kwargs)

        return in_this_thread(call, original)

    functions = {name: getattr(torch, name, torch.abs) for name in _UNARY}
    calls: list[tuple[Any, str, Callable[..., Any]]] = [
        (math, name, functions[name]) for name in _UNARY if name != "floor"
    ]
    calls += [(np, name, call) for name, call in functions.items()]
    calls += [(math, "pow", torch.pow), (np, "power", torch.pow), (np, "clip", torch.clamp)]
    with contextlib.ExitStack() as stack:
        for owner, name, function in calls:
            original = getattr(owner, name)
            setattr(owner, name, taking(original, function))
            stack.callback(setattr, owner, name, original)
        yield
