"""Sharded checkpoints that load under any mesh, ZeRO stage and number of ranks.

The files (`checkpoint_files.py`) hold every tensor under the user's own name with its global shape: parameters
(`model.embed.weight`), buffers, and the optimizer's state (`optimizer.model.embed.weight.exp_avg`). A rank writes and
reads the boxes of the global tensor that it stores: a flat slice of a sharded parameter is a handful (`pieces_of`).

Hyperparameters are the optimizer factory's: a new learning rate counts when training is resumed. What training itself
changed in the optimizer's groups, such as a schedule its rate, continues where the factory says what it said before.
The seed of dropout masks is the step's own too: that of the checkpoint is for the record. The loss scale of fp16 goes
on where it was; in a checkpoint of another precision there is none, and it begins anew.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import checkpoint_files as files
from . import watch
from .boxes import Piece, pieces_of
from .checkpoint_files import CheckpointError, Gather, Manifest
from .checkpoint_files import DamagedError as DamagedError
from .checkpoint_files import DiskError as DiskError
from .checkpoint_files import UnsavableError as UnsavableError
from .flat import Bucket, Entry
from .parameters import Param
from .step import Step

OPTIMIZER = "optimizer."
NON_PERSISTENT = "non-persistent."


@watch.noted("for a checkpoint after step {done}")
def save(
    step: Step,
    directory: str | Path,
    *,
    extra_tensors: Mapping[str, Tensor] | None = None,
    texts: dict[str, str] | None = None,
) -> None:
    """Write parameters, buffers, optimizer state, step counter, data position and seed. Collective.

    The folder is complete or absent: it is written beside its place and renamed, after an older one has been moved
    aside; a crash between the two leaves the older one where `load` finds it. Raises CheckpointError on all ranks, also
    where the place is taken by what is no checkpoint, and FloatingPointError, and writes nothing, where a parameter is
    inf or nan.

    extra_tensors: whole tensors of the user's model, written where the program lacks them, such as parameters that take
    no part. texts: notes for the manifest.
    """
    final, rank, gather = Path(directory), step.mesh.everyone.rank, _gather(step)
    fresh = final.with_name(f".{final.name}.partial")
    step.require_finite()
    files.in_unison(gather, lambda: _make_way(final, fresh) if rank == 0 else None)
    pieces, numbers = files.in_unison(gather, lambda: _saved_state(step))
    if extra_tensors is not None:
        pieces += _extra_pieces(extra_tensors, set().union(*gather(_names(step))), rank)
    progress: dict[str, Any] = {"step": step.rng.step, "num_samples": step.num_samples, "seed": step.rng.seed}
    if step.loss_scaling is not None:
        progress["loss_scale"] = step.loss_scaling.state()
    record = {
        "progress": progress,
        "optimizer": files.optimizer_record(step.optimizer, step.settings),
        "numbers": dict(itertools.chain(*(numbers_of_rank.items() for numbers_of_rank in gather(numbers)))),
        "notes": texts or {},
    }
    try:
        files.write(fresh, pieces, record, rank, gather)
    except BaseException:
        if rank == 0:  # a full disk needs the place
            shutil.rmtree(fresh, ignore_errors=True)
        raise
    files.in_unison(gather, lambda: _put(fresh, final) if rank == 0 else None)


def check(step: Step) -> None:
    """Raises CheckpointError if the optimizer's state, as it is after a step, could not be saved."""
    _saved_state(step)


@watch.noted("to load a checkpoint")
def load(step: Step, directory: str | Path, *, extra_tensors: Mapping[str, Tensor] | None = None) -> None:
    """Continue from what `save` wrote, under this step's own mesh, ZeRO stage and precision. Collective.

    Every file is looked through before anything is changed. Raises on all ranks CheckpointError if names or shapes
    differ from the program's, in either direction, or the optimizer is another, and DamagedError for a checkpoint that
    is not as it was written. extra_tensors: as in `save`; the checkpoint may have these names too.
    """
    directory = Path(directory)
    if not directory.exists() and _moved_aside(directory).exists():
        directory = _moved_aside(directory)
    everyone, gather = step.mesh.everyone, _gather(step)
    manifest = files.in_unison(gather, lambda: files.read_manifest(directory))
    files.in_unison(gather, lambda: files.require_intact(directory, manifest, everyone.rank, everyone.size))
    names = set().union(*gather(_names(step)))
    if extra_tensors is not None:
        names |= set(extra_tensors)
    _require_same_names(manifest, names)
    files.in_unison(gather, lambda: _require_same_shapes(step, manifest))
    files.in_unison(gather, lambda: files.require_same_optimizer(step.optimizer, manifest.record))
    pieces, states = files.in_unison(gather, lambda: _wanted(step, manifest))
    files.in_unison(gather, lambda: files.fill(directory, manifest, pieces))
    step.optimizer.state.clear()
    for parameter, state in states:
        step.optimizer.state[parameter] = state
    step.loaded_states = frozenset(_saved_states(manifest))
    files.continue_settings(step.optimizer, step.settings, manifest.record)
    _place_scalars(step)
    progress = manifest.record["progress"]
    step.rng.step, step.num_samples = progress["step"], progress["num_samples"]
    if step.loss_scaling is not None:
        step.loss_scaling.load(progress.get("loss_scale"))
    for part in step.parts:
        part.zero.publish()


