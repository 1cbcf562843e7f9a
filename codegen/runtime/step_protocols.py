"""Protocols of objects that a step may be given. For annotations alone: no saved program has this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from .mesh import Mesh
from .optimizers import Factory, GlobalParameter
from .stage_module import Part
from .whole_updates import WholeUpdates


class Trial(Protocol):
    """The trial of an unknown optimizer (`optimizer_trial.OptimizerTrial`)."""

    def wholes(
        self,
        factory: Factory,
        parameters: Sequence[GlobalParameter],
        parts: Sequence[Part],
        mesh: Mesh,
        *,
        is_staged: bool,
        is_offloaded: bool,
    ) -> WholeUpdates | None:
        """Return parameters updated whole, or None. Raises OptimizerError if ranks cannot update alike."""
        ...

    def forgotten(self, factory: Factory, parameters: Sequence[GlobalParameter]) -> str:
        """Return why checkpoints would be without a part of the optimizer's state; "" if they would not."""
        ...


class FirstCheck(Protocol):
    """Looks at a step's first batch and its loss."""

    def note_part(
        self, part: Mapping[str, Tensor], whole: Mapping[str, Any], again: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        """`local_batch` made this rank's part of a whole batch, as `again` does once more."""
        ...

    def forget_part(self, part: Mapping[str, Tensor]) -> None:
        """A part was evaluated."""
        ...

    def __call__(self, part: Mapping[str, Tensor]) -> Callable[[float], None] | None:
        """The first step begins; what is to be given its loss. Collective, as what it returns is."""
        ...
