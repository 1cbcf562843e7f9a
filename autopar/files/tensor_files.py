"""Writing safetensors files tensor by tensor, with only one tensor in memory."""

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
"""Bytes of tensors in one file; a larger tensor gets its own file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor before it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFiles:
    """A context that writes each tensor of `specs` once, in any order, cast to its dtype.

    The files are `stem.safetensors`, or several of about `most_bytes` with an index, named as Hugging Face does:
    `stem-00001-of-00003.safetensors`, `stem.safetensors.index.json`. Raises OutputError for a dtype that safetensors
    lacks, a tensor that is not in `specs` or has another shape, and at the end for a tensor that was not written.
    """

    def __init__(self, folder: Path, stem: str, specs: Mapping[str, TensorSpec], most_bytes: int) -> None:
        self.folder, self.stem, self.specs = folder, stem, dict(specs)
        if unknown := sorted({str(spec.dtype) for spec in specs.values() if spec.dtype not in _NAMES}):
            raise OutputError(
                "safetensors has no such dtype",
                values=", ".join(unknown),
                alternatives="--dtype fp32, bf16 or fp16 (in Python dtype=...)",
            )
        groups = _groups(self.specs, most_bytes)
        names = [stem] if len(groups) < 2 else [f"{stem}-{n + 1:05d}-of-{len(groups):05d}" for n in range(len(groups))]
        self.files = dict(zip((f"{name}.safetensors" for name in names), groups or [[]], strict=True))
        self._places: dict[str, tuple[IO[bytes], int]] = {}
        self._missing = set(self.specs)
        self._stack = ExitStack()

    def __enter__(self) -> TensorFiles:
        """Create the files with their headers."""
        for file, names in self.files.items():
            stream = self._stack.enter_context((self.folder / file).open("wb"))
            header, starts = _header(names, self.specs)
            stream.write(header)
            self._places |= {name: (stream, len(header) + start) for name, start in starts.items()}
        if len(self.files) > 1:
            file_of = {name: file for file, names in self.files.items() for name in names}
            total = sum(spec.num_bytes for spec in self.specs.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            (self.folder / f"{self.stem}{INDEX}").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return self

    def write(self, name: str, value: Tensor) -> None:
        """Write one tensor from any device."""
        spec = self.specs.get(name)
        if spec is None or tuple(value.shape) != spec.shape:
            wanted = "it was not announced" if spec is None else f"announced with shape {list(spec.shape)}"
            raise OutputError(f"a tensor cannot be written: {name}", values=f"shape {list(value.shape)}, {wanted}")
        stream, position = self._places[name]
        stream.seek(position)
        on_cpu = value.detach().to("cpu", spec.dtype).contiguous()
        # Views, which do not copy the tensor's memory.
        if on_cpu.numel():
            on_cpu.view(-1).view(torch.uint8).numpy().tofile(stream)
        self._missing.discard(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and self._missing:
            missing = sorted(self._missing)
            raise OutputError("some tensors were not written", values=", ".join(missing[:5]))


def _groups(specs: Mapping[str, TensorSpec], most_bytes: int) -> list[list[str]]:
    """Return the names of each file, in order."""
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
    """Return a file's header, and each tensor's start after it. Larger elements come first, so that all are aligned."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, start = {}, 0
    for name in sorted(names, key=lambda name: -specs[name].dtype.itemsize):
        spec = specs[name]
        starts[name] = start
        ends = [start, start + spec.num_bytes]
        fields[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": ends}
        start = ends[1]
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts
