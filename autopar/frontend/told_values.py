"""Values of the batch that decide what forward does: `int(lengths.max())` as a size, `if torch.isnan(x).any():`.

Beside each call on tensors of the batch and of numbers alone, the same call runs on the example batch, so that forward
can be told what it asks for. What it asked is kept as an expression (batch_values.py): the program is made for its
value, and each later batch is looked at before it is taken.

A tensor that was written to, or of which a part was, is not known any more: torch counts the writes to a tensor and
all its views. Numbers that differ in nearly every batch are not told: floats, counts, and those of single rows.
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

from autopar.frontend.batch_values import Told, code_of_input, expression, is_of_one_row, may_decide, parts_of, question
from autopar.frontend.constants import ASKS, is_static, leaves, may_write, run_on_values
from autopar.frontend.inputs import MOST_KNOWN, common_batch
from autopar.frontend.value_checks import in_check
from codegen.deciding import DecidingValue

_thread = threading.local()


@contextlib.contextmanager
def asking(told: Told) -> Iterator[None]:
    """Within it, this thread's forwards are told what they may be, which is added to `told`."""
    before, _thread.told = getattr(_thread, "told", None), told
    try:
        yield
    finally:
        _thread.told = before


def values_told() -> Mapping[str, DecidingValue]:
    """What this thread's forwards were told."""
    told: Told | None = getattr(_thread, "told", None)
    return told.values if told is not None else {}


def know_batch(batch: Mapping[str, Any], values: Mapping[str, Tensor]) -> None:
    """A forward that is traced in this thread begins with these inputs. values: those of the example batch, as far as
    they are known."""
    told: Told | None = getattr(_thread, "told", None)
    modes = getattr(_thread, "modes", ())
    if values and modes and told is not None and told.is_told:
        modes[-1].know({name: each for name, each in batch.items() if isinstance(each, Tensor)}, values)


@dataclass(slots=True)
class _Entry:
    """A tensor of the batch or of numbers. value: of the example. version: torch's count of writes to the tensor.
    sources: what it was computed of."""

    tensor: Tensor
    value: Tensor
    code: str
    sources: tuple[_Entry, ...]
    is_of_batch: bool
    version: int

    def is_fresh(self) -> bool:
        """Whether nothing was written since to the tensor, or to what it was computed of."""
        waiting, seen = [self], set[int]()
        while waiting:
            entry = waiting.pop()
            if _num_writes(entry.tensor) != entry.version:
                return False
            waiting += [each for each in entry.sources if id(each) not in seen]
            seen |= set(map(id, entry.sources))
        return True


def _num_writes(tensor: Tensor) -> int:
    """Torch's count of writes. Forwards that are recorded have none (inference mode): the export of the same forward
    has, and fails where it is not told what a record was."""
    with torch._C.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


class ToldValues(TorchFunctionMode):
    """Within it forward is told values of the example batch, once `know` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[int, _Entry] = {}
        self._kept: list[_Entry] = []  # their tensors keep their ids
        self._batch: dict[str, Tensor] = {}
        self._shapes: Any = ()
        self._rows = 0
        self._is_off = True

    def __enter__(self) -> ToldValues:
        super().__enter__()  # type: ignore[no-untyped-call]
        _thread.modes = [*getattr(_thread, "modes", ()), self]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _thread.modes = _thread.modes[:-1]

    def know(self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        """Forward begins with these inputs."""
        self._shapes = tuple((name, tuple(tensor.shape)) for name, tensor in batch.items())
        told: Told | None = getattr(_thread, "told", None)
        assert told is not None
        told.shapes = told.shapes or self._shapes
        self._rows, self._is_off = common_batch(batch), False
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            self._batch = {name: value.clone().cpu() for name, value in values.items()}
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
        sources = tuple(each for each in entries if each is not None)
        if len(sources) < len(entries) or not all(each.is_fresh() for each in sources):
            return func(*args, **kwargs)
        if name in ASKS and any(each.is_of_batch for each in sources):
            value = self._told(func, name, args, kwargs)
            return func(*args, **kwargs) if value is None else value
        result = func(*args, **kwargs)
        is_plain = not isinstance(func, (OpOverload, OpOverloadPacket)) and not may_write(func, name, kwargs)
        if is_plain and all(each.is_fresh() for each in sources) and not is_of_one_row(name, args, self._rows):
            self._follow(func, name, args, kwargs, result, sources)
        return result

    def _told(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The value that is asked for; None where forward is not told it."""
        codes = {key: entry.code for key, entry in self._entries.items()}
        code = (
            None if is_of_one_row(name, args, self._rows) or in_check() else question(func, name, args, kwargs, codes)
        )
        if code is None:
            return None
        deciding = DecidingValue(code, None)
        try:
            value = run_on_values(func, self._values(args), self._values(kwargs))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                again = deciding.of(self._batch)
        except Exception:  # whatever torch raises of other shapes, or Python of the code
            return None
        is_same = type(again) is type(value) and again == value
        if not is_same or not may_decide(code, value):
            return None
        return value if self._note_value(DecidingValue(code, value)) else None

    def _note_value(self, value: DecidingValue) -> bool:
        """Whether forward is told this value, which is noted: at other shapes than the first only what it was told
        there, since all programs of a batch do the same."""
        told: Told = _thread.told
        if told.shapes == self._shapes:
            told.values.setdefault(value.code, value)
        return value.code in told.values

    def _follow(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, sources: tuple[_Entry, ...]) -> None:
        """Note what was made of tensors that are known, with its value and expression."""
        codes = {key: entry.code for key, entry in self._entries.items()}
        code = expression(func, name, args, kwargs, codes)
        made = [] if code is None else list(parts_of(code, result))
        is_small = all(is_static(tensor) and tensor.numel() <= MOST_KNOWN for tensor, _ in made)
        if not made or not is_small or any(id(tensor) in self._entries for tensor, _ in made):
            return
        try:
            value = run_on_values(func, self._values(args), self._values(kwargs))
        except Exception:  # what is drawn at random, or does not fit the rows of the example
            return
        is_of_batch = any(each.is_of_batch for each in sources)
        values = [value] if isinstance(result, Tensor) else list(value)
        for (tensor, text), own in zip(made, (each for each in values if isinstance(each, Tensor)), strict=True):
            self._note(tensor, own, text, sources, is_of_batch)

    def _note(self, tensor: Tensor, value: Tensor, code: str, sources: tuple[_Entry, ...], is_of_batch: bool) -> None:
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
