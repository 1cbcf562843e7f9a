"""Sharded checkpoints that load under any mesh, ZeRO stage and number of ranks.

torch.distributed.checkpoint (DCP) files hold every tensor under the user's own name with its global shape: parameters
(`model.embed.weight`), buffers, and the optimiser's state (`optimizer.model.embed.weight.exp_avg`). A rank
writes and reads the boxes of the global tensor that it stores; DCP writes replicated boxes once and finds the overlaps
on loading. A flat slice of a sharded parameter is a handful of boxes (`pieces_of`). The planners at the end are the
only code that knows DCP's extension points; they were run with torch 2.13.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .flat import Bucket, Entry
from .mesh import Mesh
from .parameters import Param, runs
from .step import Step

_OPTIMIZER = "optimizer."
_NON_PERSISTENT = "non-persistent."
_GROUPS = "optimizer groups"
_PROGRESS = "progress"


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A box of the global tensor `name` that this rank stores: `value` (a view of the stored memory) at `offsets`."""

    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    value: Tensor


def save(step: Step, directory: str | Path) -> None:
    """Write parameters, buffers, optimiser state, step counter, data position and seed. Collective.

    The folder is complete or absent: it is written beside its place and renamed, after an older one has been moved
    aside; a crash between the two leaves the older one where `load` finds it.
    """
    final = Path(directory)
    fresh, old = final.with_name(f".{final.name}.partial"), _moved_aside(final)
    if step.mesh.everyone.rank == 0:
        shutil.rmtree(fresh, ignore_errors=True)
    _wait(step)
    _write(step, fresh)
    _wait(step)
    if step.mesh.everyone.rank == 0:
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        fresh.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    _wait(step)


def _moved_aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.old")


def _wait(step: Step) -> None:
    if step.mesh.everyone.size > 1:
        dist.barrier(step.mesh.everyone.group)


def _write(step: Step, directory: Path) -> None:
    pieces = list(_model_pieces(step, with_copies=False))
    plain: dict[str, Any] = {}
    for entry, parameter in _optimized(step, with_copies=False):
        for key, value in step.optimizer.state.get(parameter, {}).items():
            name = f"{_OPTIMIZER}{entry.slot.name}.{key}"
            if not isinstance(value, Tensor):
                raise ValueError(f"optimiser state {name} is no tensor but {type(value).__name__}; it cannot be saved")
            if _is_scalar(key, value, entry):
                plain[name] = value
            elif value.numel() == entry.hi - entry.lo:
                pieces += pieces_of(name, entry.slot.spec, step.mesh, value.view(-1), entry.lo)
            else:
                raise ValueError(f"optimiser state {name} of shape {tuple(value.shape)} is not elementwise")
    groups = [{k: v for k, v in group.items() if k != "params"} for group in step.optimizer.param_groups]
    plain[_GROUPS] = groups
    plain[_PROGRESS] = {"step": step.rng.step, "num_samples": step.num_samples, "seed": step.rng.seed}
    state_dict_saver.save(plain, checkpoint_id=directory, planner=_PieceSaver(pieces))


