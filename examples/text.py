"""Bytes of the Python standard library's own source as a language-modeling corpus: real text on every machine.

A sample is a window of bytes, and its place in the stream is one global counter. Sample `i` depends on the seed and
`i` alone, not on the batch size or on how often training was stopped: resume with `start=` the samples seen so far.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

VOCAB_SIZE = 256
# Every tenth file validates, so that both splits draw from the whole alphabet of packages.
VALIDATION_EVERY = 10
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """A text as bytes. tokens: uint8 [num_bytes]."""

    tokens: npt.NDArray[np.uint8]

    def num_windows(self, seq_len: int) -> int:
        """Windows of `seq_len` bytes per epoch, without overlap. Raises ValueError if there is none."""
        count = len(self.tokens) // seq_len
        if seq_len < 1 or count < 1:
            raise ValueError(f"a text of {len(self.tokens)} bytes has no window of {seq_len}")
        return count

    def batches(self, batch_size: int, seq_len: int, seed: int = 0, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Endless batches of samples `start`, `start + 1`, ...; each epoch is a new permutation of all windows.

        Yields input_ids and labels, both int64 [batch_size, seq_len] and equal: a causal language model shifts them
        itself, as transformers' do.
        """
        num_windows = self.num_windows(seq_len)
        windows = self.tokens[: num_windows * seq_len].reshape(num_windows, seq_len)
        epoch, order = -1, np.empty(0, dtype=np.int64)
        while True:
            rows = np.empty((batch_size, seq_len), dtype=np.int64)
            for row, sample in enumerate(range(start, start + batch_size)):
                if sample // num_windows != epoch:
                    epoch = sample // num_windows
                    order = np.random.default_rng((seed, epoch)).permutation(num_windows)
                rows[row] = windows[order[sample % num_windows]]
            start += batch_size
            tokens = torch.from_numpy(rows)
            yield {"input_ids": tokens, "labels": tokens.clone()}


def standard_library(split: str = "train", max_bytes: int | None = None, folder: Path | None = None) -> Corpus:
    """Return the source of the running Python's standard library, files joined in the order of their paths.

    split: "train" or "validation". max_bytes: stop after that many. folder: other sources than the library's.
    Raises ValueError for another split, FileNotFoundError when the folder has no source.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is 'train' or 'validation', got {split!r}")
    home = folder or Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    num_bytes = 0
    for index, path in enumerate(_sources(home)):
        if (index % VALIDATION_EVERY == VALIDATION_EVERY - 1) != (split == "validation"):
            continue
        parts.append(path.read_bytes())
        num_bytes += len(parts[-1])
        if max_bytes is not None and num_bytes >= max_bytes:
            break
    if not parts:
        raise FileNotFoundError(f"no Python source for split {split!r} in {home}")
    return Corpus(np.frombuffer(b"".join(parts)[:max_bytes], dtype=np.uint8))


def _sources(home: Path) -> list[Path]:
    """Return every .py file below `home`, except tests and installed packages, ordered by its path's parts."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(home):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(home).parts)
