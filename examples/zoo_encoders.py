"""The configurations of encoders in `examples/zoo.py`: masked language models and image classifiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.zoo_configs import EAGER, IMAGE_SIZES, SEQ_LEN, VOCAB_SIZE, WIDTH, Table

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
    "mpnet": ("MPNet", EAGER),
    "big_bird": ("BigBird", {"attention_type": "original_full", **EAGER}),
    "convbert": ("ConvBert", {"embedding_size": 16, "conv_kernel_size": 3, "head_ratio": 2, **EAGER}),
    "squeezebert": (
        "SqueezeBert",
        {
            "embedding_size": WIDTH,
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "intermediate_groups": 2,
            "output_groups": 2,
            **EAGER,
        },
    ),
    "nystromformer": (
        "Nystromformer",
        {"segment_means_seq_len": SEQ_LEN, "num_landmarks": SEQ_LEN, "conv_kernel_size": 3, **EAGER},
    ),
    "fnet": ("FNet", {"use_tpu_fourier_optimizations": False, **EAGER}),
    "mobilebert": (
        "MobileBert",
        {"embedding_size": WIDTH, "intra_bottleneck_size": WIDTH, "num_feedforward_networks": 2},
    ),
    "esm": ("Esm", {"mask_token_id": 3, "token_dropout": False, "position_embedding_type": "rotary"}),
    "deberta": ("Deberta", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], **EAGER}),
    "roformer": ("RoFormer", {"embedding_size": WIDTH, "rotary_value": False, **EAGER}),
    "layoutlm": ("LayoutLM", EAGER),
    "xlm_roberta": ("XLMRoberta", {}),
    "rembert": ("RemBert", {"input_embedding_size": 16, "output_embedding_size": 16, **EAGER}),
    "megatron_bert": ("MegatronBert", EAGER),
    "eurobert": ("EuroBert", {}),
    "mra": ("Mra", EAGER),
    "data2vec_text": ("Data2VecText", {}),
    "ernie": ("Ernie", {}),
    "longformer": ("Longformer", {"attention_window": 8, **EAGER}),
    "ibert": ("IBert", EAGER),
    "yoso": ("Yoso", EAGER),
}
"""Encoders for masked language modelling, on the batch of examples.models.bert."""

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
    "beit": ("Beit", {**IMAGE_SIZES, "use_mask_token": False}),
    "data2vec_vision": ("Data2VecVision", IMAGE_SIZES),
    "dinov2": ("Dinov2", {**IMAGE_SIZES, "mlp_ratio": 2}),
    "dinov2_registers": ("Dinov2WithRegisters", {**IMAGE_SIZES, "mlp_ratio": 2}),
    "vit_msn": ("ViTMSN", IMAGE_SIZES),
    "ijepa": ("IJepa", IMAGE_SIZES),
    "convnextv2": (
        "ConvNextV2",
        {"patch_size": 2, "hidden_sizes": [16, 32], "depths": [2, 2], "num_stages": 2, "image_size": 16},
    ),
    "regnet": ("RegNet", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "groups_width": 8}),
    "poolformer": (
        "PoolFormer",
        {
            "hidden_sizes": [16, 32],
            "depths": [2, 2],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "padding": [1, 1],
        },
    ),
    "pvt_v2": (
        "PvtV2",
        {
            "image_size": 16,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "num_encoder_blocks": 2,
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "sr_ratios": [2, 1],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
        },
    ),
    "swinv2": (
        "Swinv2",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "focalnet": (
        "FocalNet",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [1, 1],
            "hidden_sizes": [16, 32],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
    ),
    "hiera": (
        "Hiera",
        {
            "image_size": [32, 32],
            "embed_dim": 16,
            "depths": [1, 1],
            "num_heads": [1, 2],
            "patch_size": [7, 7],
            "patch_stride": [4, 4],
            "patch_padding": [3, 3],
            "masked_unit_size": [4, 4],
            "query_stride": [2, 2],
            "num_query_pool": 1,
        },
    ),
    "bit": ("Bit", {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4}),
    "levit": (
        "Levit",
        {
            "image_size": 32,
            "hidden_sizes": [16, 32],
            "num_attention_heads": [2, 4],
            "depths": [1, 1],
            "key_dim": [8, 8],
            "drop_path_rate": 0,
            "mlp_ratio": [2, 2],
            "attention_ratio": [2, 2],
            "down_ops": [["Subsample", 8, 2, 4, 2, 2]],
        },
    ),
    "swiftformer": ("SwiftFormer", {"depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32], "image_size": 32}),
    "mobilenet_v2": ("MobileNetV2", {"image_size": 32, "depth_multiplier": 0.25}),
    "mobilevit": (
        "MobileViT",
        {
            "image_size": 32,
            "patch_size": 2,
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 32],
            "num_attention_heads": 4,
        },
    ),
}
"""Image classifiers, on pixels of 3 x `image_size` x `image_size` (16 where the class has none) and 12 classes."""