def _extra_pieces(tensors: Mapping[str, Tensor], names: set[str], rank: int) -> list[Piece]:
    """Return the tensors that the program, whose names are given, lacks: on rank 0. They may have to be read."""
    extra = {name: tensors[name] for name in tensors if name not in names} if rank == 0 else {}
    return [Piece(name, tuple(value.shape), (0,) * value.ndim, value) for name, value in extra.items()]


def _gather(step: Step) -> Gather:
    everyone = step.mesh.everyone

    def gather(value: Any) -> list[Any]:
        if everyone.size == 1:
            return [value]
        values: list[Any] = [None] * everyone.size
        dist.all_gather_object(values, value, everyone.group)
        return values

    return gather


def _moved_aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


def _make_way(final: Path, fresh: Path) -> None:
    if (final.exists() or final.is_symlink()) and not files.holds_only_a_checkpoint(final):
        raise CheckpointError(
            f"{final} is there already and is no checkpoint, or holds other files; name another folder"
        )
    shutil.rmtree(fresh, ignore_errors=True)


def _put(fresh: Path, final: Path) -> None:
    old = _moved_aside(final)
    if final.exists():
        if old.exists():
            files.remove(old)
        final.rename(old)
    files.move(fresh, final)
    if old.exists() and files.holds_only_a_checkpoint(old):
        files.remove(old)


def _saved_state(step: Step) -> tuple[list[Piece], dict[str, Any]]:
    """Return the tensors that this rank stores, and the numbers in its optimizer's state by name. Raises
    CheckpointError."""
    if step.forgotten:
        raise UnsavableError(step.forgotten)
    pieces = list(_model_pieces(step, with_copies=False))
    numbers: dict[str, Any] = {}
    for entry, parameter in _optimized(step, with_copies=False):
        for key, value in step.optimizer.state.get(parameter, {}).items():
            name = f"{OPTIMIZER}{entry.slot.name}.{key}"
            if isinstance(value, (bool, int, float, type(None))):
                numbers[name] = value
            elif not isinstance(value, Tensor):
                raise UnsavableError(
                    f"optimizer state {name} is no tensor but {type(value).__name__}; it cannot be saved"
                )
            elif _is_scalar(key, value, entry) or _is_whole(parameter, entry):
                pieces.append(Piece(name, tuple(value.shape), (0,) * value.ndim, value))
            elif value.numel() == entry.hi - entry.lo:
                pieces += pieces_of(name, entry.slot.spec, step.mesh, value.view(-1), entry.lo)
            else:
                raise UnsavableError(f"optimizer state {name} of shape {tuple(value.shape)} is not elementwise")
    return pieces, numbers


def _wanted(step: Step, manifest: Manifest) -> tuple[list[Piece], list[tuple[nn.Parameter, dict[str, Any]]]]:
    """Return the tensors that this rank reads, and the optimizer's state that they go into."""
    pieces = [_under_stored_name(piece, step, manifest) for piece in _model_pieces(step, with_copies=True)]
    pieces = [piece for piece in pieces if not piece.name.startswith(NON_PERSISTENT) or _fits(piece, manifest)]
    saved, states = _saved_states(manifest), []
    for entry, parameter in _optimized(step, with_copies=True):
        state: dict[str, Any] = {}
        for key, full in saved.get(_stored_name(entry, manifest), {}).items():
            stored = manifest.tensors.get(full)
            if stored is None:
                state[key] = manifest.record["numbers"][full]
            elif key == "step" or (stored.shape == () != entry.slot.spec.shape):
                state[key] = torch.zeros(stored.shape, dtype=stored.dtype)
                pieces.append(Piece(full, stored.shape, (0,) * len(stored.shape), state[key]))
            elif _is_whole(parameter, entry):
                state[key] = torch.zeros(stored.shape, dtype=stored.dtype, device=parameter.device)
                pieces.append(Piece(full, stored.shape, (0,) * len(stored.shape), state[key]))
            elif stored.shape == entry.slot.spec.shape:
                state[key] = torch.zeros_like(parameter, dtype=stored.dtype, requires_grad=False)
                pieces += pieces_of(full, entry.slot.spec, step.mesh, state[key].view(-1), entry.lo)
            else:
                raise CheckpointError(f"optimizer state {full} of shape {stored.shape} is not elementwise")
        if state:
            states.append((parameter, state))
    return pieces, states


