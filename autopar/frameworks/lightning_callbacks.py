"""Lightning callbacks that run before a script's own: trained values in the module, and SIGTERM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, callbacks

from autopar.frameworks.loops import ModelValues
from codegen.runtime.processes import Ending

LAST_FILE = "sigterm.ckpt"
"""The checkpoint of a run that ended on SIGTERM. `fit(..., ckpt_path=...)` resumes from it."""


class ValueUpdates(Callback):  # type: ignore[misc]
    """Updates the module's values at the end of an epoch and of training, before other callbacks and the module's
    hooks look at them. Where a callback averages them, it does so after every step."""

    def __init__(self, values: ModelValues, others: list[Callback]) -> None:
        averaging = getattr(callbacks, "WeightAveraging", ())
        self._values, self._is_averaged = values, any(isinstance(other, averaging) for other in others)

    def on_train_batch_end(self, *args: Any) -> None:
        if self._is_averaged:
            self._values.take()

    def on_train_epoch_end(self, *args: Any) -> None:
        self._values.take()

    def on_train_end(self, *args: Any) -> None:
        self._values.take()


class AtSigterm(Callback):  # type: ignore[misc]
    """Writes a last checkpoint after the step in which a rank gets SIGTERM, in the folder of the first ModelCheckpoint,
    and exits with code 143. Without a ModelCheckpoint the run ends as Lightning's do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ending: Ending | None = None

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.checkpoint_callback is not None:
            # Lightning's handler would end the rank that gets the signal, while the others wait for it.
            self._ending = Ending(self._device, is_alone=True)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self._ending is not None and self._ending.is_told():
            folder = trainer.checkpoint_callback.dirpath or trainer.default_root_dir
            trainer.save_checkpoint(Path(folder) / LAST_FILE)
            raise SystemExit(Ending.EXIT_CODE)

    def on_train_end(self, *args: Any) -> None:
        self.teardown()  # before Lightning restores the handlers that it replaced

    def on_exception(self, *args: Any) -> None:
        self.teardown()

    def teardown(self, *args: Any, **options: Any) -> None:
        if self._ending is not None:
            self._ending.close()
            self._ending = None
