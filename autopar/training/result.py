"""The result of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from autopar.compiled import CompiledProgram
from autopar.errors import ModelError, OutputError
from autopar.files.outputs import require_folder
from autopar.files.tensor_files import TensorSpec
from autopar.models.pretrained_export import Values, checkpoint_values, save_pretrained, write_state
from autopar.running.process_group import is_first
from autopar.running.weights import LazyState
from codegen.runtime.checkpoint_files import read_manifest

BY_SIGTERM = "SIGTERM"
"""The value of `stopped` for a run that ended on SIGTERM after a last checkpoint."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of a run.

    losses: of each step from `first_step` (0 unless resumed) on, inf or nan where it was skipped.
    step_seconds: median without the first steps.
    peak_bytes: per rank, of tensors; empty if not measured. num_samples: rows trained on so far. checkpoint: the last
    one written or resumed from. num_skipped: steps without an update, since loss or gradients were not finite.
    evaluations: "step", "loss" and the metrics of each evaluation. stopped: why training ended before its last step, ""
    if it did not. model: the user's, with the trained values. A model whose values were on meta or in files stays
    without them where there are checkpoints: what is saved here is then read from the last one. program: None for a
    plain run.
    """

    losses: tuple[float, ...]
    first_step: int
    step_seconds: float
    peak_bytes: tuple[int, ...]
    num_samples: int
    checkpoint: Path | None = None
    num_skipped: int = 0
    evaluations: tuple[Mapping[str, float], ...] = ()
    stopped: str = ""
    model: nn.Module | None = None
    program: CompiledProgram | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out the model when pickled: its tensors would have to outlive this process."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return functools.partial(TrainResult, **{**fields, "model": None}), ()

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write the trained model as a folder that `from_pretrained` of transformers reads. Under a launcher rank 0
        writes it. Raises ModelError for a model that is not of transformers, OutputError where the folder is there and
        not autopar's."""
        if is_first():
            save_pretrained(self._values(), self._model(), directory)
        return Path(directory)

    def export(self, file: str | Path) -> Path:
        """Write the trained values under the model's names as one safetensors file. Under a launcher rank 0 writes it.
        Raises OutputError for a file that exists."""
        file = Path(file)
        if is_first():
            if file.exists():  # only rank 0 looks: it may have written the file before the others do
                raise OutputError("the file exists", values=str(file), alternatives="another file")
            require_folder(file.parent)
            file.parent.mkdir(parents=True, exist_ok=True)
            outlines = LazyState(self._model()).outlines()
            specs = {name: TensorSpec(tuple(value.shape), value.dtype) for name, value in outlines.items()}
            write_state(self._values(), specs, file)
        return file

    def _model(self) -> nn.Module:
        if self.model is None:
            raise ModelError(
                "the result has no model",
                values="it came from another process",
                alternatives="the result that fit() returns, or its checkpoint",
            )
        return self.model

    def _values(self) -> Values:
        """Yield the trained values, one at a time."""
        model = self._model()
        if self.checkpoint is not None and any(p.device.type == "meta" for p in model.parameters()):
            return checkpoint_values(self.checkpoint, read_manifest(self.checkpoint))
        return (((name,), value) for name, value in LazyState(model).items())
