"""The keys of a step's random draws on the device, where CUDA graphs read them (`captured.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import constants, dropout_key


class DeviceKeys:
    """A table of the constants of each draw's key (`dropout.py`): int64 [draws, 2], in the order of their first use.

    A row is made when a draw first asks for its key, which is before any graph is captured. Rows stay where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, Tensor] = {}
        self._blocks: list[Tensor] = []

    def key(self, seed: int, step: int, call: int) -> Tensor:
        """Return the constants of the key of a step's `call`-th draw, `[2]`."""
        if call not in self._rows:
            block, row = divmod(len(self._rows), _BLOCK)
            if row == 0:
                self._blocks.append(torch.zeros(_BLOCK, 2, dtype=torch.int64, device=self._device))
            self._rows[call] = self._blocks[block][row]
            self._rows[call].copy_(torch.tensor(constants(dropout_key(seed, step, call))))
        return self._rows[call]

    def write(self, seed: int, step: int) -> None:
        """Write the keys of a step for all draws so far."""
        values = [constants(dropout_key(seed, step, call)) for call in self._rows]
        for number, block in enumerate(self._blocks):
            part = values[number * _BLOCK : (number + 1) * _BLOCK]
            block[: len(part)].copy_(torch.tensor(part), non_blocking=True)


_BLOCK = 1024
