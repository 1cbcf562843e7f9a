"""Run a model on fake tensors: in one thread at a time, without torch's warnings, and cheaply.

Torch propagates shapes through its dispatcher in about 200 microseconds per call, an empty tensor included. A model of
a hundred equal blocks makes thousands of calls with equal shapes, and as many parameters: they are made without a
dispatch, from the shapes of an equal earlier call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from autopar.frontend.garbage_collection import collection_paused
from autopar.ir.graph import base_name
from autopar.operators.traits import ONE_DTYPE

CPU = torch.device("cpu")

UNDECIDED = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""Errors of calls whose results fake tensors cannot describe: the calls need values, or an operator has no shape
function.
"""

_BY_DEVICE = frozenset({torch.ops.aten.scaled_dot_product_attention.default})
"""Operators that choose a kernel by device, which decides the layout of their results."""

_FRAMES = 4000
"""Four times Python's default limit; a trace calls C between frames, and the C stack has room for as many."""

_alone = threading.RLock()


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Context manager in which a model is traced or its optimizer tried; it nests.

    Other threads wait: torch.export and recorders replace functions of torch for the whole process, and all threads
    share random numbers. Torch logs nothing of this thread: it prints a traceback for a failing call on fake tensors.
    Here such a failure is an answer (a model that cannot run with fewer rows), or becomes an error of autopar.
    """
    with _alone, collection_paused(), deep_stack(_FRAMES), contextlib.ExitStack() as stack:
        quiet = _Quiet()
        for handler in _handlers():
            handler.addFilter(quiet)
            stack.callback(handler.removeFilter, quiet)
        yield


@contextlib.contextmanager
def deep_stack(frames: int) -> Iterator[None]:
    """Context manager with a higher recursion limit: a traced call takes more frames than an eager one."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, frames))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


class _Quiet(logging.Filter):
    """Hold back warnings and errors of the thread that created it; logs that a user requests (TORCH_LOGS) have lower
    levels.
    """

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or record.levelno < logging.WARNING


def _handlers() -> set[logging.Handler]:
    """Return the handlers of torch's loggers."""
    loggers = list(logging.Logger.manager.loggerDict.items())
    torch_loggers = [
        candidate
        for name, candidate in loggers
        if name.partition(".")[0] == "torch" and isinstance(candidate, logging.Logger)
    ]
    return {handler for logger in torch_loggers for handler in logger.handlers}


def in_this_thread(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `replacement` in this thread, and `original` in others, which may be training."""
    thread = threading.get_ident()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (replacement if threading.get_ident() == thread else original)(*args, **kwargs)

    return call


def mode() -> FakeTensorMode:
    """Return a mode in which tensors are fake, and the model's real tensors may be read.

    The number of elements that a mask selects has no value; a number taken out of a tensor is refused.
    """
    count_devices()
    sizes = ShapeEnv(allow_scalar_outputs=False)
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes, static_shapes=True)


_NORMS = frozenset({torch.ops.aten.native_layer_norm, torch.ops.aten.native_group_norm})
"""Operators whose kernels take parameters of half precision for operands of half precision only."""
_ACROSS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_")
)
"""Operators that take tensors of two devices."""


class Strict(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise for calls that meta tensors accept and devices refuse: operands on two devices, or of two dtypes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = list(_tensors((*args, *(kwargs or {}).values())))
        if len(tensors) > 1:
            devices = {tensor.device.type for tensor in tensors if tensor.ndim or tensor.device != CPU}
            if len(devices) > 1 and func.overloadpacket not in _ACROSS:
                raise RuntimeError(f"{func} takes tensors of one device, got {' and '.join(sorted(devices))}")
            is_single = func.namespace == "aten" and base_name(str(func)) in ONE_DTYPE
            is_single = is_single or (func.overloadpacket in _NORMS and tensors[0].dtype == torch.float32)
            if is_single and len({tensor.dtype for tensor in tensors}) > 1:
                raise RuntimeError(f"{func} takes one dtype, got {', '.join(str(tensor.dtype) for tensor in tensors)}")
        return func(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    for item in value:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _tensors(item)


@functools.cache
def count_devices() -> None:
    """Make autograd count the devices of this machine, so that ranks can be forked after a trace.

    It counts in the first backward, and starts a thread per device, after which a forked process has no backward. With
    a torch built for GPUs on a machine without one, the fake tensor mode pretends a GPU from then on.
    """
    if not torch.accelerator.is_available():
        with torch.inference_mode(False), torch.enable_grad():
            torch.autograd.backward(torch.ones((), requires_grad=True, device=CPU))


def empty(fake: FakeTensorMode, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a contiguous fake tensor on the CPU. Not for use within a dispatch mode."""
    return FakeTensor(fake, torch.empty(shape, dtype=dtype, device="meta"), CPU)


def parameter(fake: FakeTensorMode, like: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """Return a fake parameter shaped like `like`: `nn.Parameter` of a tensor subclass, without its `detach`."""
    fake_parameter: Any = empty(fake, tuple(like.shape), dtype)
    fake_parameter._is_param = True
    return fake_parameter.requires_grad_(like.requires_grad)  # type: ignore[no-any-return]


class _NotPlainError(Exception):
    """The shapes of a call's results depend on more than the shapes of its operands."""


class Results:
    """Call operators on fake tensors; the layout of results is computed once for equal layouts of operands.

    It is computed on meta tensors. Torch's propagation computes it for operators without operands, for those whose
    kernel depends on the device, and where meta tensors fail. Not cached: operators that write, operators outside aten,
    operands that are real or have a number (`torch.tensor(0.5)`), whose results may depend on it, and devices other
    than the CPU.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self._known: dict[Any, _Answer] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of `func(*args, **kwargs)` under the fake mode."""
        operands: list[Tensor] = []
        try:
            if func.namespace != "aten" or func._schema.is_mutable:
                raise _NotPlainError
            key_of_operands = _key(args, operands), _key(tuple(kwargs.items()), operands)
        except _NotPlainError:
            return func(*args, **kwargs)
        key = func, key_of_operands, torch.get_default_dtype()
        answer = self._known.get(key)
        if answer is None and operands and func not in _BY_DEVICE:
            answer = _on_meta(func, args, kwargs, operands)
        if answer is None:
            result = func(*args, **kwargs)
            answer = _Answer.of(result, operands)
            if answer is not None:
                self._known[key] = answer
            return result
        self._known[key] = answer
        return answer.on(operands, self.fake)


def _key(value: Any, operands: list[Tensor]) -> Any:
    """Return the key for shapes of results: the layout of each tensor, the value and type of other arguments."""
    if isinstance(value, Tensor):
        if not isinstance(value, FakeTensor) or value.constant is not None or not _is_plain(value):
            raise _NotPlainError
        operands.append(value)
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.is_inference()
    if isinstance(value, (tuple, list)):
        return tuple([_key(item, operands) for item in value])
    if isinstance(value, torch.device) and value != CPU:
        raise _NotPlainError
    return type(value), value


def _is_plain(value: Tensor) -> bool:
    on_cpu = value.device == CPU and value.layout is torch.strided
    return on_cpu and not value.is_conj() and not value.is_neg() and all(isinstance(size, int) for size in value.shape)


class _Answer:
    """The results of a call: for each the index of an operand, or a meta tensor as a template."""

    def __init__(self, kind: type | None, parts: list[int | Tensor]) -> None:
        self.kind = kind
        self.parts = parts

    @classmethod
    def of(cls, result: Any, operands: list[Tensor]) -> _Answer | None:
        """Return the answer, or None where `result` contains values other than tensors that their layout describes."""
        kind = type(result) if type(result) in (tuple, list) else None
        parts: list[int | Tensor] = []
        for value in result if kind else (result,):
            index = next((i for i, operand in enumerate(operands) if operand is value), None)
            if index is not None:
                parts.append(index)
            elif isinstance(value, FakeTensor) and value.constant is None and _is_plain(value):
                with _disable_current_modes():
                    parts.append(_meta_like(value))
            elif isinstance(value, Tensor) and value.is_meta:
                parts.append(value)
            else:
                return None
        return cls(kind, parts)

    def on(self, operands: list[Tensor], fake: FakeTensorMode) -> Any:
        results = [operands[part] if isinstance(part, int) else FakeTensor(fake, part, CPU) for part in self.parts]
        return results[0] if self.kind is None else self.kind(results)


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Tensor]) -> _Answer | None:
    """Return the answer from meta tensors of the operands' layouts, or None."""
    with _disable_current_modes():
        metas = [_meta_like(operand) for operand in operands]
        stand_ins = iter(metas)
        try:
            result = func(*_moved(args, stand_ins), **_moved(kwargs, stand_ins))
        except Exception:  # no kernel, or a value is needed: torch's propagation answers, or refuses
            return None
    return _Answer.of(result, metas)


def _moved(value: Any, stand_ins: Iterator[Tensor]) -> Any:
    """Return `value` with its tensors replaced in order, and the CPU by meta."""
    if isinstance(value, Tensor):
        return next(stand_ins)
    if isinstance(value, (tuple, list)):
        return [_moved(item, stand_ins) for item in value]
    if isinstance(value, dict):
        return {name: _moved(item, stand_ins) for name, item in value.items()}
    return torch.device("meta") if isinstance(value, torch.device) else value


def _meta_like(value: Tensor) -> Tensor:
    """Return a meta tensor with the layout of `value`, created in inference mode if `value` was."""
    span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    length = value.storage_offset() + (span if math.prod(value.shape) else 0)
    with torch.inference_mode(value.is_inference()):
        storage = torch.empty(length, dtype=value.dtype, device="meta")
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
