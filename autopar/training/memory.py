"""The peak of a rank's memory in the first steps."""

from __future__ import annotations

import contextlib

import torch

from autopar.costs.live_bytes import LiveBytes

WARM_STEPS = 2
"""Steps that a median leaves out: memory is followed in them, and torch allocates what later ones reuse."""


class Memory:
    """Follows tensors of the first steps on CPU when asked to; asks the allocator on GPUs.

    on_cpu: training is on CPUs, whatever the machine has.
    """

    def __init__(self, is_wanted: bool, on_cpu: bool) -> None:
        self.on_gpu = torch.cuda.is_available() and not on_cpu
        self.peak_bytes: int | None = None
        self.stack = contextlib.ExitStack()
        self.live = LiveBytes() if is_wanted and not self.on_gpu else None

    def __enter__(self) -> Memory:
        if self.live is not None:
            self.stack.enter_context(self.live)
        return self

    def __exit__(self, *details: object) -> None:
        self.stack.close()

    def after_step(self, num_done: int) -> None:
        """The second step is the one that counts: the first makes the optimiser's state."""
        if self.on_gpu:
            if num_done == 1:
                torch.cuda.reset_peak_memory_stats()
            self.peak_bytes = torch.cuda.max_memory_allocated()
        elif self.live is not None and num_done <= WARM_STEPS:
            self.peak_bytes = self.live.peak_bytes
            self.live.reset_peak()
            if num_done == WARM_STEPS:
                self.stack.close()
