"""A file read as bytes, for language models: the simplest data there is, and enough to see a loss fall."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from autopar.errors import ModelError


@dataclass(frozen=True, slots=True)
class ByteText:
    """`ByteText(path, batch_size, seq_len)(start)` yields batches from sample `start` on, without end.

    Sample i is a window of seq_len bytes at a place that depends on the seed and on i alone, so that training resumes
    where it stopped, under any plan. Batches hold input_ids and labels, both int64 [batch_size, seq_len] and equal.
    """

    path: Path
    batch_size: int
    seq_len: int
    seed: int = 0

    def __call__(self, start: int) -> Iterator[dict[str, Tensor]]:
        """Raises ModelError for a file that cannot be read or is shorter than a window."""
        try:
            text = torch.frombuffer(bytearray(self.path.read_bytes() or b"\0"), dtype=torch.uint8)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}", values=error.strerror) from None
        num_places = len(text) - self.seq_len + 1
        if num_places < 1:
            raise ModelError(f"{self.path} is shorter than a sequence", values=f"{len(text)} of {self.seq_len} bytes")
        while True:
            places = [self._place(sample, num_places) for sample in range(start, start + self.batch_size)]
            tokens = torch.stack([text[place : place + self.seq_len] for place in places]).long()
            yield {"input_ids": tokens, "labels": tokens.clone()}
            start += self.batch_size

    def _place(self, sample: int, num_places: int) -> int:
        generator = torch.Generator().manual_seed(((self.seed << 40) + sample) % 2**64)
        return int(torch.randint(num_places, (), generator=generator))
