"""A folder of checkpoints: one sub-folder per step, complete or absent, the newest two kept.

A plain run writes the same names in the same format as a generated program (codegen/runtime/checkpoint.py), so that
training can move between one process and many.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.errors import ModelError

KEPT = 2
_NAME = re.compile(r"step-(\d+)")


def latest(directory: str | Path | None) -> Path | None:
    """The newest complete checkpoint, or None."""
    complete = _complete(directory)
    return complete[-1] if complete else None


def write(
    directory: str | Path, step: int, save: Callable[[Path], None], is_first: bool, wait: Callable[[], None]
) -> Path:
    """Let `save` write beside its place, and rename when every rank is done. Collective, returns the checkpoint.

    is_first: whether this rank does the renaming. wait: a barrier of all ranks.
    """
    home = Path(directory)
    fresh, final = home / f".step-{step:08d}.partial", home / f"step-{step:08d}"
    if is_first:
        home.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
    wait()
    save(fresh)
    wait()
    if is_first:
        shutil.rmtree(final, ignore_errors=True)
        fresh.rename(final)
        for old in _complete(home)[:-KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    wait()
    return final


def _complete(directory: str | Path | None) -> list[Path]:
    home = Path(directory) if directory is not None else None
    if home is None or not home.is_dir():
        return []
    found = [(int(match[1]), path) for path in home.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def save_plain(model: nn.Module, optimizer: torch.optim.Optimizer, progress: dict[str, int], directory: Path) -> None:
    """Write a model that is trained on one process."""
    state: dict[str, Any] = _tensors(model)
    for name, parameter in _optimized(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{name}.{key}"] = value
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state |= {"optimizer groups": groups, "progress": progress}
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _no_process_group():
        state_dict_saver.save(state, checkpoint_id=directory, planner=planner, no_dist=True)


def load_plain(model: nn.Module, optimizer: torch.optim.Optimizer, directory: Path) -> dict[str, int]:
    """Continue from a checkpoint of either kind; returns its progress. Raises ModelError where names are missing."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    state: dict[str, Any] = _tensors(model)
    missing = [name for name in state if name not in metadata]
    if missing:
        raise ModelError(f"the checkpoint {directory} lacks {', '.join(missing[:5])}", alternatives="another directory")
    optimizer.state.clear()
    for name, parameter in _optimized(model):
        prefix = f"optimizer.{name}."
        held = {n.removeprefix(prefix): m for n, m in metadata.items() if n.startswith(prefix)}
        for key, stored in held.items():
            if isinstance(stored, TensorStorageMetadata) and "." not in key:
                value = torch.zeros(stored.size, dtype=stored.properties.dtype)
                state[prefix + key] = optimizer.state[parameter][key] = value
    state |= {"optimizer groups": None, "progress": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad(), _no_process_group():
        state_dict_loader.load(state, checkpoint_id=directory, planner=planner, no_dist=True)
    for group, values in zip(optimizer.param_groups, state["optimizer groups"], strict=True):
        group.update(values)
    progress: dict[str, int] = state["progress"]
    return progress


@contextlib.contextmanager
def _no_process_group() -> Iterator[None]:
    """torch warns that it is used by one process, as is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters and persistent buffers under their first names."""
    persistent = model.state_dict(keep_vars=True).keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in persistent}


def _optimized(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
