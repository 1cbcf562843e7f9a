"""What becomes of a step's state: checkpoints, a Hugging Face folder, the values of the user's model.

Each function is collective: every rank of the step calls it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, CheckpointError
from autopar.integrations.pretrained import notes_of, save_pretrained
from autopar.program import GeneratedProgram
from autopar.running.state_follower import followed
from autopar.running.weights import LazyState, set_values
from autopar.settings.arguments import check_path
from codegen.runtime import checkpoint_files as files


class DamagedCheckpoint(CheckpointError, files.DamagedError):
    """A checkpoint is not as it was written; the folder's functions know it as theirs."""


@contextlib.contextmanager
def readable(runtime: Any = files) -> Iterator[None]:
    """Errors of a runtime's checkpoint module (a generated program has its own) as errors of autopar."""
    try:
        yield
    except AutoparError:
        raise
    except runtime.DamagedError as error:
        raise DamagedCheckpoint(str(error)) from None
    except runtime.DiskError as error:
        alternatives = ["what it lacks there: the run then goes on from its last checkpoint", "another folder"]
        raise CheckpointError(f"the file system refuses: {error}", alternatives=alternatives) from None
    except runtime.UnsavableError as error:
        raise CheckpointError(str(error), alternatives=["another optimiser", "no checkpoint_directory"]) from None
    except runtime.CheckpointError as error:
        raise CheckpointError(str(error), alternatives="another checkpoint folder") from None


def save_checkpoint(
    compiled: GeneratedProgram, step: Any, directory: str | Path, notes: Mapping[str, str] | None = None
) -> None:
    """Write parameters, buffers, optimiser state and position, sharded, to a folder that any plan can go on from.

    notes: texts to find in `load_checkpoint`, such as a schedule's state. Raises CheckpointError where the folder is
    taken or cannot be written, FloatingPointError where a parameter is not finite.
    """
    check_path("directory", directory)
    model = compiled.model
    step.state_check(None)
    said = {"plan": compiled.plan.to_yaml(), **notes_of(model), **(notes or {})}
    runtime = _runtime_of(step)
    with readable(runtime):
        runtime.save(step, directory, others=LazyState(model), notes=said)


def load_checkpoint(compiled: GeneratedProgram, step: Any, directory: str | Path) -> Mapping[str, str]:
    """Continue from what `save_checkpoint` or a Trainer wrote, under whatever plan; returns its notes.

    Raises CheckpointError for another model or optimiser, or a damaged checkpoint, before anything is changed.
    """
    check_path("directory", directory)
    runtime = _runtime_of(step)
    with readable(runtime):
        runtime.load(step, directory, others=LazyState(compiled.model))
    if (follower := followed(step)) is not None:
        follower.values_loaded()
    return read_notes(Path(directory))


@readable()
def read_notes(directory: Path) -> Mapping[str, str]:
    """The texts that were written with a checkpoint."""
    notes: Mapping[str, str] = files.read_manifest(directory).record.get("notes", {})
    return notes


def check_checkpoint(step: Any) -> None:
    """Raises CheckpointError, after a step, for state that could not be saved."""
    runtime = _runtime_of(step)
    with readable(runtime):
        runtime.check(step)


def write_pretrained(compiled: GeneratedProgram, step: Any, directory: str | Path) -> None:
    """Write the trained model as a folder that `from_pretrained` of transformers reads, tensor by tensor.

    Raises ModelError for a model that is not of transformers, OutputError for a folder that autopar did not write.
    """
    check_path("directory", directory)
    values = step.whole_tensors(rank0_only=True)
    try:
        if step.mesh.everyone.rank == 0:
            save_pretrained(values, compiled.model, directory)
    finally:
        for _ in values:  # the others take part in what is read
            pass


def update_model(compiled: GeneratedProgram, step: Any) -> None:
    """Put the trained values into the user's own model, on every rank."""
    follower = followed(step)
    if follower is not None:
        follower(False)  # what the script changed meanwhile is kept
    set_values(compiled.model, step.whole_tensors(all_written=True), compiled.loss_fn)
    if follower is not None:
        follower.values_written()


def _runtime_of(step: Any) -> Any:
    """The program's own module of checkpoints."""
    return importlib.import_module(f"{type(step).__module__.rpartition('.')[0]}.checkpoint")
