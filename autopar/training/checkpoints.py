"""Checkpoints of training, with autopar's own errors: folders of checkpoints, and the format of a plain run.

A plain run writes the names and the format of a generated program (codegen/runtime/checkpoint.py), so that training
can move between one process and many.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.models.pretrained_export import notes_of
from autopar.running.state import DamagedCheckpoint as DamagedCheckpoint
from autopar.running.state import read_notes, readable
from autopar.settings.optimizers import as_constraint_errors
from codegen.runtime import checkpoint_files as files
from codegen.runtime import checkpoint_folder
from codegen.runtime.checkpoint import NON_PERSISTENT, OPTIMIZER
from codegen.runtime.checkpoint_files import Piece
from codegen.runtime.checkpoint_folder import latest
from codegen.runtime.optimizer_probe import forgotten
from codegen.runtime.optimizers import Factory, OptimizerError, parameters_of, settings_of, whole_optimizer

__all__ = [
    "latest",
    "load_plain",
    "locked",
    "read_notes",
    "readable",
    "require_same_run",
    "resume",
    "save_plain",
    "write",
]


resume = readable()(checkpoint_folder.resume)
write = readable()(checkpoint_folder.write)


@contextlib.contextmanager
def locked(directory: str | Path | None) -> Iterator[None]:
    """Hold a folder's lock as `checkpoint_folder.locked` does, with autopar's errors."""
    with readable(), checkpoint_folder.locked(directory):
        yield


def require_same_run(directory: str | Path | None, model: nn.Module, factory: Factory) -> None:
    """Raise CheckpointError where a program's ranks would on resuming from the folder, before any rank starts.

    Reads only the manifest of the newest intact checkpoint, unless another model or optimizer wrote it.
    """

    def look(path: Path) -> None:
        manifest = files.read_manifest(path)
        try:
            _require_same_model(_under_stored_names(model, manifest), manifest, path)
            with as_constraint_errors():
                optimizer = whole_optimizer(factory, parameters_of(model)).optimizer
            files.require_same_optimizer(optimizer, manifest.record)
        except files.CheckpointError:
            files.require_intact(path, manifest, 0, 1)  # a damaged checkpoint is skipped, whichever model wrote it
            raise

    with readable():
        checkpoint_folder.resume(directory, look, is_first=False)


# Plain runs -----------------------------------------------------------------------------------------------------------


@readable()
def save_plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    directory: Path,
    settings: list[dict[str, Any]] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a model that one process trains. settings: the optimizer's when it was made (by default the present ones).
    notes: texts for the manifest."""
    state, numbers = _tensors(model), check_plain(model, optimizer)
    for name, parameter in _optimized(model):
        values = optimizer.state.get(parameter, {}).items()
        state |= {f"{OPTIMIZER}{name}.{key}": value for key, value in values if isinstance(value, Tensor)}
    record = {
        "progress": progress,
        "optimizer": files.optimizer_record(optimizer, settings or settings_of(optimizer)),
        "numbers": numbers,
        "notes": {**notes_of(model), **(notes or {})},
    }
    files.write(directory, [_whole(name, value) for name, value in state.items()], record, 0, _alone)


@readable()
def require_resumable(model: nn.Module, factory: Factory) -> None:
    """Raise CheckpointError for an optimizer that a checkpoint cannot restore exactly."""
    with contextlib.suppress(OptimizerError):  # without stand-ins for its parameters, which a plain run does not need
        if reason := forgotten(factory, parameters_of(model)):
            raise files.UnsavableError(reason)


@readable()
def check_plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the numbers in the optimizer's state, by name. Raises CheckpointError where it cannot be saved."""
    numbers: dict[str, Any] = {}
    for name, parameter in _optimized(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            full = f"{OPTIMIZER}{name}.{key}"
            if isinstance(value, (bool, int, float)):
                numbers[full] = value
            elif not isinstance(value, Tensor):
                raise files.UnsavableError(
                    f"the optimizer's state cannot be saved: {full} is no tensor but {type(value).__name__}"
                )
    return numbers


@readable()
def load_plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path, settings: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Resume from a checkpoint of a plain run or a program; return its progress. settings: as in `save_plain`.

    Raises CheckpointError for another model or optimizer, and DamagedCheckpoint, both before anything changes.
    """
    manifest = files.read_manifest(directory)
    files.require_intact(directory, manifest, 0, 1)
    files.require_same_optimizer(optimizer, manifest.record)
    wanted = _tensors(model)
    _require_same_model(wanted, manifest, directory)
    pieces = [_whole(name, value.data) for name, value in wanted.items() if _is_stored(name, value, manifest)]
    states: list[tuple[nn.Parameter, dict[str, Any]]] = []
    for name, parameter in _optimized(model):
        prefix, state = f"{OPTIMIZER}{name}.", dict[str, Any]()
        for full in (*manifest.tensors, *manifest.record["numbers"]):
            key = full.removeprefix(prefix)
            if not full.startswith(prefix) or "." in key:
                continue
            if full in manifest.tensors:
                stored = manifest.tensors[full]
                state[key] = torch.zeros(stored.shape, dtype=stored.dtype)
                pieces.append(_whole(full, state[key]))
            else:
                state[key] = manifest.record["numbers"][full]
        if state:
            states.append((parameter, state))
    files.fill(directory, manifest, pieces)
    optimizer.state.clear()
    for parameter, state in states:
        optimizer.state[parameter] = state
    files.continue_settings(optimizer, settings or settings_of(optimizer), manifest.record)
    progress: dict[str, Any] = manifest.record["progress"]
    return progress


def _require_same_model(wanted: Mapping[str, Tensor], manifest: files.Manifest, directory: Path) -> None:
    stored = {name for name in manifest.tensors if not name.startswith((OPTIMIZER, NON_PERSISTENT))}
    needed = {name for name, value in wanted.items() if not name.startswith(NON_PERSISTENT)}
    missing = sorted(name for name in needed - stored if wanted[name].numel())
    for names, whose in ((missing, "lacks"), (sorted(stored - needed), "has, and the model has not,")):
        if names:
            some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise files.CheckpointError(f"the checkpoint {directory} is of another model: it {whose} {some}")
    for name in sorted(stored & needed):
        files.require_shape(name, manifest.tensors[name], tuple(wanted[name].shape))


def _under_stored_names(model: nn.Module, manifest: files.Manifest) -> dict[str, Tensor]:
    """Return `_tensors` of a model. A tensor with several names gets the one that the checkpoint has."""
    names: dict[int, list[str]] = {}
    for name, value in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        names.setdefault(id(value), []).append(name)
    return {
        next((alias for alias in names[id(value)] if alias in manifest.tensors), name): value
        for name, value in _tensors(model).items()
    }


def _is_stored(name: str, value: Tensor, manifest: files.Manifest) -> bool:
    """Return whether to read a tensor. A model may rebuild non-persistent buffers in another length; these are left."""
    stored = manifest.tensors.get(name)
    return stored is not None and (not name.startswith(NON_PERSISTENT) or stored.shape == tuple(value.shape))


def _alone(value: Any) -> list[Any]:
    return [value]


def _whole(name: str, value: Tensor) -> Piece:
    return Piece(name, tuple(value.shape), (0,) * value.ndim, value)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers under their first names."""
    persistent = model.state_dict(keep_vars=True).keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in persistent}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that a run needs to resume, including buffers outside of the state dict."""
    state = state_of(model)
    return state | {NON_PERSISTENT + name: b for name, b in model.named_buffers() if name not in state}


def _optimized(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
