"""Specialize a trace on values of the batch that forward asks for: `int(lengths.max())` as a size, `if mask.all():`.

Each call on tensors of the batch, or of constants, also runs on the example batch. When forward asks for a value, it
gets the example's, and the expression becomes a guard of the program (batch_values.py): every later batch is checked
against it. By torch's version counter, a tensor is dropped once anything writes to it or to one of its views. Floats,
counts and values of single rows differ in nearly every batch, so forward never gets them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from autopar.frontend.inputs import MOST_KNOWN, common_batch
from autopar.frontend.trace_modes.batch_values import (
    Specialization,
    code_of_input,
    expression,
    is_of_one_row,
    may_decide,
    parts_of,
    question,
)
from autopar.frontend.trace_modes.constants import ASKS, is_static, leaves, may_write, run_on_values
from autopar.frontend.trace_modes.value_checks import in_check
from codegen.guards import Guard

_thread = threading.local()


@contextlib.contextmanager
def specializing(specialization: Specialization) -> Iterator[None]:
    """Context manager in which this thread's forwards are specialized, if it is on, and add their guards to it."""
    before, _thread.current = getattr(_thread, "current", None), specialization
    try:
        yield
    finally:
        _thread.current = before


def current_guards() -> Mapping[str, Guard]:
    """Return the guards of this thread's forwards so far."""
    current: Specialization | None = getattr(_thread, "current", None)
    return current.guards if current is not None else {}


def begin_forward(batch: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
    """Note the inputs of a forward that is traced in this thread. values: those of the example batch, where known."""
    current: Specialization | None = getattr(_thread, "current", None)
    modes = getattr(_thread, "modes", ())
    if values and modes and current is not None and current.is_on:
        modes[-1].begin({name: tensor for name, tensor in batch.items() if isinstance(tensor, Tensor)}, values)


@dataclass(slots=True)
class _Entry:
    """A tensor computed from the batch or from constants. value: of the example. version: torch's count of writes to
    the tensor. sources: its operands.
    """

    tensor: Tensor
    value: Tensor
    code: str
    sources: tuple[_Entry, ...]
    is_of_batch: bool
    version: int

    def is_fresh(self) -> bool:
        """Return whether nothing has written since to the tensor, or to its sources."""
        waiting, seen = [self], set[int]()
        while waiting:
            entry = waiting.pop()
            if _num_writes(entry.tensor) != entry.version:
                return False
            waiting += [source for source in entry.sources if id(source) not in seen]
            seen |= set(map(id, entry.sources))
        return True


def _num_writes(tensor: Tensor) -> int:
    """Return torch's count of writes; 0 for records, which run in inference mode. The export of the same forward counts
    them, and fails where a record got a forbidden value.
    """
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def _codes(entries: tuple[_Entry, ...]) -> dict[int, str]:
    """Return the expressions of tensors by their ids."""
    return {id(entry.tensor): entry.code for entry in entries}


class Specializing(TorchFunctionMode):
    """Answer questions for values from the example batch, once `begin` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[int, _Entry] = {}
        self._kept: list[_Entry] = []  # keeps their tensors' ids unique
        self._batch: dict[str, Tensor] = {}
        self._shapes: Any = ()
        self._rows = 0
        self._is_off, self._is_recorded = True, False

    def __enter__(self) -> Specializing:
        super().__enter__()  # type: ignore[no-untyped-call]
        _thread.modes = [*getattr(_thread, "modes", ()), self]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _thread.modes = _thread.modes[:-1]

    def begin(self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Note the inputs of forward, and those of the example."""
        self._shapes = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        current: Specialization = _thread.current
        current.shapes = current.shapes or self._shapes
        self._rows, self._is_off = common_batch(batch), False
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._batch = {name: value.clone().cpu() for name, value in values.items()}
        self._is_recorded = any(value.is_inference() for value in self._batch.values())
        for name, value in self._batch.items():
            self._note(batch[name], value, code_of_input(name), (), is_of_batch=True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._is_off:
            return func(*args, **kwargs)
        name = str(getattr(func, "__name__", ""))
        if name in ("__get__", "__set__") and getattr(func.__self__, "__name__", "") == "data":
            self._is_off = True  # writes through it are not counted
            return func(*args, **kwargs)
        tensors = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        entries = [self._entries.get(id(tensor)) for tensor in tensors]
        sources = tuple(source for source in entries if source is not None)
        if len(sources) < len(entries) or not all(source.is_fresh() for source in sources):
            return func(*args, **kwargs)
        if name in ASKS and any(source.is_of_batch for source in sources):
            value = self._answer(func, name, args, kwargs, sources)
            return func(*args, **kwargs) if value is None else value
        result = func(*args, **kwargs)
        is_plain = not isinstance(func, (OpOverload, OpOverloadPacket)) and not may_write(func, name, kwargs)
        if is_plain and all(source.is_fresh() for source in sources) and not is_of_one_row(name, args, self._rows):
            self._follow(func, name, args, kwargs, result, sources)
        return result

    def _answer(self, func: Any, name: str, args: Any, kwargs: Any, sources: tuple[_Entry, ...]) -> Any:
        """Return the value that forward asks for, and guard it; None where forward must not have it."""
        if is_of_one_row(name, args, self._rows) or in_check():
            return None
        code = question(func, name, args, kwargs, _codes(sources))
        if code is None:
            return None
        try:
            value = run_on_values(func, self._values(args), self._values(kwargs))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                again = Guard(code, None).of(self._batch)
        except Exception:  # any exception of torch for other shapes, or of Python for the code
            return None
        is_same = type(again) is type(value) and again == value
        if not is_same or not may_decide(code, value):
            return None
        return value if self._guard(Guard(code, value)) else None

    def _guard(self, guard: Guard) -> bool:
        """Add a guard, and return whether there is one: with other shapes than the first, forward gets only the values
        that it got there, since all programs of a batch compute the same loss.
        """
        current: Specialization = _thread.current
        if current.shapes == self._shapes:
            current.guards.setdefault(guard.code, guard)
        return guard.code in current.guards

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, sources: tuple[_Entry, ...]) -> None:
        """Note the result of a call on known tensors, with its value and expression."""
        code = expression(func, name, args, kwargs, _codes(sources))
        results = [] if code is None else list(parts_of(code, result))
        is_small = all(is_static(tensor) and tensor.numel() <= MOST_KNOWN for tensor, _ in results)
        if not results or not is_small or any(id(tensor) in self._entries for tensor, _ in results):
            return
        try:
            value = run_on_values(func, self._values(args), self._values(kwargs))
        except Exception:  # random, or does not fit the rows of the example
            return
        is_of_batch = any(source.is_of_batch for source in sources)
        values = [value] if isinstance(result, Tensor) else list(value)
        tensors = (item for item in values if isinstance(item, Tensor))
        for (tensor, text), example in zip(results, tensors, strict=True):
            self._note(tensor, example, text, sources, is_of_batch)

    def _note(self, tensor: Tensor, value: Tensor, code: str, sources: tuple[_Entry, ...], is_of_batch: bool) -> None:
        if tensor.is_inference() and not self._is_recorded:
            return  # writes are not counted
        entry = _Entry(
            tensor=tensor,
            value=value,
            code=code,
            sources=sources,
            is_of_batch=is_of_batch,
            version=_num_writes(tensor),
        )
        self._kept.append(entry)
        self._entries[id(tensor)] = entry

    def _values(self, arguments: Any) -> Any:
        return tree_map(lambda leaf: self._entries[id(leaf)].value if id(leaf) in self._entries else leaf, arguments)
