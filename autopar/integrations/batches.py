"""A random batch for a transformers model that came without one (`hf:config.json` on the command line)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import ModelError


def random_batch(model: nn.Module, batch_size: int, seq_len: int) -> dict[str, Tensor]:
    """Inputs with labels, by forward's names, on the CPU; the model may be on meta.

    Language models: input_ids and labels, int64 [batch_size, seq_len]. Image classifiers: pixel_values, float
    [batch_size, channels, height, width], and labels, int64 [batch_size]; seq_len does not matter.
    Raises ModelError for a model that takes anything else, or a sequence longer than the model's positions.
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
        "no batch can be made up for this model",
        values=f"{type(model).__name__}, whose main input is {main_input!r}",
        alternatives="name a factory (module:factory) that returns (model, inputs)",
    )
