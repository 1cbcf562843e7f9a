"""Batches: random ones for a transformers model without a batch (`hf:config.json`), and windows of a file's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import ModelError


def random_batch(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Return inputs with labels, by forward's names, on the CPU; the model may be on meta.

    Language models: input_ids and labels, int64 [batch_size, seq_len]. Image classifiers: pixel_values, float
    [batch_size, channels, height, width], and labels, int64 [batch_size]; seq_len has no effect.
    Raises ModelError for any other model, and for a sequence longer than the model's positions.
    """
    config: Any = getattr(model, "config", None)
    main_input = getattr(model, "main_input_name", None)
    generator = torch.Generator().manual_seed(0)
    if main_input == "input_ids" and hasattr(config, "vocab_size") and not getattr(config, "is_encoder_decoder", False):
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and seq_len > longest:
            raise ModelError(
                "the sequence is longer than the model's positions",
                values={"seq_len": seq_len, "max_position_embeddings": longest},
                alternatives=f"a seq_len of at most {longest}",
            )
        tokens = torch.randint(config.vocab_size, (batch_size, seq_len), generator=generator, device="cpu")
        return {"input_ids": tokens, "labels": tokens.clone()}
    if main_input == "pixel_values" and hasattr(config, "image_size") and hasattr(config, "num_labels"):
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (batch_size, config.num_channels, height, width)
        labels = torch.randint(config.num_labels, (batch_size,), generator=generator, device="cpu")
        return {"pixel_values": torch.randn(shape, generator=generator, device="cpu"), "labels": labels}
    raise ModelError(
        "autopar cannot create a batch for this model",
        values=f"{type(model).__name__} with main input {main_input!r}",
        alternatives="a factory (module:factory) that returns (model, inputs)",
    )


@dataclass(frozen=True, slots=True)
class ByteText:
    """`ByteText(path, batch_size, seq_len)(start)` yields batches from sample `start` on, without end.

    Sample i is a window of seq_len bytes at a place that depends only on the seed and on i, so training resumes where
    it stopped, under any plan. Batches have input_ids and labels, both int64 [batch_size, seq_len] and equal.
    """

    path: Path
    batch_size: int
    seq_len: int
    seed: int = 0

    def __call__(self, start: int) -> Iterator[dict[str, Tensor]]:
        """Yield batches. Raises ModelError for a file that cannot be read or is shorter than a window."""
        try:
            text = torch.frombuffer(bytearray(self.path.read_bytes() or b"\0"), dtype=torch.uint8)
        except OSError as error:
            raise ModelError(
                f"cannot read {self.path}", values=error.strerror, alternatives="the path of a readable file"
            ) from None
        num_places = len(text) - self.seq_len + 1
        if num_places < 1:
            raise ModelError(
                f"{self.path} is shorter than a sequence",
                values=f"{len(text)} of {self.seq_len} bytes",
                alternatives="a longer file, or a smaller --seq",
            )
        while True:
            places = [self._place(sample, num_places) for sample in range(start, start + self.batch_size)]
            tokens = torch.stack([text[place : place + self.seq_len] for place in places]).long()
            yield {"input_ids": tokens, "labels": tokens.clone()}
            start += self.batch_size

    def _place(self, sample: int, num_places: int) -> int:
        generator = torch.Generator().manual_seed(((self.seed << 40) + sample) % 2**64)
        return int(torch.randint(num_places, (), generator=generator))
