"""Ten model families with the layers and sizes of the steps measured on one H100 (shared/data/gpu_h100_families.jsonl).

`FAMILIES[name].build(size)` draws a model on torch's default device, in fp32, and a batch. Sizes:

    "full"      as measured
    "narrow"    as many layers, small width
    "tiny"      narrow, with two layers or as many as it takes to have one of each kind
    "short"     narrow, with one period of layers more

A count of calls is linear in periods: that of "narrow" is tiny + (short - tiny) x `more_periods`.

The first seven were measured. The last three have no measured rows: a mixture as in DeepSeek-V3 (latent attention,
shared experts), a state-space model (Mamba-2, whose scan works in chunks), a diffusion transformer of our own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.models import Example
from examples.zoo_modules import DiT

Size = Literal["full", "narrow", "short", "tiny"]
Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A family. make: settings -> a model and its batch. full: the measured sizes. narrow: the settings that differ
    from those. tiny, short: the settings that differ from narrow. more_periods: of layers, of full beyond tiny."""

    make: Callable[[dict[str, Any]], Example]
    full: Settings
    narrow: Settings
    tiny: Settings
    short: Settings
    more_periods: int

    def settings(self, size: Size) -> dict[str, Any]:
        """Return the settings of a size."""
        if size == "full":
            return dict(self.full)
        depth = {"narrow": {}, "tiny": self.tiny, "short": self.short}[size]
        return {**self.full, **self.narrow, **depth}

    def build(self, size: Size) -> Example:
        """Return the model, seeded, in training mode, and its batch, also seeded."""
        torch.manual_seed(0)
        example = self.make(self.settings(size))
        example.model.train()
        return example


def _tokens(settings: dict[str, Any], length: str = "sequence", seed: int = 1) -> Tensor:
    """Take the batch's sizes out of the settings. Return random tokens, int64 [batch, sequence]."""
    generator = torch.Generator().manual_seed(seed)
    shape = settings["batch"], settings[length]
    tokens = torch.randint(2, settings["vocab_size"], shape, generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def _transformers(class_name: str, config_name: str, settings: Settings) -> nn.Module:
    """Return a transformers model with attention through torch's SDPA."""
    import transformers

    config = getattr(transformers, config_name)(**{"attn_implementation": "sdpa", **settings})
    model: nn.Module = getattr(transformers, class_name)(config)
    return model


def _without_batch(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in ("batch", "sequence", "image")}


def _causal(stem: str, config: str, settings: dict[str, Any]) -> Example:
    tokens = _tokens(settings)
    common = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    model = _transformers(f"{stem}ForCausalLM", f"{config}Config", common | _without_batch(settings))
    return Example(model, {"input_ids": tokens, "labels": tokens.clone()})


def _llama(settings: dict[str, Any]) -> Example:
    return _causal("Llama", "Llama", settings)


def _gemma3(settings: dict[str, Any]) -> Example:
    layers = settings["num_hidden_layers"]
    # Every sixth layer sees all positions, as in the published models; with 12 layers ten have windows.
    kinds = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(layers)]
    return _causal("Gemma3", "Gemma3Text", settings | {"layer_types": kinds})


def _qwen3_moe(settings: dict[str, Any]) -> Example:
    return _causal("Qwen3Moe", "Qwen3Moe", settings)


def _deepseek(settings: dict[str, Any]) -> Example:
    return _causal("DeepseekV3", "DeepseekV3", settings)


def _mamba(settings: dict[str, Any]) -> Example:
    return _causal("Mamba2", "Mamba2", {"attn_implementation": "eager"} | settings)


def _bert(settings: dict[str, Any]) -> Example:
    tokens = _tokens(settings)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = _transformers("BertForMaskedLM", "BertConfig", rates | _without_batch(settings))
    return Example(model, {"input_ids": tokens, "labels": tokens.clone()})


def _t5(settings: dict[str, Any]) -> Example:
    common = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = _transformers("T5ForConditionalGeneration", "T5Config", common | _without_batch(settings))
    return Example(model, {"input_ids": _tokens(settings), "labels": _tokens(settings, seed=2)})


def _pixels(settings: dict[str, Any], channels: int = 3) -> Tensor:
    """Return random images, float32 [batch, channels, image, image]."""
    generator = torch.Generator().manual_seed(1)
    side = settings["image"]
    pixels = torch.randn(settings["batch"], channels, side, side, generator=generator, device="cpu")
    return pixels.to(torch.get_default_device())


def _classifier(stem: str, settings: dict[str, Any]) -> Example:
    pixels = _pixels(settings)
    labels = torch.arange(settings["batch"]) % settings["num_labels"]
    model = _transformers(f"{stem}ForImageClassification", f"{stem}Config", _without_batch(settings))
    return Example(model, {"pixel_values": pixels, "labels": labels})


