"""Bytes that each block of Megatron-Core keeps from its forward to its backward pass, on one rank.

Recomputed and offloaded tensors are left out, by the names of Megatron-Core's arguments `--recompute-modules` and
`--offload-modules` (core/transformer/transformer_config.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cost_models.megatron_core.setup import Block, Model, Setup

HALF = 2
"""Bytes of an activation."""

Pieces = dict[str, float]

RECOMPUTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "core_attn": ("scores",),
        "layernorm": ("norm_out",),
        "mla_up_proj": ("qkv",),
        "mlp": ("norm_out", "linear_in", "act_in", "act_out"),
        "moe_act": ("act_out",),
        "moe": ("norm_out", "expert_in", "expert_act_in", "expert_act_out", "shared"),
        "shared_experts": ("shared",),
    }
)
"""A name of --recompute-modules -> the pieces that are no longer kept."""

OFFLOADED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attn_norm": ("norm_in",),
        "mlp_norm": ("norm_in",),
        "qkv_linear": ("norm_out", "linear_in"),
        "core_attn": ("qkv", "scores"),
        "attn_proj": ("context",),
        "expert_fc1": ("expert_in",),
        "moe_act": ("expert_act_in", "expert_act_out"),
    }
)
"""A name of --offload-modules -> the pieces that are on the host."""


def _rows(setup: Setup, positions: int) -> int:
    return setup.micro_batch * positions


def between_bytes(model: Model, setup: Setup, block: Block) -> float:
    """Return the bytes of a tensor between two blocks."""
    return _rows(setup, block.queries) * model.hidden * HALF / setup.split


def _linear_in(setup: Setup) -> int:
    """Return the bytes per element that a matmul keeps of its input."""
    return 1 if setup.precision == "fp8" else HALF


def _residual(model: Model, setup: Setup, block: Block) -> Pieces:
    """Return the block's input, which its norm keeps, the norm's output, and the mask of the dropout at its end."""
    between = between_bytes(model, setup, block)
    statistics = _rows(setup, block.queries) * 4 * (1 if model.rms_norm else 2) / setup.split
    mask = between / HALF if setup.hidden_dropout else 0.0
    return {"norm_in": between + statistics, "norm_out": between / HALF * _linear_in(setup), "mask": mask}


def _scores(model: Model, setup: Setup, block: Block, features: float) -> float:
    """Return the bytes between the products of attention, or those that a fused kernel keeps instead.

    Unfused: the softmax in 16 bits (in fp32 with a 16-bit copy where scale, mask and softmax are not one kernel), and
    with dropout a mask of one byte and the product. Fused kernels keep a log-sum-exp per row, and a second copy of
    their result where it changes layout: rows of A100 and GB200 show that copy, those of H100 do not.
    """
    heads = model.heads / setup.tp
    if setup.attention != "unfused":
        copied = setup.attention == "flash" or setup.generation != "hopper"
        return _rows(setup, block.queries) * (heads * 4 + (features * HALF if copied else 0))
    elements = setup.micro_batch * heads * block.queries * block.keys
    dropped = 1 + HALF if setup.attention_dropout else 0
    return elements * (HALF + dropped if setup.fused_softmax else 4 + (dropped or HALF))


def _attention(model: Model, setup: Setup, block: Block) -> Pieces:
    if model.latent is not None:
        return _latent_attention(model, setup, block)
    rows = _rows(setup, block.queries)
    query_features = model.heads * model.head_features / setup.tp
    qkv = query_features + 2 * model.kv_heads * model.head_features / setup.tp
    return {
        **_residual(model, setup, block),
        # One tensor of BERT's layers is not sharded. Inferred from its cases of tp 1, 2 and 4; which tensor is
        # unknown.
        "whole": rows * model.hidden * HALF * (1 - 1 / setup.tp) if model.family == "bert" else 0.0,
        "qkv": rows * qkv * HALF,
        "scores": _scores(model, setup, block, query_features),
        "context": rows * query_features * _linear_in(setup),
    }


def _latent_attention(model: Model, setup: Setup, block: Block) -> Pieces:
    """Count both compressions before and after their norms, q and k with positions, and v with its k."""
    latent, rows, tp = model.latent, _rows(setup, block.queries), setup.tp
    assert latent is not None
    narrow = 2 * (latent.q_rank + latent.kv_rank) + latent.position_features
    qk = model.heads * (latent.qk_features + latent.position_features) / tp
    v = model.heads * latent.v_features / tp
    kv = model.heads * (latent.qk_features + latent.v_features) / tp
    return {
        **_residual(model, setup, block),
        "compressed": rows * narrow * HALF / setup.split,
        "qkv": rows * (2 * qk + kv) * HALF,
        "scores": _scores(model, setup, block, v),
        "context": rows * v * _linear_in(setup),
    }


def _cross(model: Model, setup: Setup, block: Block) -> Pieces:
    """Count keys and values of the encoder's result, which each layer keeps as the input of their matrix."""
    query_features = model.heads * model.head_features / setup.tp
    rows, others = _rows(setup, block.queries), _rows(setup, block.keys)
    return {
        **_residual(model, setup, block),
        "linear_in": others * model.hidden * HALF,
        "qkv": (rows * query_features + others * 2 * query_features) * HALF,
        "scores": _scores(model, setup, block, query_features),
        "context": rows * query_features * HALF,
    }


