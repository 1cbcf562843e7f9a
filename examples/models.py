"""Tiny single-GPU models, each with a batch: `EXAMPLES[name]()`, or `examples.models:name` on the command line.

Four divides batch, sequence, heads, widths and vocabulary. Every factory is seeded, so two processes get equal
weights and equal batches. It takes

    layers      number of repeated blocks (or of linears, for the MLP)
    dropout     every dropout probability of the model, attention's included
    batch_size, seq_len, width, num_heads, ...   sizes

Each Hugging Face factory also takes further fields of the model's configuration by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.nanogpt import NanoGPT, NanoGPTConfig

IGNORED_LABEL = -100


@dataclass(frozen=True, slots=True)
class Example:
    """A model with a batch.

    inputs: forward's arguments by name; with a `loss_fn`, then the loss's arguments after the model's output.
    loss_fn: None for a model whose output has a loss.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    loss_fn: Callable[..., Tensor] | None = None

    def loss(self) -> Tensor:
        """Return the scalar mean loss of the batch, on one device."""
        if self.loss_fn is not None:
            names = list(self.inputs)
            output = self.model(**{name: self.inputs[name] for name in names[:-1]})
            return self.loss_fn(output, self.inputs[names[-1]])
        output = self.model(**self.inputs)
        loss: Tensor = output[1] if isinstance(output, tuple) else output.loss
        return loss