def _vit(settings: dict[str, Any]) -> Example:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _classifier("ViT", settings | rates | {"image_size": settings["image"]})


def _resnet(settings: dict[str, Any]) -> Example:
    import transformers

    pixels = _pixels(settings)
    labels = torch.arange(settings["batch"]) % settings["num_labels"]
    # ResNet has no attention, and refuses the choice of one.
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(**_without_batch(settings)))
    return Example(model, {"pixel_values": pixels, "labels": labels})


def _dit(settings: dict[str, Any]) -> Example:
    pixels = _pixels(settings)
    times = torch.linspace(0.0, 1000.0, settings["batch"])
    model = DiT(
        side=settings["image"],
        patch=settings["patch"],
        width=settings["width"],
        num_heads=settings["num_heads"],
        layers=settings["layers"],
    )
    return Example(model, {"pixels": pixels, "times": times, "target": pixels.flip(0)}, F.mse_loss)


_SHORT = {"batch": 2, "sequence": 16, "vocab_size": 96}
_NARROW = _SHORT | {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 16}
_TWO, _THREE = {"num_hidden_layers": 2}, {"num_hidden_layers": 3}

FAMILIES: Mapping[str, Family] = {
    "bert": Family(
        _bert,
        {
            "batch": 16,
            "sequence": 512,
            "vocab_size": 30522,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
        },
        _NARROW,
        _TWO,
        _THREE,
        10,
    ),
    "qwen3-moe": Family(
        _qwen3_moe,
        {
            "batch": 4,
            "sequence": 2048,
            "vocab_size": 50304,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "moe_intermediate_size": 768,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 2048,
        },
        _NARROW | {"num_experts": 8, "moe_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 8},
        _TWO,
        _THREE,
        10,
    ),
    "gemma3": Family(
        _gemma3,
        {
            "batch": 4,
            "sequence": 2048,
            "vocab_size": 131072,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "max_position_embeddings": 2048,
        },
        _NARROW | {"head_dim": 8, "sliding_window": 4},
        {"num_hidden_layers": 6},
        {"num_hidden_layers": 12},
        1,
    ),
    "t5": Family(
        _t5,
        {
            "batch": 8,
            "sequence": 512,
            "vocab_size": 32128,
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 4096,
            "num_layers": 12,
            "num_decoder_layers": 12,
            "num_heads": 16,
        },
        _SHORT | {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "relative_attention_num_buckets": 8},
        {"num_layers": 2, "num_decoder_layers": 2},
        {"num_layers": 3, "num_decoder_layers": 3},
        10,
    ),
    "resnet50": Family(
        _resnet,
        {"batch": 128, "image": 224, "num_labels": 1000, "depths": [3, 4, 6, 3]},
        {"batch": 4, "image": 32, "num_labels": 12, "embedding_size": 8, "hidden_sizes": [32, 32, 64, 64]},
        {"depths": [1, 1, 1, 1]},
        {"depths": [2, 2, 2, 2]},
        3,
    ),
    "vit": Family(
        _vit,
        {
            "batch": 64,
            "image": 224,
            "num_labels": 1000,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "patch_size": 16,
        },
        {
            "batch": 2,
            "image": 16,
            "num_labels": 12,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "patch_size": 4,
        },
        _TWO,
        _THREE,
        10,
    ),
    "llama": Family(
        _llama,
        {
            "batch": 4,
            "sequence": 2048,
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 2048,
        },
        _NARROW | {"num_key_value_heads": 2},
        _TWO,
        _THREE,
        14,
    ),
    "deepseek": Family(
        _deepseek,
        {
            "batch": 4,
            "sequence": 2048,
            "vocab_size": 50304,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "moe_intermediate_size": 768,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": 512,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "max_position_embeddings": 2048,
        },
        _NARROW
        | {
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
        {"num_hidden_layers": 2},
        {"num_hidden_layers": 3},
        10,
    ),
    "mamba2": Family(
        _mamba,
        {
            "batch": 4,
            "sequence": 2048,
            "vocab_size": 50304,
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "state_size": 64,
            "num_heads": 32,
            "head_dim": 64,
            "n_groups": 1,
            "chunk_size": 128,
        },
        _SHORT | {"hidden_size": 32, "state_size": 8, "num_heads": 8, "head_dim": 8, "chunk_size": 8},
        _TWO,
        _THREE,
        10,
    ),
    "dit": Family(
        _dit,
        # DiT-L/2 of Peebles and Xie 2023, with half of its layers: 256 patches of 32 x 32 latents.
        {"batch": 32, "image": 32, "patch": 2, "width": 1024, "num_heads": 16, "layers": 12},
        {"batch": 2, "image": 8, "width": 32, "num_heads": 4},
        {"layers": 2},
        {"layers": 3},
        10,
    ),
}
