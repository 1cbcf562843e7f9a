"""The profiler's window: torch.profiler's trace of some steps, one file per rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from autopar.training.sections import ProfilerSection


class NoProfiler:
    """Takes the place of torch's where nothing is profiled."""

    def step(self) -> None:
        """A step is done."""


@contextmanager
def profiled(section: ProfilerSection, rank: int) -> Iterator[Any]:
    """A profiler whose `step` is called after each step; it writes rank_N.json when the window is over.

    A run that ends inside of the window writes what there is.
    """
    if section.directory is None:
        yield NoProfiler()
        return
    directory = Path(section.directory)
    directory.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    before = section.first_step - 1  # the last of which warms the profiler up
    window = schedule(wait=max(before - 1, 0), warmup=min(before, 1), active=section.num_steps, repeat=1)

    def write(found: profile) -> None:
        found.export_chrome_trace(str(directory / f"rank_{rank}.json"))

    with profile(activities=activities, schedule=window, on_trace_ready=write) as profiler:
        yield profiler
