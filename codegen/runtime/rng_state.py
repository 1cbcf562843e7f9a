"""The step and micro-batch that key random draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .device_keys import DeviceKeys  # beside programs only that CUDA graphs run


@dataclass(slots=True)
class RngState:
    """The step and micro-batch that key random draws; shared by all modules of a program.

    micro_batch: index in the step. micro_batch_rows: rows (dim 0) of one global micro-batch. on_device: keys for
    graphs, which read them anew in every replay.
    """

    seed: int = 0
    step: int = 0
    micro_batch: int = 0
    micro_batch_rows: int = 0
    on_device: DeviceKeys | None = None
