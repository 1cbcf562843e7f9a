"""Memory in use: bytes of all live tensor storages, followed operator by operator.

A plan predicts tensors. Resident set size differs: it also has the interpreter, the libraries and the allocator's
reserve, and a forked process shares pages with its parent.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class hook
    """`with LiveBytes() as live:` counts storages that operators (forward, backward, optimizer) allocate on this
    thread.

    num_bytes: alive now. peak_bytes: the most since the start or the last `reset_peak`. Earlier tensors and memory
    inside a communication library do not count. A storage with another size at `reset_peak` or at use (gathered
    parameters are freed and filled again) is measured anew at every operator from then on. Slows every operator by some
    ten microseconds.

    settle: seconds that a new peak must last to count. A thread of gloo drops a finished collective's tensors only
    after it has woken the waiting thread; the delay depends on the machine's load. 0 counts them until then.
    """

    def __init__(self, settle: float = 0.0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.settle = settle
        self.num_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._resized: set[int] = set()

    def reset_peak(self) -> None:
        """Start a new peak from the bytes that are alive now."""
        for key, storage_ref in self._alive.items():
            storage = storage_ref()
            if storage is not None and storage.nbytes() != self._sizes[key]:
                self._resized.add(key)
        self._measure_resized()
        self.peak_bytes = self.num_bytes

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        storages = [leaf.untyped_storage() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        before = {id(storage) for storage in storages}
        for storage in storages:
            if self._sizes.get(id(storage), storage.nbytes()) != storage.nbytes():
                self._resized.add(id(storage))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if id(storage) not in before:
                    self._count(storage)
        self._measure_resized()
        if self.settle and self.num_bytes > self.peak_bytes:
            time.sleep(self.settle)
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._alive:
            return

        def freed(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._alive[key]
            self._resized.discard(key)
            self.num_bytes -= self._sizes.pop(key)

        self._alive[key] = weakref.ref(storage, freed)
        self._sizes[key] = storage.nbytes()
        self.num_bytes += self._sizes[key]

    def _measure_resized(self) -> None:
        for key in self._resized:
            storage = self._alive[key]()
            if storage is not None:
                self.num_bytes += storage.nbytes() - self._sizes[key]
                self._sizes[key] = storage.nbytes()
