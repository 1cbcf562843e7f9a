"""The configurations of `examples/zoo.py`: per architecture the class of transformers, and the fields that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SEQ_LEN, VOCAB_SIZE, WIDTH = 16, 96, 32

Table = Mapping[str, tuple[str, Mapping[str, Any]]]

EAGER: Mapping[str, Any] = {"attn_implementation": "eager"}
"""Of classes that do not call torch's scaled_dot_product_attention."""

CAUSAL: Table = {
    "gpt_neox": ("GPTNeoX", {}),
    "gptj": ("GPTJ", {"n_inner": 64, "rotary_dim": 4, **EAGER}),
    "bloom": ("Bloom", EAGER),
    "falcon": ("Falcon", {"multi_query": True, "new_decoder_architecture": False}),
    "mpt": ("Mpt", {"expansion_ratio": 2, "max_seq_len": SEQ_LEN, **EAGER}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, **EAGER}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"num_key_value_heads": 2}),
    "stablelm": ("StableLm", {}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", {"sliding_window": 8}),
    "granite": ("Granite", {"num_key_value_heads": 2}),
    "starcoder2": ("Starcoder2", {"num_key_value_heads": 2, "sliding_window": 8}),
    "glm4": ("Glm4", {"num_key_value_heads": 2, "head_dim": 8}),
    "smollm3": ("SmolLM3", {"num_key_value_heads": 2}),
}
"""Dense decoders: the family in transformers' class names, and the fields that differ from a Llama's."""

EXPERTS: Table = {
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": (
        "DeepseekV2",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 4,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 2.0,
                "original_max_position_embeddings": SEQ_LEN // 2,
            },
            **EAGER,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "head_dim": 8,
            "attention_chunk_size": 8,
        },
    ),
    "granite_moe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "jamba": (
        "Jamba",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
}
"""Decoders with experts."""

STATE_SPACE: Table = {
    "mamba": ("Mamba", {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64, **EAGER}),
    "mamba2": ("Mamba2", {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 8, **EAGER}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "time_step_rank": 4, "intermediate_size": 64, **EAGER}),
    "bamba": (
        "Bamba",
        {
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "attn_layer_indices": [1],
        },
    ),
    "rwkv": ("Rwkv", {"attention_hidden_size": WIDTH, "context_length": SEQ_LEN, **EAGER}),
}
"""Recurrent decoders, some with attention in between."""

ENCODER_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * SEQ_LEN,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}

MASKED: Table = {
    "roberta": ("Roberta", {}),
    "albert": ("Albert", {"embedding_size": 16}),
    "distilbert": ("DistilBert", {"dropout": 0.0, "attention_dropout": 0.0, "hidden_dim": 4 * WIDTH}),
    "deberta_v2": (
        "DebertaV2",
        {
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            **EAGER,
        },
    ),
    "electra": ("Electra", {"embedding_size": 16}),
    "modernbert": (
        "ModernBert",
        {
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "bos_token_id": None,
            "eos_token_id": None,
            "cls_token_id": None,
            "sep_token_id": None,
            "mlp_dropout": 0.0,
            "intermediate_size": 64,
        },
    ),
}
"""Encoders for masked language modelling, on the batch of examples.models.bert."""

SEQ2SEQ_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "use_cache": False,
}

IMAGE_SIZES: Mapping[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": SEQ_LEN,
    "bos_token_id": 0,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": 1,
}

IMAGES: Table = {
    "deit": ("DeiT", {**IMAGE_SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "swin": (
        "Swin",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.0,
        },
    ),
    "convnext": (
        "ConvNext",
        {"patch_size": 2, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "image_size": 16},
    ),
    "resnet": ("ResNet", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "basic"}),
}
"""Image classifiers, on 16 x 16 pixels and 12 classes."""