def gpt2(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    vocab_size: int = 96,
    width: int = 32,
    num_heads: int = 4,
    **config: Any,
) -> Example:
    """GPT-2: learned positions, LayerNorm, fused QKV, GELU, tied embeddings."""
    settings = {
        "vocab_size": vocab_size,
        "n_positions": seq_len,
        "n_embd": width,
        "n_layer": layers,
        "n_head": num_heads,
        "resid_pdrop": dropout,
        "embd_pdrop": dropout,
        "attn_pdrop": dropout,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return causal_lm("GPT2", seed, batch_size, seq_len, settings | config)


def opt(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    vocab_size: int = 96,
    width: int = 32,
    num_heads: int = 4,
    **config: Any,
) -> Example:
    """OPT: learned positions with an offset, separate q, k, v with biases, ReLU, tied embeddings."""
    settings = {
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len + 2,  # OPT's own offset adds two rows more: seq_len + 4
        "hidden_size": width,
        "word_embed_proj_dim": width,
        "ffn_dim": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "layerdrop": 0.0,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
    }
    return causal_lm("OPT", seed, batch_size, seq_len, settings | config)


def llama(**options: Any) -> Example:
    """Llama: rotary positions, RMSNorm, SwiGLU, as many key-value heads as heads. Options as `llama_gqa`."""
    return rotary_lm("Llama", {"tie_word_embeddings": False}, **options)


def llama_gqa(*, num_kv_heads: int = 2, **options: Any) -> Example:
    """Llama with grouped-query attention: each key-value head serves two heads, four query heads on two."""
    return rotary_lm("Llama", {"tie_word_embeddings": False}, num_kv_heads=num_kv_heads, **options)


def qwen2(**options: Any) -> Example:
    """Qwen2: Llama with biases on q, k, v and tied embeddings. Options as `llama_gqa`."""
    return rotary_lm("Qwen2", {"tie_word_embeddings": True}, **options)


def qwen3(*, width: int = 32, num_heads: int = 4, **options: Any) -> Example:
    """Qwen3: Llama with a norm on each head's q and k, and tied embeddings. Options as `llama_gqa`."""
    settings = {"tie_word_embeddings": True, "head_dim": width // num_heads}
    return rotary_lm("Qwen3", settings, width=width, num_heads=num_heads, **options)


def mixtral(*, num_experts: int = 4, num_choices: int = 2, **options: Any) -> Example:
    """Mixtral: Llama with a mixture of experts in place of each MLP. Options as `llama_gqa`."""
    settings = {"tie_word_embeddings": False, "num_local_experts": num_experts, "num_experts_per_tok": num_choices}
    return rotary_lm("Mixtral", settings, **options)


def rotary_lm(
    family: str,
    own: Mapping[str, Any],
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    vocab_size: int = 96,
    width: int = 32,
    num_heads: int = 4,
    num_kv_heads: int | None = None,
    ffn_width: int | None = None,
    **config: Any,
) -> Example:
    """A model of the Llama family, whose only dropout is attention's."""
    settings = {
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len,
        "hidden_size": width,
        "intermediate_size": ffn_width or 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads or num_heads,
        "attention_dropout": dropout,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    return causal_lm(family, seed, batch_size, seq_len, settings | dict(own) | config)


def bert(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    vocab_size: int = 96,
    width: int = 32,
    num_heads: int = 4,
    **config: Any,
) -> Example:
    """BERT for masked language modeling: bidirectional, post-norm, most rows padded at their end."""
    settings = {
        "vocab_size": vocab_size,
        "max_position_embeddings": seq_len,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "use_cache": False,
    }
    model = transformers_model("BertForMaskedLM", "BertConfig", seed, settings | config)
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocab_size, (batch_size, seq_len), generator=generator)
    masked = torch.rand(batch_size, seq_len, generator=generator) < 0.3
    masked[:, 0] = True
    # Rows end in 0, 3, 2 or 1 pads, so that ranks with a share of the batch hold unequal numbers of labels.
    num_real = seq_len - (torch.arange(batch_size) * 3) % 4
    real = torch.arange(seq_len) < num_real[:, None]
    labels = torch.where(masked & real, tokens, torch.full_like(tokens, IGNORED_LABEL))
    mask_token = vocab_size - 1
    inputs = tokens.masked_fill(masked, mask_token).masked_fill(~real, 0)
    return Example(model, {"input_ids": inputs, "attention_mask": real.long(), "labels": labels})


def t5(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    target_len: int = 8,
    vocab_size: int = 96,
    width: int = 32,
    num_heads: int = 4,
    **config: Any,
) -> Example:
    """T5: an encoder and a decoder of `layers` blocks each, relative position biases, cross-attention, tied embeddings.

    Half of the rows of the encoder's input are padded at their end.
    """
    settings = {
        "vocab_size": vocab_size,
        "d_model": width,
        "d_kv": width // num_heads,
        "d_ff": 4 * width,
        "num_layers": layers,
        "num_decoder_layers": layers,
        "num_heads": num_heads,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "dropout_rate": dropout,
        "feed_forward_proj": "relu",
        "initializer_factor": 0.5,  # of standard deviation 1 for the embeddings, which leave no loss near chance
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "use_cache": False,
    }
    model = transformers_model("T5ForConditionalGeneration", "T5Config", seed, settings | config)
    tokens, _ = tokens_and_labels(seed, batch_size, seq_len, vocab_size)
    _, labels = tokens_and_labels(seed + 1, batch_size, target_len, vocab_size)
    real = torch.arange(seq_len) < seq_len - 3 * (torch.arange(batch_size)[:, None] % 2)
    inputs = tokens.masked_fill(~real, 0)
    return Example(model, {"input_ids": inputs, "attention_mask": real.long(), "labels": labels})


def vit(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    image_height: int = 12,
    image_width: int = 20,
    patch_size: int = 4,
    num_classes: int = 12,
    width: int = 32,
    num_heads: int = 4,
    **config: Any,
) -> Example:
    """ViT image classifier: patch convolution, class token, pre-norm blocks. By default 3 x 5 patches: 16 positions."""
    settings = {
        "image_size": (image_height, image_width),
        "patch_size": patch_size,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": num_heads,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "num_labels": num_classes,
    }
    model = transformers_model("ViTForImageClassification", "ViTConfig", seed, settings | config)
    generator = torch.Generator().manual_seed(seed + 1)
    pixels = torch.randn(batch_size, 3, image_height, image_width, generator=generator)
    labels = torch.randint(num_classes, (batch_size,), generator=generator)
    return Example(model, {"pixel_values": pixels, "labels": labels})


def nanogpt(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    vocab_size: int = 96,
    width: int = 32,
    num_heads: int = 4,
) -> Example:
    """The hand-written GPT of `examples/nanogpt.py`, which returns (logits, loss)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NanoGPT(NanoGPTConfig(vocab_size, seq_len, width, num_heads, layers, dropout))
    tokens, labels = tokens_and_labels(seed, batch_size, seq_len + 1, vocab_size)
    return Example(model.train(), {"tokens": tokens[:, :-1].contiguous(), "targets": labels[:, 1:].contiguous()})


class EncoderTagger(nn.Module):
    """Embedding, torch's own TransformerEncoder, and a linear head: one class per position."""

    def __init__(
        self, vocab_size: int, num_classes: int, width: int, num_heads: int, layers: int, dropout: float
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        layer = nn.TransformerEncoderLayer(width, num_heads, 4 * width, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [batch, seq]. Returns logits [batch, seq, num_classes]."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits


def tagging_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the positions whose target is not -100. logits [B, S, C], target int64 [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED_LABEL)


def transformer_encoder(
    *,
    layers: int = 2,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    seq_len: int = 16,
    vocab_size: int = 96,
    num_classes: int = 12,
    width: int = 32,
    num_heads: int = 4,
) -> Example:
    """`nn.TransformerEncoder` (batch first, post-norm, ReLU) that tags each position, with a separate loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = EncoderTagger(vocab_size, num_classes, width, num_heads, layers, dropout)
    tokens, labels = tokens_and_labels(seed, batch_size, seq_len, vocab_size)
    target = torch.where(labels == IGNORED_LABEL, labels, labels % num_classes)
    return Example(model.train(), {"tokens": tokens, "target": target}, tagging_loss)


class MLP(nn.Module):
    """Linears with a GELU and a dropout after each but the last. No two of them are alike in a run of blocks."""

    def __init__(self, widths: tuple[int, ...], dropout: float) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor) -> Tensor:
        """features: float [batch, widths[0]]. Returns [batch, widths[-1]]."""
        hidden = features
        for linear in self.linears[:-1]:
            hidden = self.dropout(F.gelu(linear(hidden)))
        output: Tensor = self.linears[-1](hidden)
        return output


def mlp(
    *,
    layers: int = 3,
    dropout: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    in_width: int = 16,
    width: int = 32,
    out_width: int = 8,
) -> Example:
    """A multilayer perceptron of `layers` linears on random features, with a separate mean squared error."""
    if layers < 2:
        raise ValueError(f"an MLP has at least 2 linears, got layers={layers}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MLP((in_width, *[width] * (layers - 1), out_width), dropout)
    generator = torch.Generator().manual_seed(seed + 1)
    features = torch.randn(batch_size, in_width, generator=generator)
    target = torch.randn(batch_size, out_width, generator=generator)
    return Example(model.train(), {"features": features, "target": target}, F.mse_loss)


def causal_lm(family: str, seed: int, batch_size: int, seq_len: int, settings: Mapping[str, Any]) -> Example:
    stem = family if family == "HrmText" else family.removesuffix("Text")
    class_name = "GPT2LMHeadModel" if family == "GPT2" else f"{stem}ForCausalLM"
    model = transformers_model(class_name, f"{family}Config", seed, {**settings, "use_cache": False})
    model.loss_type = "ForCausalLM"  # transformers reads it off the class name, and warns of GPT-2's
    tokens, labels = tokens_and_labels(seed, batch_size, seq_len, settings["vocab_size"])
    return Example(model, {"input_ids": tokens, "labels": labels})


def transformers_model(class_name: str, config_name: str, seed: int, settings: Mapping[str, Any]) -> Any:
    """A transformers model with seeded random weights, in training mode, fp32, attention through torch's sdpa."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = getattr(transformers, config_name)(**{"attn_implementation": "sdpa", **settings})
        model = getattr(transformers, class_name)(config)
    return model.train()


def tokens_and_labels(seed: int, batch_size: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return random tokens, and labels equal to them except for some ignored ones, fewer in each later row.

    Both int64 [batch_size, seq_len]. Unequal counts per row are what makes an average of averages wrong.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(vocab_size, (batch_size, seq_len), generator=generator)
    share_ignored = torch.linspace(0.6, 0.0, batch_size)[:, None]
    ignored = torch.rand(batch_size, seq_len, generator=generator) < share_ignored
    return tokens, tokens.masked_fill(ignored, IGNORED_LABEL)


EXAMPLES: Mapping[str, Callable[..., Example]] = {
    factory.__name__: factory
    for factory in (
        gpt2,
        opt,
        llama,
        llama_gqa,
        qwen2,
        qwen3,
        mixtral,
        bert,
        t5,
        vit,
        nanogpt,
        transformer_encoder,
        mlp,
    )
}