def _saved_states(manifest: Manifest) -> dict[str, dict[str, str]]:
    """The names of the optimizer's state of each parameter, by its own."""
    saved: dict[str, dict[str, str]] = {}
    for full in (*manifest.tensors, *manifest.record["numbers"]):
        if full.startswith(OPTIMIZER):
            name, key = full.removeprefix(OPTIMIZER).rsplit(".", 1)
            saved.setdefault(name, {})[key] = full
    return saved


def _names(step: Step) -> set[str]:
    """All names of this rank's parameters and buffers. Tensors without elements are in no checkpoint."""
    names = set()
    for part in step.parts:
        for _, entry in part.entries():
            names |= {*part.names(entry.slot)}
        names |= {buffer_name for name, spec, _ in part.model.buffer_slots() for buffer_name in (name, *spec.aliases)}
    return names


def _required(step: Step) -> Iterator[tuple[tuple[str, ...], Param]]:
    for part in step.parts:
        for _, entry in part.entries():
            slot = entry.slot
            yield part.names(slot), slot.spec
        for name, spec, _ in part.model.buffer_slots():
            if spec.persistent:
                yield (name, *spec.aliases), spec


def _require_same_names(manifest: Manifest, names: set[str]) -> None:
    """Raises CheckpointError for what the program lacks; what the checkpoint lacks each rank knows for itself."""
    stored = {name for name in manifest.tensors if not name.startswith((OPTIMIZER, NON_PERSISTENT))}
    if strange := sorted(stored - names):
        some = ", ".join(strange[:5]) + (f" and {len(strange) - 5} more" if len(strange) > 5 else "")
        raise CheckpointError(f"the checkpoint is of another model: the program has no {some}")


def _require_same_shapes(step: Step, manifest: Manifest) -> None:
    for names, spec in _required(step):
        stored_names = [name for name in names if name in manifest.tensors]
        if not stored_names and torch.Size(spec.shape).numel():
            raise CheckpointError(f"the checkpoint has no {names[0]}")
        for name in stored_names:
            files.require_shape(name, manifest.tensors[name], spec.shape)


def _stored_name(entry: Entry, manifest: Manifest) -> str:
    """A tied parameter may have been saved under another of its names."""
    names = (entry.slot.name, *entry.slot.aliases)
    return next((name for name in names if name in manifest.tensors), names[0])


def _under_stored_name(piece: Piece, step: Step, manifest: Manifest) -> Piece:
    if piece.name in manifest.tensors or piece.name.startswith(NON_PERSISTENT):
        return piece
    for names, _ in _required(step):
        if piece.name in names:
            name = next((candidate for candidate in names if candidate in manifest.tensors), piece.name)
            return Piece(name, piece.global_shape, piece.offsets, piece.value)
    return piece


def _fits(piece: Piece, manifest: Manifest) -> bool:
    """Whether a buffer outside of the state dict is there: a model may make its own, of another length."""
    stored = manifest.tensors.get(piece.name)
    return stored is not None and stored.shape == piece.global_shape


def _model_pieces(step: Step, with_copies: bool) -> Iterator[Piece]:
    """with_copies: also of what an earlier stage of the pipeline has too, on a mesh that may be cut otherwise."""
    for _, entry in _entries(step, with_copies):
        if entry.stored is not None:
            yield from pieces_of(entry.slot.name, entry.slot.spec, step.mesh, entry.stored.detach().view(-1), entry.lo)
    for part in step.parts:
        for name, spec, value in part.model.buffer_slots():
            # Those outside the state dict too, so that a checkpoint is all that a run needs to continue.
            saved_name = name if spec.persistent else NON_PERSISTENT + name
            if with_copies or name not in part.copies:
                yield from pieces_of(saved_name, spec, step.mesh, value.view(-1))


def _entries(step: Step, with_copies: bool) -> Iterator[tuple[Bucket, Entry]]:
    for part in step.parts:
        yield from (entry for entry in part.entries() if with_copies or entry[1].slot.name not in part.copies)


def _optimized(step: Step, with_copies: bool) -> Iterator[tuple[Entry, nn.Parameter]]:
    for bucket, entry in _entries(step, with_copies):
        parameter = step.updated(entry)
        if bucket.key.requires_grad and parameter is not None:
            yield entry, parameter


def _is_scalar(key: str, value: Tensor, entry: Entry) -> bool:
    return key == "step" or (value.ndim == 0 and entry.slot.spec.shape != ())


def _is_whole(parameter: nn.Parameter, entry: Entry) -> bool:
    """Whether the optimizer has all of a parameter, whose state then may have any shape (Adafactor's rows, columns)."""
    spec = entry.slot.spec  # a part with its padding may be as large as the whole without
    return parameter is not entry.stored or (not spec.padding and tuple(parameter.shape) == spec.shape)


def _place_scalars(step: Step) -> None:
    """Step counters live in host memory, unless the optimizer's kernels read them (as in torch's own loading)."""
    for group in step.optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            for parameter in group["params"]:
                state = step.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    state[key] = value.to(parameter.device) if isinstance(value, Tensor) else value
