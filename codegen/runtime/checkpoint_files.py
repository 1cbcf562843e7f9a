"""The files of a checkpoint: tensors as safetensors, and a manifest in JSON that says where each piece of them is.

Reading executes nothing. Every file's size and checksum are in the manifest, whose own checksum is beside it, so that
damage is noticed before anything is loaded. Ranks write different files and read what they need from all of them, so
the same files serve every number of ranks. Whatever one rank cannot do, all ranks raise.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from .boxes import Piece as Piece
from .checkpoint_manifest import FORMAT as FORMAT
from .checkpoint_manifest import MANIFEST as MANIFEST
from .checkpoint_manifest import OLD_FORMAT as OLD_FORMAT
from .checkpoint_manifest import CheckpointError as CheckpointError
from .checkpoint_manifest import Chunk as Chunk
from .checkpoint_manifest import DamagedError as DamagedError
from .checkpoint_manifest import Manifest as Manifest
from .checkpoint_manifest import Stored as Stored
from .checkpoint_manifest import problem_of_file
from .checkpoint_manifest import read_manifest as read_manifest
from .optimizers import settings_of

FILE_BYTES = 256 * 2**20
"""Bytes of one file, about: what is held in host memory at a time."""
_READ_BYTES = 4 * 2**20

T = TypeVar("T")
Gather = Callable[[Any], list[Any]]
"""This rank's object -> those of all ranks, by rank."""


class UnsavableError(CheckpointError):
    """The optimizer keeps what no checkpoint of ours can hold, wherever it lies."""


class DiskError(CheckpointError):
    """The file system does not do what it is asked: there is no room, or no permission."""


def in_unison(gather: Gather, action: Callable[[], T]) -> T:
    """This rank's result; where one rank fails, all raise its error."""
    kinds = (DamagedError, DiskError, UnsavableError, CheckpointError)
    problem: tuple[int, str] | None = None
    try:
        result = action()
    except OSError as error:
        problem = kinds.index(DiskError), f"{error.filename or 'the checkpoint'}: {error.strerror or error}"
    except ValueError as error:
        kind = next((index for index, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds) - 1)
        problem = kind, str(error)
    for problem_of_rank in gather(problem):
        if problem_of_rank is not None:
            raise kinds[problem_of_rank[0]](problem_of_rank[1])
    return result


# Writing --------------------------------------------------------------------------------------------------------------


def write(directory: Path, pieces: Sequence[Piece], record: Mapping[str, Any], rank: int, gather: Gather) -> None:
    """Write pieces into a new folder: boxes that several ranks have, once. record: rank 0's counts. Collective.

    Nothing is a checkpoint until its manifest is there, which comes last. Raises CheckpointError on all ranks.
    """
    mine: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for piece in pieces:
        mine.setdefault((piece.name, piece.offsets), piece)
    sizes_of_ranks = gather({key: piece.value.numel() * piece.value.element_size() for key, piece in mine.items()})
    owners = _owners(sizes_of_ranks)
    todo = [piece for key, piece in mine.items() if owners[key] == rank]
    written = gather(in_unison(gather, lambda: _write_files(directory, rank, todo)))
    in_unison(gather, lambda: _write_manifest(directory, written, record) if rank == 0 else None)


def _owners(sizes_of_ranks: list[dict[Any, int]]) -> dict[Any, int]:
    """Choose the rank that writes each piece: of the ranks that have it, the one with the least to write so far."""
    holders: dict[Any, list[int]] = {}
    for rank, sizes in enumerate(sizes_of_ranks):
        for key in sizes:
            holders.setdefault(key, []).append(rank)
    load, owners = [0] * len(sizes_of_ranks), {}
    for key, ranks in holders.items():
        owner = min(ranks, key=lambda rank: load[rank])
        owners[key] = owner
        load[owner] += sizes_of_ranks[owner][key]
    return owners


def _write_files(directory: Path, rank: int, pieces: list[Piece]) -> list[tuple[str, int, int, list[Any]]]:
    """Writes a rank's files; gives (file, bytes, CRC-32, its chunks) of each."""
    from safetensors.torch import save

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for number, batch in enumerate(_batches(pieces)):
        tensors, chunks = {}, []
        for index, piece in enumerate(batch):
            value = piece.value.detach()
            tensors[str(index)] = (torch.view_as_real(value) if value.is_complex() else value).cpu().contiguous()
            chunk = Chunk("", str(index), piece.offsets, tuple(value.shape))
            chunks.append((piece.name, piece.global_shape, str(value.dtype).removeprefix("torch."), chunk[1:]))
        name, data = f"rank{rank:05d}-{number:05d}.safetensors", save(_without_shared(tensors))
        write_synced(directory / name, data)
        written.append((name, len(data), zlib.crc32(data), chunks))
    return written


