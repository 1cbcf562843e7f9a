"""Tests that compile or predict equal models share their traces, which take as long as all else of a small compile.

Models are equal that have the same classes, attributes and values (`_content`). Tests of tracing or its side effects,
and tests that have replaced parts of anything, do without: conftest.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import nn

import autopar.planning.traced_model
import autopar.strategies.share
from autopar.frontend.evaluation import why_no_evaluation
from autopar.frontend.rebatch import LEAST_ROWS
from autopar.frontend.trace import Cuts, find_cuts, trace
from autopar.rules.registry import default_registry

_MOST_KEPT = 400
_LARGEST = 1 << 20
"""Elements of a tensor whose values are compared."""

_known: OrderedDict[Hashable, Any] = OrderedDict()
_numbers: dict[Hashable, tuple[int, Any]] = {}


class _Unshared(Exception):
    """Something of a model cannot be compared with what another has."""


_UNSHARED = _Unshared, pickle.PicklingError, TypeError, AttributeError, RuntimeError
"""Errors of models that cannot be compared; parametrized modules raise RuntimeError."""


class _SharedCuts(Cuts):
    """What `find_cuts` found of a model of this content; every compile has one of its own."""

    content: bytes
    first_traced: Hashable = None
    """What this compile traced first: its later traces follow from that one (`Cuts.first`)."""


@contextlib.contextmanager
def shared(is_apart: Callable[[], bool]) -> Iterator[None]:
    """What is compiled meanwhile is traced if nothing equal was, or while it `is_apart`."""
    planner, predictor = autopar.planning.traced_model, autopar.strategies.share
    published = sys.modules.get("benchmarks.published_runs.models", predictor)

    def found(model: nn.Module, batch: Any, loss_fn: Any = None, param_dtype: torch.dtype | None = None) -> Cuts:
        return (find_cuts if is_apart() else _find_cuts)(model, batch, loss_fn, param_dtype)

    def part(*what: Any, **how: Any) -> Any:
        return (trace if is_apart() else _trace_part)(*what, **how)

    with (
        mock.patch.object(planner, "find_cuts", found),
        mock.patch.object(planner, "trace", _trace),
        mock.patch.object(planner, "why_no_evaluation", _why_no_evaluation),
        mock.patch.object(predictor, "find_cuts", found),
        mock.patch.object(predictor, "trace", part),
        mock.patch.object(published, "trace", part),
    ):
        yield


def _find_cuts(model: nn.Module, batch: Any, loss_fn: Any, param_dtype: torch.dtype | None) -> Cuts:
    try:
        content = _content((model, dict(batch), loss_fn, param_dtype))
    except _UNSHARED:
        return find_cuts(model, batch, loss_fn, param_dtype)
    found = _once((content, "cuts"), lambda: find_cuts(model, batch, loss_fn, param_dtype))
    cuts = _SharedCuts(found)
    cuts.reads = found.reads
    cuts.content = content
    return cuts


def _why_no_evaluation(model: nn.Module, batch: Any, loss_fn: Any = None, cuts: Any = (), **logits: bool) -> str:
    if not isinstance(cuts, _SharedCuts):
        return why_no_evaluation(model, batch, loss_fn, cuts, **logits)
    key = cuts.content, "evaluation", *logits.items()
    reason: str = _once(key, lambda: why_no_evaluation(model, batch, loss_fn, cuts, **logits))
    return reason


def _trace_part(model: nn.Module, batch: Any, loss_fn: Any = None, *, batch_size: int, cuts: Any, **dtype: Any) -> Any:
    """`_trace` of a part of the model or of the batch that the cuts were found in, or of one made deeper."""
    try:
        part = _content((model, dict(batch), loss_fn, dtype, () if isinstance(cuts, Cuts) else cuts))
    except _UNSHARED:
        return trace(model, batch, loss_fn, batch_size=batch_size, cuts=cuts, **dtype)
    if not isinstance(cuts, Cuts):
        return _once(
            (part, batch_size), lambda: trace(model, batch, loss_fn, batch_size=batch_size, cuts=cuts, **dtype)
        )
    return _trace(model, batch, loss_fn, batch_size=batch_size, cuts=cuts, part=part, **dtype)


def _trace(
    model: nn.Module, batch: Any, loss_fn: Any, *, batch_size: int, cuts: Any, part: bytes = b"", **dtype: Any
) -> Any:
    if not isinstance(cuts, _SharedCuts):
        return trace(model, batch, loss_fn, batch_size=batch_size, cuts=cuts, **dtype)
    first, this, place = cuts.first_traced, (part, batch_size), (cuts.content, "first")
    own = _once((*place, first), lambda: Cuts(cuts))

    def traced() -> Any:
        graph = trace(model, batch, loss_fn, batch_size=batch_size, cuts=own, **dtype)
        if first is None and own.first is not None:
            _known[*place, this], _known[*place, None] = own, Cuts(cuts)
        return graph

    graph = _once((cuts.content, first, this), traced)
    if first is None and batch_size >= LEAST_ROWS and (*place, this) in _known:
        cuts.first_traced = this
    return graph


def _once(key: Hashable, make: Callable[[], Any]) -> Any:
    if key not in _known:
        _known[key] = make()
    _known.move_to_end(key)
    while len(_known) > _MOST_KEPT:
        _known.popitem(last=False)
    return _known[key]


def _content(value: Any) -> bytes:
    """Equal for equal values; raises what `_find_cuts` catches for what it cannot tell."""
    rules = [(name, _number(id(rule), rule)) for name, rule in default_registry().additions.items()]
    surroundings = torch.get_default_dtype(), str(torch.get_default_device()), torch.is_autocast_enabled("cpu"), rules
    written = io.BytesIO()
    _Writer(written).dump((surroundings, value))
    return hashlib.sha256(written.getvalue()).digest()


class _Writer(pickle.Pickler):
    """Writes tensors by what they hold, code by which it is; nothing is ever read back."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.storages: dict[int, int] = {}

    def reducer_override(self, value: Any) -> Any:
        if value is _made:
            return NotImplemented
        if isinstance(value, torch.Tensor):
            return _made, self._tensor(value)
        if isinstance(value, type):
            if "<locals>" in value.__qualname__:
                raise _Unshared
            replaced = vars(value).values() if issubclass(value, nn.Module) else ()
            return _made, (_number((value, *map(id, replaced)), (value, *replaced)),)
        if isinstance(value, FunctionType | BuiltinFunctionType):
            if getattr(value, "__closure__", None):
                raise _Unshared
            return _made, (_number(id(value), value),)
        return NotImplemented

    def _tensor(self, x: torch.Tensor) -> tuple[Any, ...]:
        if type(x) not in (torch.Tensor, nn.Parameter) or x.layout != torch.strided or x.numel() > _LARGEST:
            raise _Unshared
        what = type(x).__name__, str(x.dtype), str(x.device), x.requires_grad, tuple(x.shape), x.stride()
        storage = self.storages.setdefault(x.untyped_storage()._cdata, len(self.storages))
        if x.device.type == "meta":
            return *what, storage, vars(x)
        bits = x.detach().contiguous().view(-1).view(torch.uint8) if x.numel() else x.detach()
        return *what, storage, vars(x), bits.numpy().tobytes() if x.numel() else b""


def _number(key: Hashable, kept: Any) -> int:
    """A number of its own for each; what it stands for is kept, so that no other has its id."""
    return _numbers.setdefault(key, (len(_numbers), kept))[0]


def _made(*_: Any) -> None:
    raise AssertionError("what is written is never read")
