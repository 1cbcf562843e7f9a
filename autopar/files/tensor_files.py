"""Writing safetensors files tensor by tensor, so that no more than one is in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor

from autopar.errors import OutputError
from codegen.runtime.weight_files import DTYPES, INDEX

MOST_BYTES = 5 * 10**9
"""Bytes of tensors in one file; a larger tensor has a file of its own."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a tensor before it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFiles:
    """A context in which each of the tensors in `specs` is written once, in any order, cast to its dtype.

    The files are `stem.safetensors`, or several of about `most_bytes` with an index as Hugging Face names them:
    `stem-00001-of-00003.safetensors`, `stem.safetensors.index.json`. Raises OutputError for a dtype that safetensors
    has not, a tensor that is not in `specs` or has another shape, and at the end for one that was not written.
    """

    def __init__(self, folder: Path, stem: str, specs: Mapping[str, TensorSpec], most_bytes: int) -> None:
        self.folder, self.stem, self.specs = folder, stem, dict(specs)
        if unknown := sorted({str(spec.dtype) for spec in specs.values() if spec.dtype not in _NAMES}):
            raise OutputError("safetensors files cannot hold these tensors", values=", ".join(unknown))
        groups = _groups(self.specs, most_bytes)
        names = [stem] if len(groups) < 2 else [f"{stem}-{n + 1:05d}-of-{len(groups):05d}" for n in range(len(groups))]
        self.files = dict(zip((f"{name}.safetensors" for name in names), groups or [[]], strict=True))
        self._places: dict[str, tuple[IO[bytes], int]] = {}
        self._missing = set(self.specs)
        self._stack = ExitStack()

    def __enter__(self) -> TensorFiles:
        """Make the files with their headers."""
        for file, names in self.files.items():
            stream = self._stack.enter_context((self.folder / file).open("wb"))
            header, starts = _header(names, self.specs)
            stream.write(header)
            self._places |= {name: (stream, len(header) + start) for name, start in starts.items()}
        if len(self.files) > 1:
            held = {name: file for file, names in self.files.items() for name in names}
            total = sum(spec.num_bytes for spec in self.specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(held.items()))}
            (self.folder / f"{self.stem}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self

    def write(self, name: str, value: Tensor) -> None:
        """Write one tensor, wherever it lies."""
        spec = self.specs.get(name)
        if spec is None or tuple(value.shape) != spec.shape:
            wanted = "it was not announced" if spec is None else f"announced with shape {list(spec.shape)}"
            raise OutputError(f"a tensor cannot be written: {name}", values=f"shape {list(value.shape)}, {wanted}")
        stream, at = self._places[name]
        stream.seek(at)
        whole = value.detach().to("cpu", spec.dtype).contiguous()
        # Views: of a tensor's memory no second copy is made.
        if whole.numel():
            whole.view(-1).view(torch.uint8).numpy().tofile(stream)
        self._missing.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and self._missing:
            missing = sorted(self._missing)
            raise OutputError("tensors are missing from what was to be written", values=", ".join(missing[:5]))


def _groups(specs: Mapping[str, TensorSpec], most_bytes: int) -> list[list[str]]:
    """The names of each file, in their order."""
    groups: list[list[str]] = []
    room = 0
    for name, spec in specs.items():
        if not groups or spec.num_bytes > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(name)
        room -= spec.num_bytes
    return groups


def _header(names: Iterable[str], specs: Mapping[str, TensorSpec]) -> tuple[bytes, dict[str, int]]:
    """A file's head, and where each tensor starts after it: those of larger elements first, so that all are aligned."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    for name in sorted(names, key=lambda name: -specs[name].dtype.itemsize):
        spec = specs[name]
        starts[name] = at
        ends = [at, at + spec.num_bytes]
        fields[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        at = ends[1]
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts
