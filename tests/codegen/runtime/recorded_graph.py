"""A stand-in for CUDA graphs on CPUs: calls are recorded with their tensors, and run again on the same memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Result = TypeVar("Result")

_CHECKS_ON_CPU = ("cross_entropy.py", "embedding.py")
"""Modules that look at the values of targets and ids on CPUs only."""
_resize = torch.UntypedStorage.resize_


class HostRead(RuntimeError):
    """A call whose result the host reads, which a CUDA graph cannot have."""


class RecordedGraph:
    """Record the calls of torch's operators, undo what they did, and repeat them."""

    def __init__(self) -> None:
        self._recorder = _Recorder()

    def capture(self, work: Callable[[], Result]) -> Result:
        resize = lambda storage, num_bytes: self._recorder.resize(storage, num_bytes)  # noqa: E731
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resize))
            for module in [m for name, m in sys.modules.items() if name.endswith("runtime.captured")]:
                stack.enter_context(mock.patch.object(module, "is_capturing", lambda: True))
            stack.enter_context(self._recorder)
            result = work()
        for storage, before in self._recorder.overwritten.values():
            if storage.nbytes():  # ZeRO-3 has freed others
                storage.copy_(before)
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for repeat in self._recorder.calls:
            repeat()


class _Recorder(TorchDispatchMode):
    """calls: what repeats the calls, in order. overwritten: memory from before the capture, with its values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []
        self.overwritten: dict[int, tuple[Any, Any]] = {}
        self._made: dict[int, Any] = {}
        self._scattered: dict[int, Any] = {}

    def resize(self, storage: Any, num_bytes: int) -> Any:
        """`UntypedStorage.resize_`, recorded."""
        self.calls.append(lambda: _resize(storage, num_bytes))
        return _resize(storage, num_bytes)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            if not any(name.endswith(_CHECKS_ON_CPU) for name in _files()):
                raise HostRead(f"{function} of {tuple(args[0].shape)}")
            return function(*args, **kwargs)
        if function is torch.ops.aten.copy_.default and self._is_of_wait(*args[:2]):
            return function(*args, **kwargs)
        for tensor in _written(function, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage.nbytes():
                self.overwritten.setdefault(storage._cdata, (storage, storage.clone()))
        results = function(*args, **kwargs)
        given = {storage._cdata: storage for storage in _storages((args, kwargs))}
        if "reduce_scatter" in function.name():
            self._scattered |= {storage._cdata: storage for storage in _storages(args[:1])}
        self._made |= {storage._cdata: storage for storage in _storages(results) if storage._cdata not in given}
        aliases = [value.alias_info for value in function._schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        if "empty" not in function.name() and not is_view:
            self.calls.append(lambda: _repeat(function, args, kwargs, results))
        return results

    def _is_of_wait(self, target: Tensor, source: Tensor) -> bool:
        """Whether a copy is the end of gloo's reduce-scatter, in its `wait`, from memory that no recorded call made."""
        is_result = target.untyped_storage()._cdata in self._scattered
        return is_result and source.untyped_storage()._cdata not in self._made


def _repeat(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    """Repeat a call, with its results in the memory where they were."""
    repeated = function(*args, **kwargs)
    if function.namespace == "c10d":
        *_, work = tree_leaves(repeated)
        torch._C._distributed_c10d.Work.unbox(work).wait() if isinstance(work, torch.ScriptObject) else work.wait()
    elif any(value.alias_info is None for value in function._schema.returns):
        for recorded, value in zip(tree_leaves(results), tree_leaves(repeated), strict=True):
            if isinstance(recorded, Tensor):
                recorded.copy_(value)


def _storages(values: Any) -> Iterator[Any]:
    return (value.untyped_storage() for value in tree_leaves(values) if isinstance(value, Tensor))


def _written(function: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes."""
    if function.namespace == "c10d":
        yield from (tensor for tensor in tree_leaves(args) if isinstance(tensor, Tensor))
        return
    for position, argument in enumerate(function._schema.arguments):
        # The schema of batch norm does not say that it writes its statistics.
        if (argument.alias_info is not None and argument.alias_info.is_write) or "running" in argument.name:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor))


def _files() -> Iterator[str]:
    frame = sys._getframe(2)
    for _ in range(12):
        if frame is None:
            return
        yield frame.f_code.co_filename
        frame = frame.f_back
