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
    "nemotron": ("Nemotron", {"head_dim": 8}),
    "persimmon": ("Persimmon", {}),
    "gpt_neo": (
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8, **EAGER},
    ),
    "codegen": ("CodeGen", {"rotary_dim": 4, **EAGER}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", {"sliding_window": 8}),
    "exaone4": ("Exaone4", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "seed_oss": ("SeedOss", {"head_dim": 8}),
    "apertus": ("Apertus", {}),
    "helium": ("Helium", {"head_dim": 8}),
    "biogpt": ("BioGpt", {}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8}),
    "arcee": ("Arcee", {}),
    "diffllama": ("DiffLlama", {}),
    "hunyuan": ("HunYuanDenseV1", {"head_dim": 8}),
    "minicpm3": ("MiniCPM3", {}),
    "xglm": ("XGLM", {"ffn_dim": 64, "attention_heads": 4, "num_layers": 2, "d_model": WIDTH, **EAGER}),
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
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 8,
        },
    ),
    "dots1": (
        "Dots1",
        {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "phimoe": ("Phimoe", {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "jetmoe": ("JetMoe", {"num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 2}),
    "minimax": ("MiniMax", {"num_local_experts": 4, "head_dim": 8, "block_size": 8}),
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
    "zamba2": (
        "Zamba2",
        {
            "mamba_d_state": 8,
            "n_mamba_heads": 4,
            "mamba_headdim": 16,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "hybrid"],
            "hybrid_layer_ids": [1],
            "num_mem_blocks": 1,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        {
            "hybrid_override_pattern": "M*",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
            "head_dim": 8,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_n_groups": 2,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
            "head_dim": 8,
        },
    ),
    "lfm2": ("Lfm2", {"full_attn_idxs": [1], "conv_L_cache": 3}),
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "xlstm": (
        "xLSTM",
        {
            "num_heads": 4,
            "chunkwise_kernel": "chunkwise--native_autograd",
            "sequence_kernel": "native_sequence__native",
            "step_kernel": "native",
            "mode": "train",
            "chunk_size": 8,
            **EAGER,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {"lru_width": WIDTH, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
    ),
    "hrm_text": ("HrmText", {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "L_bp_cycles": [1]}),
}
"""Recurrent decoders, some with attention in between."""

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

SEQ2SEQ: Table = {
    "bart": ("Bart", {}),
    "pegasus": ("Pegasus", {}),
    "mbart": ("MBart", {}),
    "blenderbot": ("Blenderbot", {}),
    "marian": ("Marian", {}),
    "m2m100": ("M2M100", {}),
    "plbart": ("PLBart", {}),
    "pegasus_x": ("PegasusX", EAGER),
    "bigbird_pegasus": ("BigBirdPegasus", {"attention_type": "original_full", **EAGER}),
}
"""Encoder-decoders, on the batch of examples.models.t5."""

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