def load(step: Step, directory: str | Path) -> None:
    """Continue from what `save` wrote, under this step's own mesh, ZeRO stage and precision. Collective.

    Raises KeyError if the checkpoint lacks a tensor of the model, ValueError if one has another shape.
    """
    directory = Path(directory)
    if not directory.exists() and _moved_aside(directory).exists():
        directory = _moved_aside(directory)
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    pieces = list(_model_pieces(step, with_copies=True))
    plain: dict[str, Any] = {_GROUPS: None, _PROGRESS: None}
    copies: list[tuple[Tensor, Tensor]] = []
    step.optimizer.state.clear()
    saved = _saved_optimizer_state(metadata)
    for entry, parameter in _optimized(step, with_copies=True):
        state: dict[str, Tensor] = {}
        for key, stored in saved.get(entry.slot.name, {}).items():
            name = f"{_OPTIMIZER}{entry.slot.name}.{key}"
            if key != "step" and tuple(stored.size) == entry.slot.spec.shape:
                state[key] = torch.zeros_like(parameter, dtype=stored.properties.dtype, requires_grad=False)
                pieces += pieces_of(name, entry.slot.spec, step.mesh, state[key].view(-1), entry.lo)
            else:
                # Changed in place by the reader.
                state[key] = torch.zeros(stored.size, dtype=stored.properties.dtype)
                if plain.setdefault(name, state[key]) is not state[key]:
                    copies.append((plain[name], state[key]))
        if state:
            step.optimizer.state[parameter] = state
    _check(pieces, metadata)
    loader = _PieceLoader(pieces)
    state_dict_loader.load(plain, checkpoint_id=directory, planner=loader)
    for read, copy in (*loader.copies, *copies):
        copy.copy_(read)
    for group, values in zip(step.optimizer.param_groups, plain[_GROUPS], strict=True):
        group.update(values)
    _place_scalars(step)
    progress = plain[_PROGRESS]
    step.rng.step, step.num_samples, step.rng.seed = progress["step"], progress["num_samples"], progress["seed"]
    for part in step.parts:
        part.zero.publish()


def pieces_of(name: str, spec: Param, mesh: Mesh, values: Tensor, start: int = 0) -> list[Piece]:
    """Elements start, start + 1, ... of this rank's flattened local tensor, as boxes of the global one."""
    local, stop = spec.local_shape(mesh), start + values.numel()
    held = [runs(dim, spec, mesh) for dim in range(len(local))]
    pieces = []
    for first, offsets, sizes in _boxes(local, start, stop):
        box = values[first - start : first - start + math.prod(sizes)].view(sizes)
        for cut in itertools.product(*(_cuts(*each) for each in zip(held, offsets, sizes, strict=True))):
            value = box
            for dim, (begin, _, length) in enumerate(cut):
                value = value.narrow(dim, begin, length)
            pieces.append(Piece(name, spec.shape, tuple(at for _, at, _ in cut), value))
    return pieces