def _mlp(model: Model, setup: Setup, block: Block) -> Pieces:
    inputs, result = _activated(model, setup, _rows(setup, block.queries), model.ffn / setup.tp)
    return {**_residual(model, setup, block), "act_in": inputs, "act_out": result}


def _activated(model: Model, setup: Setup, rows: float, ffn: float) -> tuple[float, float]:
    """Return the bytes of (the activation function's input, its output)."""
    return rows * ffn * HALF * (2 if model.gated else 1), rows * ffn * _linear_in(setup)


def _moe(model: Model, setup: Setup, block: Block) -> Pieces:
    """Count rows as distributed evenly over experts. The function's output is kept before and after it is weighted."""
    rows = _rows(setup, block.queries)
    router_rows = rows / setup.split
    routed = router_rows * setup.etp * model.top_k
    inputs, result = _activated(model, setup, routed, model.expert_ffn / setup.etp)
    shared = sum(_activated(model, setup, rows, model.shared_ffn / setup.tp)) if model.shared_ffn else 0.0
    return {
        **_residual(model, setup, block),
        "router": router_rows * model.experts * 4 * 3,
        "expert_in": routed * model.hidden * _linear_in(setup),
        "expert_out": routed * model.hidden * HALF,
        "expert_act_in": inputs,
        "expert_act_out": result + (0 if model.gated else routed * model.expert_ffn / setup.etp * HALF),
        "shared": shared,
    }


def _mamba(model: Model, setup: Setup, block: Block) -> Pieces:
    """Count in_proj's result, the scan's, and input and output of the gated norm (core/ssm/mamba_mixer.py)."""
    mamba, rows = model.mamba, _rows(setup, block.queries)
    assert mamba is not None
    projected = 2 * mamba.inner + 2 * mamba.groups * mamba.states + mamba.heads
    return {**_residual(model, setup, block), "mixed": rows * (projected + 3 * mamba.inner) * HALF / setup.tp}


def _prediction(model: Model, setup: Setup, block: Block) -> Pieces:
    """Count inputs and outputs of both norms, read by the matrix, and the input of the norm behind the layer."""
    return {"prediction": 6 * between_bytes(model, setup, block)}


KEPT: Mapping[str, Callable[[Model, Setup, Block], Pieces]] = MappingProxyType(
    {
        "attention": _attention,
        "cross": _cross,
        "mlp": _mlp,
        "moe": _moe,
        "mamba": _mamba,
        "prediction": _prediction,
    }
)


def kept_bytes(model: Model, setup: Setup, block: Block) -> float:
    """Return the bytes kept by one block for one micro-batch."""
    if "full" in setup.recompute:  # only a layer's input
        return between_bytes(model, setup, block) if block.kind in ("attention", "mamba") else 0.0
    pieces = KEPT[block.kind](model, setup, block)
    for name in setup.recompute:
        if name in ("mlp", "moe") and name != block.kind:
            continue
        for piece in RECOMPUTED[name]:
            pieces.pop(piece, None)
            if name == "moe_act":
                pieces.pop(f"expert_{piece}", None)
    for name in setup.offload:
        for piece in OFFLOADED[name]:
            pieces.pop(piece, None)
    return sum(pieces.values())
