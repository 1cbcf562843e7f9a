"""The load that keeps a GPU as busy as training does while its kernels are timed.

A GPU lowers its clocks under load: kernels that each began on an idle device ran 9 to 13 % faster than in training
(docs/accuracy.md). So a kernel is timed among others, products of several shapes and memory-bound kernels. They keep
the device busy before, and between repetitions without waiting.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch

Call = Callable[[], object]
SIZES = ((4096, 4096, 4096), (2048, 8192, 1024), (8192, 1024, 4096), (1024, 14336, 4096))
"""Rows, columns and depth of the products, as in layers with hidden sizes of 1,024 to 4,096."""
QUEUED = 8
"""Kernels that are enqueued before the host waits for one."""


class Load:
    """An endless sequence of kernels on a device. mark: returns a function that waits for the kernels started so far.
    sizes: of the products."""

    def __init__(
        self, device: torch.device, mark: Callable[[], Call], sizes: tuple[tuple[int, int, int], ...] = SIZES
    ) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        self.mark, self._operands = mark, dict[tuple[int, int], torch.Tensor]()
        for rows, columns, depth in sizes:
            for shape in ((rows, depth), (depth, columns)):
                self._operands.setdefault(shape, torch.randn(shape, dtype=dtype, device=device))
        self._kernels = itertools.cycle(list(self._of(sizes)))

    def _of(self, sizes: tuple[tuple[int, int, int], ...]) -> Iterator[Callable[[], torch.Tensor]]:
        for rows, columns, depth in sizes:
            left, right = self._operands[rows, depth], self._operands[depth, columns]
            yield lambda left=left, right=right: left @ right  # type: ignore[misc]
            yield lambda left=left: left + left  # type: ignore[misc]

    def start(self, count: int = QUEUED) -> None:
        """Start `count` kernels without waiting for them."""
        for _ in range(count):
            next(self._kernels)()

    def sustain(self, seconds: float) -> None:
        """Keep the device busy for `seconds`, and return with kernels under way."""
        end = time.perf_counter() + seconds
        self.start()
        while time.perf_counter() < end:
            # Enqueue the next kernels before waiting for these.
            mark = self.mark()
            self.start()
            mark()