def _boxes(
    shape: tuple[int, ...], start: int, stop: int, before: int = 0
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(flat start, offsets, sizes) of the fewest boxes that make up elements start to stop of a row-major tensor."""
    if stop <= start:
        return
    if not shape:
        yield before, (), ()
        return
    row = math.prod(shape[1:])
    full_from, full_to = -(-start // row), stop // row
    if full_from < full_to:
        parts = [(start, full_from * row), (full_to * row, stop)]
    elif full_from == full_to:
        parts = [(start, full_from * row), (full_from * row, stop)]
    else:
        parts = [(start, stop)]
    for index, (lo, hi) in enumerate(parts):
        if index == 1 and full_from < full_to:
            offsets = (full_from, *(0 for _ in shape[1:]))
            yield before + full_from * row, offsets, (full_to - full_from, *shape[1:])
        at = lo // row
        for first, offsets, sizes in _boxes(shape[1:], lo - at * row, hi - at * row, before + at * row):
            yield first, (at, *offsets), (1, *sizes)


def _cuts(held: list[tuple[int, int, int]], offset: int, size: int) -> list[tuple[int, int, int]]:
    """(start in the box, global start, length) of the runs within offset to offset + size."""
    found = []
    for local, at, length in held:
        lo, hi = max(local, offset), min(local + length, offset + size)
        if lo < hi:
            found.append((lo - offset, at + lo - local, hi - lo))
    return found


def _model_pieces(step: Step, with_copies: bool) -> Iterator[Piece]:
    """with_copies: also of what an earlier stage of the pipeline has too, on a mesh that may be cut otherwise."""
    for _, entry in _entries(step, with_copies):
        if entry.stored is not None:
            yield from pieces_of(entry.slot.name, entry.slot.spec, step.mesh, entry.stored.detach().view(-1), entry.lo)
    for part in step.parts:
        for name, spec, value in part.model.buffer_slots():
            # Those outside the state dict too, so that a checkpoint is all that a run needs to continue.
            saved_name = name if spec.persistent else _NON_PERSISTENT + name
            if with_copies or name not in part.tied.copies:
                yield from pieces_of(saved_name, spec, step.mesh, value.view(-1))


def _entries(step: Step, with_copies: bool) -> Iterator[tuple[Bucket, Entry]]:
    for part in step.parts:
        yield from (each for each in part.entries() if with_copies or each[1].slot.name not in part.tied.copies)


def _optimized(step: Step, with_copies: bool) -> Iterator[tuple[Entry, nn.Parameter]]:
    for bucket, entry in _entries(step, with_copies):
        if bucket.key.requires_grad and entry.stored is not None:
            yield entry, entry.stored


def _is_scalar(key: str, value: Tensor, entry: Entry) -> bool:
    return key == "step" or (value.ndim == 0 and entry.slot.spec.shape != ())


def _saved_optimizer_state(metadata: Mapping[str, Any]) -> dict[str, dict[str, TensorStorageMetadata]]:
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for full, stored in metadata.items():
        if full.startswith(_OPTIMIZER) and isinstance(stored, TensorStorageMetadata):
            name, key = full.removeprefix(_OPTIMIZER).rsplit(".", 1)
            found.setdefault(name, {})[key] = stored
    return found


def _place_scalars(step: Step) -> None:
    """Step counters live in host memory, unless the optimiser's kernels read them (as in torch's own loading)."""
    for group in step.optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            for parameter in group["params"]:
                state = step.optimizer.state.get(parameter, {})
                for key, value in state.items():
                    state[key] = value.to(parameter.device)


def _check(pieces: list[Piece], metadata: Mapping[str, Any]) -> None:
    for piece in pieces:
        stored = metadata.get(piece.name)
        if stored is None:
            raise KeyError(f"the checkpoint has no {piece.name}")
        if tuple(stored.size) != piece.global_shape:
            raise ValueError(
                f"{piece.name} has shape {tuple(stored.size)} in the checkpoint, {piece.global_shape} in the program"
            )


def _keyed(pieces: list[Piece]) -> dict[tuple[str, tuple[int, ...]], Piece]:
    """One of each; tied stages on one rank have equal ones."""
    found: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for piece in pieces:
        found.setdefault((piece.name, piece.offsets), piece)
    return found


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.value.shape)


class _PieceSaver(DefaultSavePlanner):
    """Writes pieces besides what DCP understands by itself."""

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = _keyed(pieces)

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                index=MetadataIndex(piece.name, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(piece),
                    properties=TensorProperties.create_from_tensor(piece.value),
                    size=torch.Size(piece.global_shape),
                ),
            )
            for piece in self._pieces.values()
        ]
        plan = super().create_local_plan()
        self.plan = dataclasses.replace(plan, items=[*plan.items, *items])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self._pieces.get((index.fqn, tuple(index.offset or ())))
        return super().lookup_object(index) if found is None else found.value


class _PieceLoader(DefaultLoadPlanner):
    """Reads pieces in place besides what DCP understands by itself.

    copies: (what is read, what must be set to it).
    """

    def __init__(self, pieces: list[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = _keyed(pieces)
        read = ((self._pieces[piece.name, piece.offsets].value, piece.value) for piece in pieces)
        self.copies = [(first, value) for first, value in read if first is not value]

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        for name, pieces in itertools.groupby(self._pieces.values(), key=lambda piece: piece.name):
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            plan.items.extend(create_read_items_for_chunk_list(name, stored, [_chunk(piece) for piece in pieces]))
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self._pieces.get((index.fqn, tuple(index.offset or ())))
        return super().lookup_tensor(index) if found is None else found.value
