"""Activation checkpointing of torch in a trace: the function itself is called, and a plan decides what to recompute.

Effects of torch's recomputation other than gradients are kept: running statistics of batch norm and their counters move
twice in a step. Other writes of a checkpointed function are refused, since torch repeats them at a time that no graph
shows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as owner
from torch.utils._pytree import tree_iter

from autopar.errors import TraceError
from autopar.frontend.fakes import in_this_thread
from autopar.frontend.trace_modes.constants import may_write

_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
_METADATA = (torch.Size, torch.device, torch.dtype, torch.layout)
_NON_REENTRANT = "_checkpoint_hook"
"""The context in which torch runs a function whose checkpoint is not reentrant."""


@contextlib.contextmanager
def followed_checkpoints() -> Iterator[None]:
    """Context manager in which checkpointed functions are called once, as ordinary calls of forward."""
    calls = _Calls()
    registered = owner.CheckpointFunction.apply

    def reentrant(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        # No input requires a gradient: torch then computes none for tensors that the function captures either.
        if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
            with torch.no_grad():
                return function(*args)
        with calls.body():
            return function(*args)

    with contextlib.ExitStack() as stack:
        apply = staticmethod(in_this_thread(reentrant, registered))
        stack.enter_context(mock.patch.object(owner.CheckpointFunction, "apply", apply))
        hook = getattr(owner, _NON_REENTRANT, None)
        if hook is not None:
            stack.enter_context(_entered(hook, calls))
        stack.enter_context(calls)
        yield


@contextlib.contextmanager
def _entered(hook: Any, calls: _Calls) -> Iterator[None]:
    """Context manager in which entering `hook` enters the body of a checkpointed function."""
    bodies: list[Any] = []
    enter, leave = hook.__enter__, hook.__exit__

    def entered(self: Any) -> Any:
        result = enter(self)
        bodies.append(calls.body())
        bodies[-1].__enter__()
        return result

    def left(self: Any, *error: Any) -> Any:
        try:
            bodies.pop().__exit__(*error)
        finally:
            result = leave(self, *error)
        return result

    with (
        mock.patch.object(hook, "__enter__", in_this_thread(entered, enter)),
        mock.patch.object(hook, "__exit__", in_this_thread(left, leave)),
    ):
        yield


class _Calls(TorchFunctionMode):
    """Watch the tensors that checkpointed functions write to."""

    def __init__(self) -> None:
        super().__init__()
        self._bodies: list[_Body] = []
        self._norms: dict[int, bool] = {}  # memory of running means -> whether a checkpointed function moves them
        self._alive: list[Tensor] = []

    @contextlib.contextmanager
    def body(self) -> Iterator[None]:
        """Context manager around the calls of one checkpointed function."""
        self._bodies.append(_Body(is_nested=bool(self._bodies)))
        try:
            yield
            self._bodies[-1].close()
        finally:
            self._bodies.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            arguments = {**_DEFAULTS, **dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
            if arguments["training"] and isinstance(arguments["running_mean"], Tensor) and arguments["momentum"]:
                return self._batch_norm_twice(arguments)
        if not self._bodies:
            return func(*args, **kwargs)
        return self._bodies[-1].call(func, args, kwargs)

    def _batch_norm_twice(self, arguments: dict[str, Any]) -> Tensor:
        """Call batch norm that moves running statistics: twice, with one average over both calls."""
        memory = _memory(arguments["running_mean"])
        self._alive.append(arguments["running_mean"])
        if memory in self._norms and (self._bodies or self._norms[memory]):
            raise _refused("batch norm whose statistics move in several calls, which torch repeats in another order")
        self._norms[memory] = bool(self._bodies)
        if not self._bodies:
            return F.batch_norm(**arguments)
        body = self._bodies[-1]
        if body.moves_twice(*(arguments[name] for name in ("input", "weight", "bias"))):
            arguments["momentum"] = 1.0 - (1.0 - arguments["momentum"]) ** 2
        return body.call(F.batch_norm, (), arguments)  # type: ignore[no-any-return]


class _Body:
    """The calls of one checkpointed function, and its writes to tensors that it did not create."""

    def __init__(self, is_nested: bool) -> None:
        self.is_nested = is_nested
        self.is_differentiated = False
        self.moves_once = False
        self.outside: set[int] = set()
        self.inside: set[int] = set()
        self.alive: list[Tensor] = []
        self.counters: dict[int, tuple[Tensor, int]] = {}
        self.settled: list[tuple[Tensor, int]] = []

    def moves_twice(self, *operands: Tensor | None) -> bool:
        """Return whether torch runs a batch norm of these operands again for backward."""
        if self.is_nested:
            raise _refused("batch norm in a checkpointed function that another one calls")
        is_repeated = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in operands)
        if is_repeated:
            self.settled += self.counters.values()
            self.counters.clear()
        self.moves_once = self.moves_once or not is_repeated
        return is_repeated

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = str(getattr(func, "__name__", ""))
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if name == "__get__" or not tensors:
            return self._note_results(func(*args, **kwargs))
        self.alive += tensors
        self.outside |= {_memory(tensor) for tensor in tensors} - self.inside
        reads = any(_memory(tensor) in self.counters for tensor in tensors)
        if func is torch.batch_norm and torch.is_grad_enabled():
            raise _refused("torch.batch_norm; autopar follows torch.nn.functional.batch_norm")
        if may_write(func, name, kwargs):
            self._write(name, args, kwargs)
        result = func(*args, **kwargs)
        if reads and not isinstance(result, _METADATA):
            raise _refused("a counter that the function also reads")
        return self._note_results(result)

    def _note_results(self, result: Any) -> Any:
        """Note the results of a call."""
        results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
        self.alive += results
        self.inside |= {_memory(tensor) for tensor in results} - self.outside
        self.is_differentiated |= any(tensor.requires_grad for tensor in results)
        return result

    def _write(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        targets = [leaf for leaf in tree_iter((args[:1], kwargs.get("out"))) if isinstance(leaf, Tensor)]
        for target in targets:
            if _memory(target) in self.inside or target.requires_grad:
                continue
            number = args[1] if len(args) == 2 and not kwargs else None
            is_sum = name in ("add_", "__iadd__") and not target.is_floating_point()
            if not isinstance(number, int) or not is_sum or self.is_nested:
                raise _refused(f"a tensor of shape {tuple(target.shape)} that the function did not create")
            self.counters[_memory(target)] = target, number

    def close(self) -> None:
        """Move counters a second time, up to the last call that torch is sure to run again."""
        if self.is_differentiated and (self.counters or self.moves_once):
            raise _refused("a counter, or statistics, that no gradient goes through")
        with torch.no_grad():
            for counter, number in self.settled:
                counter.add_(number)


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _refused(what: str) -> TraceError:
    return TraceError(
        "a function under activation checkpointing writes to state of the model, and torch writes again in backward",
        values=what,
        alternatives=[
            "move the write out of the function that torch.utils.checkpoint.checkpoint calls",
            "remove checkpointing from the model: plans choose what to recompute, and write once",
        ],
    )
