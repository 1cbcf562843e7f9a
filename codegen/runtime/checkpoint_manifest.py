"""The manifest of a checkpoint: which file has which piece of each tensor.

A manifest is checked before anything else is read or allocated. It names regular files of its own folder only, each
with its size and checksum. Its tensors have no more elements than these files can hold.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

MANIFEST = "manifest.json"
OLD_FORMAT = ".metadata"
"""A file of every checkpoint in torch.distributed.checkpoint's format, which is pickled."""
FORMAT = "autopar checkpoint 1"
MOST_BYTES = 2**29
"""The largest manifest that is read, in bytes: some three million pieces of tensors."""
LARGEST_NUMBER = 2**63 - 1


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or is not this program's."""


class DamagedError(CheckpointError):
    """A checkpoint is not as it was written."""


class Chunk(NamedTuple):
    """The place of a box of a tensor."""

    file: str
    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a checkpoint. files: name -> (bytes, CRC-32). record: JSON that the writer noted."""

    tensors: Mapping[str, Stored]
    files: Mapping[str, tuple[int, int]]
    record: Mapping[str, Any] = field(default_factory=dict)


def is_file_name(name: object) -> bool:
    """Return whether `name` is the bare name of a file: no path, no control characters."""
    return isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name and name.isprintable()


def problem_of_file(path: Path, num_bytes: int | None = None) -> str:
    """Return why `path` is not a regular file of `num_bytes` bytes; "" if it is one. Links are not followed.

    Raises OSError where the file cannot be found.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return "is a link" if stat.S_ISLNK(status.st_mode) else "is not a regular file"
    if num_bytes is not None and status.st_size != num_bytes:
        return f"has {status.st_size} bytes instead of {num_bytes}"
    return ""


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises DamagedError where the manifest is not as it was written, and CheckpointError for another format.
    """
    if (directory / OLD_FORMAT).exists():
        raise CheckpointError(
            f"{directory} is in torch.distributed.checkpoint's format, which an older autopar wrote; loading it can "
            "execute code, so it is not read: train anew in another folder, or convert it with that autopar"
        )
    path = directory / MANIFEST
    try:
        if problem := problem_of_file(path):
            raise DamagedError(f"{path} {problem}")
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise DamagedError(f"{directory} has no {MANIFEST} that can be read ({error.strerror})") from None
    if len(data) > MOST_BYTES:
        raise DamagedError(f"{path} is damaged: it has more than {MOST_BYTES} bytes")
    try:
        head_line, body, rest = data.decode().split("\n")
        head = json.loads(head_line)
        is_known = head["format"] == FORMAT
        is_intact = head["sha256"] == hashlib.sha256(body.encode()).hexdigest() and not rest
        manifest = _parse(json.loads(body)) if is_known and is_intact else None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise DamagedError(f"{path} is damaged ({reason})") from None
    if manifest is None:
        raise DamagedError(f"{path} is damaged: its checksum or format differs")
    return manifest


def _parse(body: Any) -> Manifest:
    """Return the manifest that a JSON object describes. Raises ValueError, among others, for one that is illegal."""
    files: dict[str, tuple[int, int]] = {}
    for name, (num_bytes, checksum) in body["files"].items():
        if not is_file_name(name):
            raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")
        files[name] = _number(num_bytes), _number(checksum, 2**32 - 1)
    tensors = {name: _stored(name, entry) for name, entry in body["tensors"].items()}
    _require_room(tensors, files)
    record = body["record"]
    for name in ("step", "num_samples", "seed"):
        _number(record["progress"][name])
    scale = record["progress"].get("loss_scale", {"value": 1.0, "num_good": 0})
    _number(scale["num_good"])
    if not 0 < float(scale["value"]) < math.inf:
        raise ValueError("its loss scale is no number above 0")
    optimizer = record["optimizer"]
    if not optimizer["kinds"] or len(optimizer["initial"]) != len(optimizer["groups"]):
        raise ValueError("its optimizer's groups differ in number")
    record = {"numbers": {}, "notes": {}, **record}
    _require_types("optimizer's classes", optimizer["kinds"], list, str)
    for groups in (optimizer["initial"], optimizer["groups"]):
        _require_types("optimizer's groups", groups, list, dict)
    _require_types("numbers", record["numbers"], dict, (bool, int, float))
    _require_types("notes", record["notes"], dict, str)
    return Manifest(tensors, files, record)


def _require_types(what: str, values: Any, outer: type, inner: type | tuple[type, ...]) -> None:
    """Raise ValueError unless `values` is a list or dict (`outer`) of values of the type `inner`."""
    items = values.values() if isinstance(values, dict) else values
    if not isinstance(values, outer) or not all(isinstance(item, inner) for item in items):
        raise ValueError(f"its {what} are of another type")


def _stored(name: str, entry: Any) -> Stored:
    dtype = getattr(torch, entry["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is not a dtype")
    shape = _sizes(entry["shape"])
    chunks = tuple(Chunk(file, key, _sizes(offsets), _sizes(size)) for file, key, offsets, size in entry["chunks"])
    for chunk in chunks:
        ends = [at + size for at, size in zip(chunk.offsets, chunk.shape, strict=True)]
        if any(end > size for end, size in zip(ends, shape, strict=True)):
            raise ValueError(f"a piece of {name!r} lies outside of the tensor")
    return Stored(shape, dtype, chunks)


def _require_room(tensors: Mapping[str, Stored], files: Mapping[str, tuple[int, int]]) -> None:
    """Raise ValueError for pieces in files that are not listed, and for more elements than the files have bytes for."""
    room = {name: num_bytes for name, (num_bytes, _) in files.items()}
    read: set[tuple[str, str]] = set()
    for name, stored in tensors.items():
        num_elements = 0
        for chunk in stored.chunks:
            if chunk.file not in room:
                raise ValueError(f"{name!r} is in {chunk.file!r}, which is not among the checkpoint's files")
            if (chunk.file, chunk.key) in read:
                raise ValueError(f"two pieces are at {chunk.key!r} of {chunk.file!r}")
            read.add((chunk.file, chunk.key))
            num_elements += math.prod(chunk.shape)
            room[chunk.file] -= math.prod(chunk.shape) * stored.dtype.itemsize
            if room[chunk.file] < 0:
                raise ValueError(f"{chunk.file!r} is smaller than the pieces in it")
        if num_elements < math.prod(stored.shape):
            raise ValueError(
                f"{name!r} has {math.prod(stored.shape)} elements, and the files have {num_elements} of them"
            )


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(_number(value) for value in values)


def _number(value: Any, most: int = LARGEST_NUMBER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a whole number from 0 to {most}")
    return value
