"""Buffers whose next values a forward computes: averages over steps, queues, codebooks, running maxima.

A step writes them after its backward. Until then every forward, one that runs again in backward included, reads the
values of the step before, and each of several micro-batches computes the same next value, which is of the whole batch.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from .mesh import Mesh
from .parameters import Module, member_of
from .rng_state import RngState

UPDATING_ATTRIBUTES = ("_next_values",)
"""What an `UpdatingModule` holds beside what any module does."""


class UpdatingModule(Module):
    """Base of generated classes whose forward computes the next values of UPDATED_BUFFERS."""

    UPDATED_BUFFERS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, mesh: Mesh, rng: RngState | None = None, path: str = "", layer_index: int = 0) -> None:
        # Not by __setattr__, which wants modules for what a user calls alike.
        self.__dict__.update(dict.fromkeys(UPDATING_ATTRIBUTES))
        super().__init__(mesh, rng, path, layer_index)
        self._next_values: dict[int, tuple[Tensor, Tensor]] = {}

    def update_buffer(self, buffer: Tensor, value: Tensor) -> None:
        """Note a buffer's next value, both this rank's part, and keep a copy of it. No effect in evaluation mode."""
        if self.training:
            self._next_values[id(buffer)] = buffer, value.detach().clone()

    def write_buffers(self) -> None:
        """Give the buffers the values that were noted last."""
        for buffer, value in self._next_values.values():
            buffer.copy_(value)
        self._next_values = {}

    def updated_buffers(self) -> list[Tensor]:
        """This instance's own buffers that `write_buffers` changes."""
        return [member_of(owner, attribute) for owner, attribute in map(self._place, self.UPDATED_BUFFERS)]
