"""A configuration of transformers as one of a miniature: the same class and layer classes, few of everything.

What is kept is what plans depend on: grouped heads stay grouped, a vocabulary, heads or experts that needed padding
still need it, experts stay experts, the layers are the model's first ones, and a window of attention hides keys only
where the plan's does, since one that hides none is another call.
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
    """Whether the model is one that its class makes of a configuration."""
    return hasattr(getattr(model, "config", None), "to_dict")


def small_model(
    model: nn.Module,
    layers: int,
    padded: Mapping[str, bool],
    num_tokens: int | None = None,
    is_wide: bool = False,
) -> nn.Module:
    """A model of the same class, in which what is frozen is frozen.

    layers: the first so many of the model's. padded: whether "vocabulary", "heads" and "experts" have padding in the
    plan. num_tokens: of a row of the plan's batch. is_wide: twice the width of others. Raises whatever the class raises
    for a configuration that it cannot have.
    """
    config: Any = model.config
    made = type(config)(**small_fields(config, layers, padded, num_tokens, is_wide))
    # What no constructor takes but classes look at, such as which attention is called.
    for name in ("_attn_implementation", "use_cache"):
        if hasattr(config, name):
            setattr(made, name, copy.deepcopy(getattr(config, name)))
    if hasattr(made, "use_cache"):
        made.use_cache = False
    made.dtype = None
    built: nn.Module = type(model)(made)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(trained.get(name, True))
    return built


def small_fields(
    config: Any, layers: int, padded: Mapping[str, bool], num_tokens: int | None = None, is_wide: bool = False
) -> dict[str, Any]:
    """The configuration's fields, small."""
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
    # A token for padding would make its row of the table a constant.
    fields |= {
        n: None if n == "pad_token_id" else 0 for n in _TOKENS if (fields.get(n) or 0) not in range(VOCABULARY - 1)
    }
    return fields | _layers(fields, layers)


def _window(own: int, num_tokens: int | None) -> int:
    """A window that is shorter than a row, as long (transformers makes a mask of it) or longer, as the plan's is."""
    if num_tokens is None or own < num_tokens:
        return WINDOW
    return SEQUENCE if own == num_tokens else 2 * SEQUENCE


def _key_heads(fields: Mapping[str, Any], heads: int) -> int:
    """Heads of keys: one, a group's, or as many as of queries."""
    whole = next((fields[name] for name in _HEADS if isinstance(fields.get(name), int)), heads)
    keys = fields.get("num_key_value_heads") or whole
    return 1 if keys == 1 else heads if keys == whole or heads % 2 else heads // 2


def _layers(fields: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """How many layers there are, and what lists say of them: of each layer, or which of them."""
    whole = next((fields[name] for name in _LAYERS if isinstance(fields.get(name), int)), 0)
    found: dict[str, Any] = {name: layers for name in _LAYERS if isinstance(fields.get(name), int)}
    for name, value in fields.items():
        if name in _LAYER_NUMBERS and isinstance(value, list):
            found[name] = [number for number in value if number < layers]
        elif isinstance(value, list) and len(value) == whole:
            found[name] = (value * layers)[:layers]
    if isinstance(first := fields.get("first_k_dense_replace"), int):
        found["first_k_dense_replace"] = min(first, layers - 1)
    return found
