"""Save and load a step's state: checkpoints, a Hugging Face folder, the values of the user's model.

Each function is collective: every rank of the step calls it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, CheckpointError
from autopar.models.pretrained_export import notes_of, save_pretrained
from autopar.program import GeneratedProgram
from autopar.running.state_follower import followed
from autopar.running.weights import LazyState, set_values
from autopar.settings.arguments import check_path
from codegen.runtime import checkpoint_files as files


class DamagedCheckpoint(CheckpointError, files.DamagedError):
    """A checkpoint differs from what was written. Also a DamagedError, which the folder's functions handle."""


@contextlib.contextmanager
def readable(runtime: Any = files) -> Iterator[None]:
    """Raise errors of a runtime's checkpoint module (each generated program has its own) as errors of autopar."""
    try:
        yield
    except AutoparError:
        raise
    except runtime.DamagedError as error:
        raise DamagedCheckpoint(str(error)) from None
    except runtime.DiskError as error:
        alternatives = ["free what it lacks there: the run then resumes from its last checkpoint", "another folder"]
        raise CheckpointError(f"the file system refuses: {error}", alternatives=alternatives) from None
    except runtime.UnsavableError as error:
        raise CheckpointError(str(error), alternatives=["another optimizer", "no checkpoint_directory"]) from None
    except runtime.CheckpointError as error:
        raise CheckpointError(str(error), alternatives="another checkpoint folder") from None


def save_checkpoint(
    compiled: GeneratedProgram, step: Any, directory: str | Path, notes: Mapping[str, str] | None = None
) -> None:
    """Write parameters, buffers, optimizer state and position, sharded, to a folder from which any plan can resume.

    notes: texts that `load_checkpoint` returns, such as a schedule's state. Raises CheckpointError where the folder is
    taken or cannot be written, FloatingPointError where a parameter is not finite.
    """
    check_path("directory", directory)
    model = compiled.model
    if step.state_check is not None:
        step.state_check(None)
    texts = {"plan": compiled.plan.to_yaml(), **notes_of(model), **(notes or {})}
    runtime = _runtime_of(step)
    with readable(runtime):
        runtime.save(step, directory, extra_tensors=LazyState(model), texts=texts)


def load_checkpoint(compiled: GeneratedProgram, step: Any, directory: str | Path) -> Mapping[str, str]:
    """Resume from a folder of `save_checkpoint` or of a Trainer, written under any plan; return its notes.

    Raises CheckpointError for another model or optimizer, or a damaged checkpoint, before anything changes.
    """
    check_path("directory", directory)
    runtime = _runtime_of(step)
    with readable(runtime):
        runtime.load(step, directory, extra_tensors=LazyState(compiled.model))
    if (follower := followed(step)) is not None:
        follower.values_loaded()
    return read_notes(Path(directory))


@readable()
def read_notes(directory: Path) -> Mapping[str, str]:
    """Return the texts that were written with a checkpoint."""
    notes: Mapping[str, str] = files.read_manifest(directory).record.get("notes", {})
    return notes


def check_checkpoint(step: Any) -> None:
    """Raise CheckpointError, after a step, where its state could not be saved."""
    runtime = _runtime_of(step)
    with readable(runtime):
        runtime.check(step)


def write_pretrained(compiled: GeneratedProgram, step: Any, directory: str | Path) -> None:
    """Write the trained model, tensor by tensor, as a folder that `from_pretrained` of transformers reads.

    Raises ModelError for a model that is not of transformers, OutputError for a folder that autopar did not write.
    """
    check_path("directory", directory)
    values = step.whole_tensors(rank0_only=True)
    try:
        if step.mesh.everyone.rank == 0:
            save_pretrained(values, compiled.model, directory)
    finally:
        for _ in values:  # other ranks take part in gathering them
            pass


def update_model(compiled: GeneratedProgram, step: Any) -> None:
    """Copy the trained values into the user's model, on every rank."""
    follower = followed(step)
    if follower is not None:
        follower(False)  # keeps what the script changed meanwhile
    set_values(compiled.model, step.whole_tensors(all_written=True), compiled.loss_fn)
    if follower is not None:
        follower.values_written()


def _runtime_of(step: Any) -> Any:
    """Return the program's module of checkpoints."""
    return importlib.import_module(f"{type(step).__module__.rpartition('.')[0]}.checkpoint")
