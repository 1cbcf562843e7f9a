"""The loaders of a LightningModule: one, or several from which Lightning's CombinedLoader draws in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities import CombinedLoader

from autopar.errors import ConstraintError

MODES = ("max_size_cycle", "min_size")
"""Modes in which every step has a batch of each loader."""


class JointLoader:
    """Several loaders as one. A batch is a dict or list of one batch of each, in the form of the loaders."""

    def __init__(self, loaders: Any) -> None:
        is_combined = isinstance(loaders, CombinedLoader)
        mode = loaders._mode if is_combined else MODES[0]
        iterables = loaders.iterables if is_combined else loaders
        if mode not in MODES:
            raise ConstraintError(
                "every step needs a batch of each loader, as a program is made once",
                values=f"CombinedLoader(mode={mode!r})",
                alternatives=[*(f"mode={name!r}" for name in MODES), "one loader of a concatenated dataset"],
            )
        self._combined = CombinedLoader(iterables, mode)  # not the loop's, which begins at its own first batch
        self.parts: list[Any] = list(self._combined.flattened)
        if len(self.parts) < 2 and isinstance(iterables, list | tuple):
            raise ConstraintError(
                "a list of loaders has several",
                values=f"{len(self.parts)} in a {type(iterables).__name__}",
                alternatives="the loader itself, whose batches are training_step's",
            )

    def __iter__(self) -> Iterator[Any]:
        for batch, _, _ in self._combined:
            yield batch


def loader_of(loaders: Any) -> Any:
    """Return a loader with training_step's batches. Raises ConstraintError for loaders that cannot be one."""
    return JointLoader(loaders) if isinstance(loaders, CombinedLoader | dict | list | tuple) else loaders
