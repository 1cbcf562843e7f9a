"""Measure a run's steps: the peak of memory in the first ones, and torch.profiler's trace of a window of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from autopar.costs.live_bytes import LiveBytes
from autopar.training.sections import ProfilerSection

WARM_STEPS = 2
"""Steps that a median leaves out. Memory is measured in them, and torch allocates what later steps reuse."""


class Memory:
    """Measure the peak of memory in the first steps: by following tensors on CPU if wanted, by the allocator on GPUs.

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
        """Measure after a step. The second step counts: the first one makes the optimizer's state."""
        if self.on_gpu:
            if num_done == 1:
                torch.cuda.reset_peak_memory_stats()
            self.peak_bytes = torch.cuda.max_memory_allocated()
        elif self.live is not None and num_done <= WARM_STEPS:
            self.peak_bytes = self.live.peak_bytes
            self.live.reset_peak()
            if num_done == WARM_STEPS:
                self.stack.close()


class NoProfiler:
    """Replaces torch's profiler where nothing is profiled."""

    def step(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def profiled(section: ProfilerSection, rank: int) -> Iterator[Any]:
    """Yield a profiler whose `step` follows each step. It writes rank_N.json at the end of the window.

    A run that ends inside of the window writes the steps so far.
    """
    if section.directory is None:
        yield NoProfiler()
        return
    directory = Path(section.directory)
    directory.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    before = section.first_step - 1  # the last of these warms the profiler up
    window = schedule(wait=max(before - 1, 0), warmup=min(before, 1), active=section.num_steps, repeat=1)

    def write(trace: profile) -> None:
        trace.export_chrome_trace(str(directory / f"rank_{rank}.json"))

    with profile(activities=activities, schedule=window, on_trace_ready=write) as profiler:
        yield profiler
