"""Jobs: from the words of a command line or a configuration to a model, a batch and constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import ConstraintError, ModelError
from autopar.files.text_files import parse_yaml, read_mapping, shown
from autopar.frontend.inputs import name_inputs
from autopar.models.batches import ByteText, random_batch
from autopar.models.loading import LoadedModel, load_model
from autopar.settings.arguments import whole

ROWS_PER_DEVICE = 8
DEFAULT_SEQ_LEN = 128


@dataclass(frozen=True, slots=True)
class Job:
    """A model with one global batch, as autopar.compile takes them."""

    model: torch.nn.Module
    inputs: Mapping[str, Any] | tuple[Any, ...]
    loss_fn: Callable[..., torch.Tensor] | None

    @property
    def batch_size(self) -> int:
        """The rows of the batch."""
        values = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        return next(int(v.shape[0]) for v in values if isinstance(v, torch.Tensor) and v.dim() > 0)

    @property
    def seq_len(self) -> int:
        """The length of the token sequences. Raises ModelError for a model without tokens."""
        values = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
                return int(value.shape[1])
        raise ModelError(
            "the model takes no token sequences",
            values="no integer input of two dimensions",
            alternatives="a model with an input of token ids, int64 [rows, tokens]",
        )


def load_job(
    spec: str,
    *,
    num_devices: int,
    batch: int | None,
    seq: int | None,
    options: Mapping[str, Any],
    meta: bool,
    lazy: bool = False,
) -> Job:
    """Load the model that `spec` names, with a batch of `batch` rows (8 per device by default) and `seq` tokens.

    A factory gets batch_size and seq_len only if the user set them. meta: build a configuration's model without memory.
    lazy: leave a folder's weights in its files. Raises ModelError.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None:
            whole(name, value, 1)
    is_config = spec.startswith("hf:")
    from_user: dict[str, Any] = (
        {} if is_config else {k: v for k, v in (("batch_size", batch), ("seq_len", seq)) if v is not None}
    )
    loaded: LoadedModel = load_model(spec, meta=meta and is_config, lazy=lazy, **from_user, **options)
    if loaded.inputs is not None:
        return Job(loaded.model, loaded.inputs, loaded.loss_fn)
    longest = getattr(getattr(loaded.model, "config", None), "max_position_embeddings", None) or DEFAULT_SEQ_LEN
    rows = batch or ROWS_PER_DEVICE * num_devices
    return Job(loaded.model, random_batch(loaded.model, rows, seq or min(DEFAULT_SEQ_LEN, longest)), loaded.loss_fn)


def batches_of(job: Job, data: str | None, seed: int) -> Any:
    """Return batches for a Trainer: windows of a file's bytes, or the job's batch repeatedly."""
    return ByteText(Path(data), job.batch_size, job.seq_len, seed) if data else [named(job)]


def named(job: Job) -> Mapping[str, Any]:
    """Return the batch by input names."""
    if isinstance(job.inputs, Mapping):
        return job.inputs
    return name_inputs(job.model, job.inputs, job.loss_fn)


def parse_settings(settings: Sequence[str], option: str) -> dict[str, Any]:
    """Parse `["tp=2", "zero=3"]` to {"tp": 2, "zero": 3}. Raises ConstraintError. option: for messages."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConstraintError(f"{option} takes NAME=VALUE", values=shown(setting), alternatives=f"{option} tp=2")
        parsed, _ = parse_yaml(value, f"{option} {shown(setting)}")
        if name in values and values[name] != parsed:
            raise ConstraintError(
                f"{option} has two values for {name}",
                values=f"{values[name]!r} and {parsed!r}",
                alternatives="one of the two",
            )
        values[name] = parsed
    return values


def constraints_of(settings: Sequence[str], memory: str | None, file: str | None) -> dict[str, Any]:
    """Return the constraints of a file, overridden by those of the command line."""
    constraints = read_mapping(file) if file is not None else {}
    constraints |= parse_settings(settings, "--set")
    return constraints | ({"memory": memory} if memory is not None else {})