def _batches(pieces: list[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        size = piece.value.numel() * piece.value.element_size()
        if batch and num_bytes + size > FILE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(piece)
        num_bytes += size
    if batch:
        yield batch


def _without_shared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors wants each tensor in memory of its own; on a CPU pieces are views of longer lines."""
    return {key: value if _fills_storage(value) else value.clone() for key, value in tensors.items()}


def _fills_storage(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() == value.numel() * value.element_size()


def _write_manifest(directory: Path, written: list[Any], record: Mapping[str, Any]) -> None:
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, tuple[int, int]] = {}
    for of_rank in written:
        for file, num_bytes, checksum, chunks in of_rank:
            files[file] = num_bytes, checksum
            for name, shape, dtype, (key, offsets, sizes) in chunks:
                tensor = tensors.setdefault(name, {"shape": shape, "dtype": dtype, "chunks": []})
                tensor["chunks"].append([file, key, offsets, sizes])
    body = json.dumps({"tensors": tensors, "files": files, "record": record}, separators=(",", ":"))
    head = json.dumps({"format": FORMAT, "sha256": hashlib.sha256(body.encode()).hexdigest()})
    write_synced(directory / MANIFEST, f"{head}\n{body}\n".encode())
    _sync_folder(directory)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file, all of which is on the disk when this returns."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # a full disk's error has no name in it
        raise OSError(error.errno, error.strerror, str(path)) from None


def move(source: Path, target: Path) -> None:
    """Renames a file or folder, which is on the disk under its new name when this returns."""
    source.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading --------------------------------------------------------------------------------------------------------------


def require_intact(directory: Path, manifest: Manifest, rank: int, size: int) -> None:
    """Look through this rank's share of the files. Raises DamagedError."""
    for name in sorted(manifest.files)[rank::size]:
        num_bytes, checksum = manifest.files[name]
        try:
            problem = problem_of_file(directory / name, num_bytes)
            if not problem and _checksum(directory / name) != checksum:
                problem = "differs from its checksum"
        except OSError as error:
            raise DamagedError(f"{directory / name} cannot be read ({error.strerror})") from None
        if problem:
            raise DamagedError(f"{directory / name} {problem}")


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            checksum = zlib.crc32(data, checksum)
    return checksum


def fill(directory: Path, manifest: Manifest, pieces: Sequence[Piece]) -> None:
    """Read every piece in place. Raises CheckpointError for another shape or kind, DamagedError for what is missing."""
    from safetensors import SafetensorError, safe_open

    wanted: dict[str, list[tuple[Piece, Chunk]]] = {}
    for piece in pieces:
        stored = manifest.tensors[piece.name]
        require_shape(piece.name, stored, piece.global_shape)
        if stored.dtype.is_floating_point != piece.value.dtype.is_floating_point:
            raise CheckpointError(f"{piece.name} is {stored.dtype} in the checkpoint, {piece.value.dtype} here")
        count = 0
        for chunk in stored.chunks:
            sizes = [hi - lo for lo, hi in _overlap(piece, chunk)]
            if all(size > 0 for size in sizes):
                wanted.setdefault(chunk.file, []).append((piece, chunk))
                count += torch.Size(sizes).numel()
        if count < piece.value.numel():
            raise DamagedError(f"{directory} lacks a part of {piece.name}")
    for file, reads in wanted.items():
        try:
            with safe_open(directory / file, "pt") as source, torch.no_grad():
                for piece, chunk in reads:
                    _copy(source.get_tensor(chunk.key), piece, chunk)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise DamagedError(f"{directory / file} cannot be read ({error})") from None


def require_shape(name: str, stored: Stored, shape: tuple[int, ...]) -> None:
    """Raises CheckpointError where a stored tensor has another shape than the program's."""
    if stored.shape != shape:
        raise CheckpointError(f"{name} has shape {stored.shape} in the checkpoint, {shape} in the program")


def _overlap(piece: Piece, chunk: Chunk) -> list[tuple[int, int]]:
    """Return the overlap of a piece and a chunk: (from, to) of each dim, in the global tensor."""
    dims = zip(piece.offsets, piece.value.shape, chunk.offsets, chunk.shape, strict=True)
    return [(max(a, b), min(a + n, b + m)) for a, n, b, m in dims]


def _copy(read: Tensor, piece: Piece, chunk: Chunk) -> None:
    value = torch.view_as_complex(read) if piece.value.is_complex() else read
    target = piece.value
    for dim, (lo, hi) in enumerate(_overlap(piece, chunk)):
        value = value.narrow(dim, lo - chunk.offsets[dim], hi - lo)
        target = target.narrow(dim, lo - piece.offsets[dim], hi - lo)
    target.copy_(value)


# Folders --------------------------------------------------------------------------------------------------------------


def holds_only_a_checkpoint(directory: Path) -> bool:
    """Whether nothing would be lost that a checkpoint's writer did not make: no other file, folder or link."""
    if directory.is_symlink() or not directory.is_dir():
        return False
    names = {path.name for path in directory.iterdir() if path.is_file() and not path.is_symlink()}
    if len(names) != sum(1 for _ in directory.iterdir()):
        return False
    try:
        return names <= {MANIFEST, *read_manifest(directory).files}
    except CheckpointError:
        return not names


def remove(directory: Path) -> None:
    """Remove a folder that `holds_only_a_checkpoint`; the manifest first, so that no half of it passes for one."""
    (directory / MANIFEST).unlink(missing_ok=True)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()


# Optimizers -----------------------------------------------------------------------------------------------------------


def optimizer_record(optimizer: torch.optim.Optimizer, initial: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry of an optimizer in a manifest. initial: its settings when it was made."""
    bases = type(optimizer).__mro__[: type(optimizer).__mro__.index(torch.optim.Optimizer)]
    return {"kinds": [base.__name__ for base in bases], "initial": initial, "groups": settings_of(optimizer)}


def require_same_optimizer(optimizer: torch.optim.Optimizer, record: Mapping[str, Any]) -> None:
    """Raises CheckpointError where another optimizer's state was saved: it would mean nothing to this one."""
    bases = type(optimizer).__mro__[: type(optimizer).__mro__.index(torch.optim.Optimizer)]
    mine, saved = {base.__name__ for base in bases}, record["optimizer"]
    if not mine & set(saved["kinds"]):
        raise CheckpointError(
            f"the checkpoint is {saved['kinds'][0]}'s, and the optimizer is {type(optimizer).__name__}"
        )
    if len(saved["groups"]) != len(optimizer.param_groups):
        count = len(optimizer.param_groups)
        raise CheckpointError(f"the optimizer has {len(saved['groups'])} groups in the checkpoint, {count} now")
    for now, first, last in zip(settings_of(optimizer), saved["initial"], saved["groups"], strict=True):
        for key, value in now.items():
            stored = [settings[key] for settings in (first, last) if key in settings]
            is_set = any(setting is not None for setting in stored)
            if is_set and not all(_is_like(setting, value) for setting in stored):
                raise CheckpointError(
                    f"{key} of the optimizer is {stored[-1]!r:.80} in the checkpoint, and {value!r:.80} now"
                )


def _is_like(stored: Any, now: Any) -> bool:
    """Return whether a stored setting can take the place of the optimizer's: a finite number that of a number."""
    if isinstance(now, (list, tuple)):
        is_list = isinstance(stored, (list, tuple)) and len(stored) == len(now)
        return is_list and all(
            stored_item is None or _is_like(stored_item, item) for stored_item, item in zip(stored, now, strict=True)
        )
    if now is None:
        return stored is None or isinstance(stored, (bool, int, float, str))
    if isinstance(now, bool):
        return stored is None or isinstance(stored, bool)
    if isinstance(now, (int, float)):
        is_number = isinstance(stored, (int, float)) and not isinstance(stored, bool)
        return is_number and (abs(stored) <= sys.float_info.max or stored == now)
    return type(stored) is type(now)


def continue_settings(
    optimizer: torch.optim.Optimizer, initial: list[dict[str, Any]], record: Mapping[str, Any]
) -> None:
    """Set what training itself had changed (a schedule's rate, a counter); what the user has changed since, stays.

    initial: the new optimizer's settings. What was not changed by training is as the new optimizer's factory says, but
    for what a schedule has set when it was made: that of its first step, where the saved one is another.
    """
    saved, now = record["optimizer"], settings_of(optimizer)
    groups = zip(optimizer.param_groups, now, initial, saved["initial"], saved["groups"], strict=True)
    for group, group_before, new, first, last in groups:
        is_scheduled = "initial_lr" in group  # torch's schedules say so
        for key, value in last.items():
            is_known = key in new and key in first
            is_trained = is_known and first[key] != value and new[key] == first[key]
            if is_trained or (is_known and is_scheduled and group_before[key] != new[key]):
                current = group[key]
                if isinstance(current, Tensor):
                    current.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(current, tuple) else value
