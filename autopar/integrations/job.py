"""Turns the words of a command line or a configuration into a model, a batch and constraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import ConstraintError, ModelError
from autopar.files.text_files import parse_yaml, read_mapping, shown
from autopar.frontend.inputs import name_inputs
from autopar.integrations.batches import random_batch
from autopar.integrations.byte_text import ByteText
from autopar.integrations.loading import LoadedModel, load_model
from autopar.settings.arguments import whole

ROWS_PER_DEVICE = 8
DEFAULT_SEQ_LEN = 128


@dataclass(frozen=True, slots=True)
class Job:
    """A model with one whole batch that it takes, as autopar.compile wants them."""

    model: torch.nn.Module
    inputs: Mapping[str, Any] | tuple[Any, ...]
    loss_fn: Callable[..., torch.Tensor] | None

    @property
    def batch_size(self) -> int:
        """Number of rows of the batch."""
        values = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        return next(int(v.shape[0]) for v in values if isinstance(v, torch.Tensor) and v.dim() > 0)

    @property
    def seq_len(self) -> int:
        """Length of the token sequences. Raises ModelError for a model without."""
        values = self.inputs.values() if isinstance(self.inputs, Mapping) else self.inputs
        for value in values:
            if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
                return int(value.shape[1])
        raise ModelError("text is for models that take token numbers", values="no integer input of two dimensions")


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
    """The model that `spec` names with a batch of `batch` rows (8 per device by default) and `seq` tokens.

    A factory is given batch_size and seq_len where the user named them. meta: build a configuration's model without
    memory. lazy: leave a folder's weights in its files. Raises ModelError.
    """
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None:
            whole(name, value, 1)
    is_config = spec.startswith("hf:")
    given: dict[str, Any] = (
        {} if is_config else {k: v for k, v in (("batch_size", batch), ("seq_len", seq)) if v is not None}
    )
    loaded: LoadedModel = load_model(spec, meta=meta and is_config, lazy=lazy, **given, **options)
    if loaded.inputs is not None:
        return Job(loaded.model, loaded.inputs, loaded.loss_fn)
    longest = getattr(getattr(loaded.model, "config", None), "max_position_embeddings", None) or DEFAULT_SEQ_LEN
    rows = batch or ROWS_PER_DEVICE * num_devices
    return Job(loaded.model, random_batch(loaded.model, rows, seq or min(DEFAULT_SEQ_LEN, longest)), loaded.loss_fn)


def batches_of(job: Job, data: str | None, seed: int) -> Any:
    """Batches for a Trainer: windows of a file's bytes, or the job's own batch again and again."""
    return ByteText(Path(data), job.batch_size, job.seq_len, seed) if data else [named(job)]


def named(job: Job) -> Mapping[str, Any]:
    """The batch by input names."""
    if isinstance(job.inputs, Mapping):
        return job.inputs
    return name_inputs(job.model, job.inputs, job.loss_fn)


def parse_settings(settings: Sequence[str], what: str) -> dict[str, Any]:
    """`["tp=2", "zero=3"]` -> {"tp": 2, "zero": 3}. Raises ConstraintError."""
    found: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise ConstraintError(f"{what} takes name=value", values=repr(setting), alternatives="tp=2")
        given, _ = parse_yaml(value, f"{what} {shown(setting)}")
        if name in found and found[name] != given:
            raise ConstraintError(f"{what} has two values for {name}", values=f"{found[name]!r} and {given!r}")
        found[name] = given
    return found


def constraints_of(settings: Sequence[str], memory: str | None, file: str | None) -> dict[str, Any]:
    """The constraints of a file, with those of the command line over them."""
    found = read_mapping(file) if file is not None else {}
    found |= parse_settings(settings, "--set")
    return found | ({"memory": memory} if memory is not None else {})
