"""Parameters on a rank of Megatron-Core, by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from cost_models.megatron_core.setup import Model, Setup


def norm_parameters(model: Model) -> int:
    return model.hidden * (1 if model.rms_norm else 2)


def _linear(inputs: int, outputs: int, ranks: int, *, bias: bool, by_rows: bool = False) -> int:
    """Count a matrix sharded by columns, with its bias, or by rows, where every rank has the whole bias."""
    return inputs * outputs // ranks + (0 if not bias else outputs if by_rows else outputs // ranks)


def _attention(model: Model, setup: Setup) -> int:
    hidden, tp = model.hidden, setup.tp
    if model.latent is not None:
        return _latent_attention(model, setup)
    query_features, kv_features = model.heads * model.head_features, 2 * model.kv_heads * model.head_features
    qkv = _linear(hidden, query_features + kv_features, tp, bias=model.has_bias)
    return norm_parameters(model) + qkv + _linear(query_features, hidden, tp, bias=model.has_bias, by_rows=True)


def _latent_attention(model: Model, setup: Setup) -> int:
    """Count latent attention; every tensor-parallel rank has the down-projections
    (core/transformer/multi_latent_attention.py)."""
    latent, hidden, tp = model.latent, model.hidden, setup.tp
    assert latent is not None
    scale = 1 if model.rms_norm else 2
    down = hidden * (latent.q_rank + latent.kv_rank + latent.position_features)
    norms = norm_parameters(model) + scale * (latent.q_rank + latent.kv_rank)
    q = latent.q_rank * model.heads * (latent.qk_features + latent.position_features) // tp
    kv = latent.kv_rank * model.heads * (latent.qk_features + latent.v_features) // tp
    out = _linear(model.heads * latent.v_features, hidden, tp, bias=model.has_bias, by_rows=True)
    return down + norms + q + kv + out


def _cross(model: Model, setup: Setup) -> int:
    """Count cross attention: queries of the decoder and keys and values of the encoder are two matrices."""
    query_features = model.heads * model.head_features
    q = _linear(model.hidden, query_features, setup.tp, bias=model.has_bias)
    kv = _linear(model.hidden, 2 * query_features, setup.tp, bias=model.has_bias)
    return (
        norm_parameters(model)
        + q
        + kv
        + _linear(query_features, model.hidden, setup.tp, bias=model.has_bias, by_rows=True)
    )


def _mlp(model: Model, setup: Setup, ffn: int = 0) -> int:
    ffn = ffn or model.ffn
    up = _linear(model.hidden, ffn * (2 if model.gated else 1), setup.tp, bias=model.has_bias)
    return norm_parameters(model) + up + _linear(ffn, model.hidden, setup.tp, bias=model.has_bias, by_rows=True)


def _moe(model: Model, setup: Setup) -> int:
    """Count the router and the shared experts; `expert_parameters` counts routed experts."""
    shared = _mlp(model, setup, model.shared_ffn) - norm_parameters(model) if model.shared_ffn else 0
    return norm_parameters(model) + model.hidden * model.experts + shared


def _mamba(model: Model, setup: Setup) -> int:
    """Count in_proj of z, x, B, C and dt, a convolution of four steps, A, D, dt and a norm
    (core/ssm/mamba_mixer.py)."""
    mamba, tp = model.mamba, setup.tp
    assert mamba is not None
    mixed = mamba.inner + 2 * mamba.groups * mamba.states
    rows = model.hidden * (mamba.inner + mixed + mamba.heads) // tp
    small = (mixed * 5 + 3 * mamba.heads + mamba.inner) // tp
    return norm_parameters(model) + rows + small + mamba.inner * model.hidden // tp


def _prediction(model: Model, setup: Setup) -> int:
    """Count a layer of multi-token prediction: two norms and a matrix of twice the width before it, a norm after it."""
    return 3 * norm_parameters(model) + 2 * model.hidden * model.hidden // setup.tp


COUNTS: Mapping[str, Callable[[Model, Setup], int]] = MappingProxyType(
    {"attention": _attention, "cross": _cross, "mlp": _mlp, "moe": _moe, "mamba": _mamba, "prediction": _prediction}
)


def dense_parameters(model: Model, setup: Setup) -> int:
    """Count everything that data parallelism replicates; the table of words is on the first stage and at the loss."""
    total = sum(COUNTS[block.kind](model, setup) for block in setup.stored_blocks)
    table = table_parameters(model, setup)
    looks_up = setup.is_first or (setup.is_last and model.extra_predictions > 0)
    total += table * looks_up
    if setup.is_first:
        total += model.positions * model.hidden + (2 * model.hidden if model.family == "bert" else 0)
    if setup.is_last:
        total += norm_parameters(model) + _heads(model, setup)
        total += 0 if looks_up and model.tied else table
    return total


def _heads(model: Model, setup: Setup) -> int:
    hidden, rows = model.hidden, model.padded_vocab(setup.tp) // setup.tp
    if model.family == "bert":  # lm_head, its bias per word, and the binary head with its pooler
        return hidden * hidden + 3 * hidden + rows + hidden * hidden + hidden + 2 * hidden + 2
    if model.family == "t5":  # the encoder's own last norm, and a bias per word
        return norm_parameters(model) + rows
    return 0


def expert_parameters(model: Model, setup: Setup) -> int:
    """Count the parameters of a rank's experts, which have separate buffers."""
    layers = sum(block.kind == "moe" for block in setup.stored_blocks)
    if not layers:
        return 0
    local_experts = model.experts // setup.ep
    up = model.hidden * model.expert_ffn * (2 if model.gated else 1)
    return layers * local_experts * (up + model.expert_ffn * model.hidden) // setup.etp


def table_parameters(model: Model, setup: Setup) -> int:
    """Count a rank's shard of the table of words."""
    return model.padded_vocab(setup.tp) // setup.tp * model.hidden


def matrix_parameters(model: Model, setup: Setup) -> int:
    """Count the matrices of attention and of dense feed-forward layers."""
    return sum(_matrices(model, setup, block.kind) for block in setup.stored_blocks)


def _matrices(model: Model, setup: Setup, kind: str) -> int:
    if kind not in COUNTS or kind == "mamba":
        return 0
    return COUNTS[kind](replace(model, has_bias=False), setup) - norm_parameters(model)


def shapes_of_matrices(model: Model, setup: Setup) -> int:
    """Count the elements of one matrix of each shape: the table of words, and those of a block of each kind."""
    kinds = {block.kind for block in setup.blocks} - {"cross"}
    return table_parameters(model, setup) + sum(_matrices(model, setup, kind) for kind in kinds)
