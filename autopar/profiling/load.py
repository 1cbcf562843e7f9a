"""What keeps a GPU as busy as training does while its kernels are timed.

A GPU lowers its clocks under load: kernels that each begin on an idle device ran 9 to 13 % faster than in training
(docs/accuracy.md). So a kernel is timed in the midst of others, products of several shapes and what moves bytes, that
have kept the device busy for a while and go on doing so between repetitions, with nothing waited for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import torch

Call = Callable[[], object]
SIZES = ((4096, 4096, 4096), (2048, 8192, 1024), (8192, 1024, 4096), (1024, 14336, 4096))
"""Rows, columns and depth of the products, as layers with hidden sizes of 1,024 to 4,096 have them."""
QUEUED = 8
"""Kernels that are started before one is waited for."""


class Load:
    """Kernels without end on a device. mark: gives a function that waits for what was started until then. sizes: of the
    products."""

    def __init__(
        self, device: torch.device, mark: Callable[[], Call], sizes: tuple[tuple[int, int, int], ...] = SIZES
    ) -> None:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
        self.mark, self._made = mark, dict[tuple[int, int], torch.Tensor]()
        for rows, columns, depth in sizes:
            for shape in ((rows, depth), (depth, columns)):
                self._made.setdefault(shape, torch.randn(shape, dtype=dtype, device=device))
        self._kernels = itertools.cycle(list(self._of(sizes)))

    def _of(self, sizes: tuple[tuple[int, int, int], ...]) -> Iterator[Callable[[], torch.Tensor]]:
        for rows, columns, depth in sizes:
            left, right = self._made[rows, depth], self._made[depth, columns]
            yield lambda left=left, right=right: left @ right  # type: ignore[misc]
            yield lambda left=left: left + left  # type: ignore[misc]

    def start(self, count: int = QUEUED) -> None:
        """So many kernels, which nothing waits for."""
        for _ in range(count):
            next(self._kernels)()

    def sustain(self, seconds: float) -> None:
        """Keeps the device busy for so long, and ends with kernels under way."""
        end = time.perf_counter() + seconds
        self.start()
        while time.perf_counter() < end:
            # The next ones are there before these are done.
            mark = self.mark()
            self.start()
            mark()
