"""Initial values in safetensors files: each rank reads its own part of each tensor, and never a whole file.

Files are mapped for one block at a time, so that what was read does not stay in the memory of the process.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint_manifest import is_file_name

BLOCK_BYTES = 64 * 2**20
"""What is mapped at a time, about."""

INDEX = ".safetensors.index.json"
"""The end of the name of a file that says which of several files has which tensor ("weight_map")."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""The dtypes that are read and written, by their names in the files."""


class WeightFileError(ValueError):
    """Weights cannot be read."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file under `key`."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """All of it, on the CPU, in memory of its own."""
        value = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill((0,) * len(self.shape), value)
        return value

    def fill(self, offsets: tuple[int, ...], target: Tensor) -> None:
        """Copy the box of target's shape at `offsets` into target, in its dtype. Raises WeightFileError."""
        dim = next((dim for dim, size in enumerate(target.shape) if size > 1), None)
        num_bytes = target.numel() * self.dtype.itemsize
        if dim is None or num_bytes <= BLOCK_BYTES:
            self._copy(offsets, target)
            return
        size = target.shape[dim]
        length = max(1, BLOCK_BYTES * size // num_bytes)
        for lo in range(0, size, length):
            at = (*offsets[:dim], offsets[dim] + lo, *offsets[dim + 1 :])
            self.fill(at, target.narrow(dim, lo, min(length, size - lo)))

    def _copy(self, offsets: tuple[int, ...], target: Tensor) -> None:
        from safetensors import SafetensorError, safe_open

        if not target.numel():
            return
        try:
            with safe_open(self.file, "pt") as file, torch.no_grad():
                if not offsets:
                    target.copy_(file.get_tensor(self.key))
                else:
                    ends = zip(offsets, target.shape, strict=True)
                    target.copy_(file.get_slice(self.key)[tuple(slice(at, at + size) for at, size in ends)])
        except (SafetensorError, OSError) as error:
            raise WeightFileError(f"{self.file} cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """`name -> whole tensor`, for `Step.load`, which reads this rank's boxes of what `stored` gives instead."""

    tensors: Mapping[str, StoredTensor]

    def __call__(self, name: str) -> Tensor:
        """Raises WeightFileError for a name that is in no file."""
        if name not in self.tensors:
            raise WeightFileError(f"no file has {name}")
        return self.tensors[name].whole()

    def stored(self, name: str) -> StoredTensor | None:
        """Return the place of a tensor, if it is in a file."""
        return self.tensors.get(name)


def tensors_of(files: Iterable[Path]) -> dict[str, StoredTensor]:
    """Return the tensors of safetensors files, from their headers. Raises WeightFileError."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, StoredTensor] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - no mapping
                    part = file.get_slice(key)
                    kind = part.get_dtype()
                    if kind not in DTYPES:
                        raise WeightFileError(f"{path} has {key} in {kind}, which is not read")
                    tensors[key] = StoredTensor(str(path), key, tuple(part.get_shape()), DTYPES[kind])
        except (SafetensorError, OSError) as error:
            raise WeightFileError(f"{path} cannot be read ({error})") from None
    return tensors


def files_of(folder: Path, stem: str) -> list[Path]:
    """`stem.safetensors`, or else the files that `stem.safetensors.index.json` names; none where there is neither.

    Raises WeightFileError for an index that cannot be read or that names a file elsewhere.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}{INDEX}"
    if single.is_file():
        return [single]
    if not index.is_file():
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise WeightFileError(f"{index} cannot be read ({type(error).__name__}: {error})") from None
    if strange := [name for name in names if not is_file_name(name)]:
        raise WeightFileError(f"{index} names a file outside of its folder: {strange[0]!r}")
    return [folder / name for name in names]


def stored_weights(folder: Path, stem: str = "weights") -> StoredWeights:
    """The weights of a folder. Raises WeightFileError where there are none."""
    files = files_of(folder, stem)
    if not files:
        raise WeightFileError(f"{folder / stem}.safetensors is missing")
    return StoredWeights(tensors_of(files))
