"""Trace a user's `torch.autograd.Function` as one operator, which a program calls as the Function itself.

The Function runs once on fake tensors, forward and backward, to refuse effects that no program can repeat: random
numbers, writes to operands, and arguments or results other than tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import TraceError
from codegen.functions import applied, can_import, operator_of, unknown_arguments

_is_inside: ContextVar[bool] = ContextVar("_is_inside", default=False)


def outside_functions(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `original` inside a custom Function, which is one operator, else `replacement`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return (original if _is_inside.get() else replacement)(*args, **kwargs)

    return call


def call_function(function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of `function.apply(*args)`, by its operator. Raise TraceError, naming the Function and the
    reason.
    """
    token = _is_inside.set(True)
    try:
        return _called(function, args, kwargs)
    finally:
        _is_inside.reset(token)


def _called(function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or unknown_arguments(args):
        kinds = sorted({type(value).__name__ for value in unknown_arguments(args)} | set(kwargs))
        raise _refused(function, f"takes arguments other than tensors and plain data: {', '.join(kinds)}")
    if not can_import(function):
        raise _refused(function, "cannot be imported by this name, so that no program could call it")
    with ThreadPoolExecutor(1) as alone:  # settings of the calling trace, which do not apply in here
        tried = alone.submit(_Trial, function, args).result()
    traced = operator_of(function, args, tried.num_outputs)
    # Operands that backward gives no gradient for are detached in the graph.
    detached = [value.detach() if i in tried.without_gradient else value for i, value in enumerate(args)]
    results = traced.operator(*(repr(value) if i in traced.written else value for i, value in enumerate(detached)))
    if tried.num_outputs is None:
        return results.detach() if 0 in tried.constant else results
    return tuple(value.detach() if i in tried.constant else value for i, value in enumerate(results))


def _refused(function: type, reason: str) -> TraceError:
    return TraceError(
        f"the model calls a custom autograd.Function that {reason}",
        values=f"{function.__module__}.{function.__qualname__}",
        alternatives="define the Function at module level, and compute new tensors from tensors and plain data alone; "
        "or define an operator with torch.library.custom_op and register_autograd",
    )


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Note the first operator that draws random numbers."""

    drawn = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn = self.drawn or str(func)
        return func(*args, **(kwargs or {}))


class _Trial:
    """One forward and backward on fake tensors of the shapes of `args`.

    num_outputs: length of the tuple that forward returns, None for a tensor. constant: outputs without a gradient.
    without_gradient: the arguments that backward returns None for.
    """

    def __init__(self, function: type, args: Sequence[Any]) -> None:
        watch = _Calls()  # type: ignore[no-untyped-call]
        with FakeTensorMode(), watch:
            leaves = [_leaf(value) if isinstance(value, Tensor) else value for value in args]
            versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
            results = _tried(function, "forward", lambda: applied(function, *leaves))
            if any(isinstance(x, Tensor) and x._version != v for x, v in zip(leaves, versions, strict=True)):
                raise _refused(function, "writes to its operands")
            tensors = results if isinstance(results, tuple) else (results,)
            if not tensors or not all(isinstance(value, Tensor) for value in tensors):
                raise _refused(function, "returns a value that is not a tensor")
            self.num_outputs = len(results) if isinstance(results, tuple) else None
            self.constant = {i for i, value in enumerate(tensors) if not value.requires_grad}
            trained = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            ends = [value for value in tensors if value.requires_grad]
            gradients: Sequence[Any] = ()
            if ends and trained:
                wanted, ones = [leaves[i] for i in trained], [torch.ones_like(value) for value in ends]
                gradients = _tried(
                    function, "backward", lambda: torch.autograd.grad(ends, wanted, ones, allow_unused=True)
                )
            self.without_gradient = {i for i, g in zip(trained, gradients, strict=False) if g is None}
        if watch.drawn:
            raise _refused(function, f"draws random numbers ({watch.drawn})")


def _leaf(value: Tensor) -> Tensor:
    """Return a tensor of the same shape, which requires a gradient where it can."""
    leaf = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    leaf.requires_grad_(value.is_floating_point() or value.is_complex())
    return leaf.clone()  # autograd lets nobody write to a leaf


def _tried(function: type, name: str, run: Any) -> Any:
    try:
        return run()
    except Exception as error:  # any exception of the user's code
        first = (str(error).splitlines() or [""])[0]
        raise _refused(function, f"cannot be traced: its {name} raises {type(error).__name__}: {first}") from error
