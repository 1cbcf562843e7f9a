"""Shrink a configuration of transformers to that of a miniature: the same classes, with few of everything.

Facts that plans depend on are preserved. Grouped heads stay grouped. A vocabulary, heads or experts that needed padding
still need it. Experts stay experts, and the layers are the model's first ones. An attention window hides keys only
where the plan's does, because one that hides none is a different call.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

HEAD_DIM, FEATURES, VOCABULARY, EXPERTS, SEQUENCE, WINDOW = 8, 32, 64, 4, 16, 6

_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "word_embed_proj_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers")
_LAYER_NUMBERS = ("moe_layers", "mlp_only_layers")
_FEATURES = (
    "intermediate_size",
    "ffn_dim",
    "n_inner",
    "d_ff",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "intermediate_size_mlp",
)
_HEAD_DIMS = ("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
_RANKS = ("q_lora_rank", "kv_lora_rank")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_WINDOWS = ("sliding_window", "attention_chunk_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def has_config(model: nn.Module) -> bool:
    """Whether the model is built by its class from a configuration."""
    return hasattr(getattr(model, "config", None), "to_dict")


def small_model(
    model: nn.Module,
    layers: int,
    padded: Mapping[str, bool],
    num_tokens: int | None = None,
    is_wide: bool = False,
) -> nn.Module:
    """Build a small model of the same class, with the same parameters frozen.

    layers: number of the model's first layers. padded: whether "vocabulary", "heads" and "experts" have padding in the
    plan. num_tokens: tokens per row of the plan's batch. is_wide: doubles the width. Raises the class's error for an
    invalid configuration.
    """
    config: Any = model.config
    small_config = type(config)(**small_fields(config, layers, padded, num_tokens, is_wide))
    # Fields that classes read although no constructor takes them, such as the attention implementation.
    for name in ("_attn_implementation", "use_cache"):
        if hasattr(config, name):
            setattr(small_config, name, copy.deepcopy(getattr(config, name)))
    if hasattr(small_config, "use_cache"):
        small_config.use_cache = False
    small_config.dtype = None
    small: nn.Module = type(model)(small_config)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return small


def small_fields(
    config: Any, layers: int, padded: Mapping[str, bool], num_tokens: int | None = None, is_wide: bool = False
) -> dict[str, Any]:
    """Return the configuration's fields, shrunk."""
    fields: dict[str, Any] = copy.deepcopy(config.to_dict())
    for name in ("dtype", "torch_dtype", "transformers_version", "architectures", "_name_or_path", "model_type"):
        fields.pop(name, None)
    heads = 3 if padded.get("heads") else 4
    keys, times = _key_heads(fields, heads), 2 if is_wide else 1
    head_dim = times * HEAD_DIM
    values: dict[str, int] = {
        **dict.fromkeys(_HEADS, heads),
        "num_key_value_heads": keys,
        **dict.fromkeys(_WIDTHS, heads * head_dim),
        **dict.fromkeys(_FEATURES, times * FEATURES),
        **dict.fromkeys(_HEAD_DIMS, head_dim),
        **dict.fromkeys(_RANKS, 2 * head_dim),
        **dict.fromkeys(_EXPERTS, 3 if padded.get("experts") else EXPERTS),
        **dict.fromkeys(_POSITIONS, 2 * SEQUENCE),
        "qk_head_dim": 2 * head_dim,
        "vocab_size": VOCABULARY - 1 if padded.get("vocabulary") else VOCABULARY,
    }
    fields |= {name: value for name, value in values.items() if isinstance(fields.get(name), int)}
    most = {
        "num_experts_per_tok": 2,
        "n_group": 1 if padded.get("experts") else 2,
        "topk_group": 1,
        "n_shared_experts": 1,
    }
    for name in _WINDOWS:
        most[name] = _window(fields.get(name) or 0, num_tokens)
    fields |= {n: min(v, fields[n]) for n, v in most.items() if isinstance(fields.get(n), int)}
    # A padding token would make its row of the embedding table a constant.
    fields |= {
        n: None if n == "pad_token_id" else 0 for n in _TOKENS if (fields.get(n) or 0) not in range(VOCABULARY - 1)
    }
    return fields | _layers(fields, layers)


def _window(window: int, num_tokens: int | None) -> int:
    """Return a window shorter than a row, as long (transformers then makes a mask of it) or longer, as in the plan."""
    if num_tokens is None or window < num_tokens:
        return WINDOW
    return SEQUENCE if window == num_tokens else 2 * SEQUENCE


def _key_heads(fields: Mapping[str, Any], heads: int) -> int:
    """Return the number of key heads: one, one per group, or as many as query heads."""
    whole = next((fields[name] for name in _HEADS if isinstance(fields.get(name), int)), heads)
    keys = fields.get("num_key_value_heads") or whole
    return 1 if keys == 1 else heads if keys == whole or heads % 2 else heads // 2


def _layers(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the number of layers, and lists that have an entry per layer or that name layers, shortened."""
    whole = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), 0)
    values: dict[str, Any] = {name: layers for name in _LAYERS if isinstance(fields.get(name), int)}
    for name, value in fields.items():
        if name in _LAYER_NUMBERS and isinstance(value, list):
            values[name] = [number for number in value if number < layers]
        elif isinstance(value, list) and len(value) == whole:
            values[name] = (value * layers)[:layers]
    if isinstance(first := fields.get("first_k_dense_replace"), int):
        values["first_k_dense_replace"] = min(first, layers - 1)
    return values
