"""From the arguments of a case of Megatron-LM's own functional tests to its model and the last rank's setup.

Rows have the arguments under `args`, without the ones that a case gives to its tokenizer, dropout and environment. What
is taken for these is said where it is, and comes from the cases' own files (NVIDIA/Megatron-LM at d98e8a64dd,
tests/functional_tests/test_cases).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.published_runs.megatron_stages import blocks_of
from benchmarks.published_runs.rows import Row, SkippedError
from cost_models.megatron_core import LatentAttention, Mamba, Model, Setup, rank_memory

GENERATIONS = (("A100", "ampere"), ("H100", "hopper"), ("GB200", "blackwell"), ("GB300", "blackwell"))
SKIPPED = (
    ("use-torch-fsdp2", "torch's FSDP has buffers of its own"),
    ("export-kd-cfg", "a teacher beside the model, whose sizes the arguments do not give"),
    ("model-provider", "a model of several parts, of which the arguments describe one"),
    ("experimental-attention-variant", "attention of a kind that is not described"),
    ("moe-latent-size", "experts in a narrower space"),
    ("perform-rl-step", "reinforcement learning"),
)
UNLIKE = ("grpo", "flextron", "multimodal", "llava", "distill")
"""Words in the names of cases that train something else than one model from its loss."""

GPT2_WORDS, BERT_WORDS, NEMOTRON_WORDS, LLAMA_WORDS = 50257, 28996, 256000, 32000
"""Vocabularies that cases name by their tokenizer's file."""

OFFLOADED = ("expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear", "core_attn", "attn_proj")
"""--offload-modules of the cases with fine_grained_offloading in their names."""

STATE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

Args = Mapping[str, Any]


def is_case(row: Row) -> bool:
    """Whether a row has its arguments."""
    return bool(row.get("args"))


def kind_of(row: Row) -> str:
    """The family of its model: dense, bert, t5, hybrid or moe."""
    start = str(row["model"]).split("/")[0]
    if start in ("bert", "t5"):
        return start
    if "hybrid-layer-pattern" in row["args"]:
        return "hybrid"
    return "moe" if _number(row["args"], "num-experts", 0) else "dense"


def _flag(args: Args, key: str) -> bool:
    return str(args.get(key, "")).lower() == "true"


def _number(args: Args, key: str, otherwise: int) -> int:
    return int(args.get(key, otherwise))


def is_release(args: Args) -> bool:
    """Whether a model is trained as for a release: without dropout, on a blend of data, on several nodes."""
    return "train-samples" in args


def _words(row: Row, args: Args) -> int:
    if "vocab-size" in args:
        return int(args["vocab-size"])
    if kind_of(row) in ("bert", "t5"):
        return BERT_WORDS + _number(args, "vocab-extra-ids", 0)
    if is_release(args):
        return LLAMA_WORDS if _flag(args, "finetune") else NEMOTRON_WORDS
    return GPT2_WORDS


def model_of(row: Row) -> Model:
    """Raises SkippedError for what has no such model."""
    args: Args = row["args"]
    for key, why in SKIPPED:
        if key in args:
            raise SkippedError(why)
    if found := [word for word in UNLIKE if word in str(row["model"])]:
        raise SkippedError(f"{found[0]} is not described")
    hidden, heads = int(args["hidden-size"]), int(args["num-attention-heads"])
    gated = _flag(args, "swiglu")
    ffn = _number(args, "ffn-hidden-size", int(hidden * 8 / 3) // 64 * 64 if gated else 4 * hidden)
    experts = _number(args, "num-experts", 0)
    is_learned = str(args.get("position-embedding-type", "learned_absolute")) == "learned_absolute"
    kind = kind_of(row)
    return Model(
        hidden=hidden,
        heads=heads,
        kv_heads=_number(args, "num-query-groups", heads) if _flag(args, "group-query-attention") else heads,
        head_features=_number(args, "kv-channels", hidden // heads),
        ffn=ffn,
        vocab=_words(row, args),
        vocab_multiple=_number(args, "make-vocab-size-divisible-by", 128),
        family=kind if kind in ("bert", "t5") else "gpt",
        gated=gated,
        has_bias=not _flag(args, "disable-bias-linear"),
        rms_norm=args.get("normalization") == "RMSNorm",
        tied=not _flag(args, "untie-embeddings-and-output-weights"),
        positions=_number(args, "max-position-embeddings", 0) if is_learned else 0,
        experts=experts,
        top_k=_number(args, "moe-router-topk", 2),
        expert_ffn=_number(args, "moe-ffn-hidden-size", ffn) if experts else 0,
        shared_ffn=_number(args, "moe-shared-expert-intermediate-size", 0),
        extra_predictions=_number(args, "mtp-num-layers", 0),
        latent=_latent(args),
        mamba=_mamba(args, hidden) if kind == "hybrid" else None,
    )


def _latent(args: Args) -> LatentAttention | None:
    """Megatron-LM's defaults are DeepSeek-V2's sizes."""
    if not _flag(args, "multi-latent-attention"):
        return None
    return LatentAttention(
        q_rank=_number(args, "q-lora-rank", 512),
        kv_rank=_number(args, "kv-lora-rank", 512),
        qk_features=_number(args, "qk-head-dim", 128),
        position_features=_number(args, "qk-pos-emb-head-dim", 64),
        v_features=_number(args, "v-head-dim", 128),
    )


def _mamba(args: Args, hidden: int) -> Mamba:
    """Megatron-LM's defaults: 128 states, 64 features per head, 8 groups, twice the width."""
    features = _number(args, "mamba-head-dim", 64)
    heads = _number(args, "mamba-num-heads", 2 * hidden // features)
    return Mamba(heads, features, _number(args, "mamba-state-dim", 128), _number(args, "mamba-num-groups", 8))


def _attention(row: Row, generation: str) -> str:
    args = row["args"]
    backend = str(args.get("attention-backend", ""))
    if _flag(args, "use-flash-attn"):
        return "flash"
    if is_local(args) or backend in ("unfused", "local"):
        return "unfused"
    if backend in ("flash", "fused"):
        return backend
    # Chosen by Transformer Engine: that of the long-term image has no deterministic kernel without scores on A100, by
    # ten of its 19 rows; the others were recorded with a later one, which nothing in a row tells.
    is_old = "lts" in str(row["source_ref"]) and generation == "ampere"
    return "unfused" if is_old and _flag(args, "deterministic-mode") else "fused"


def is_local(args: Args) -> bool:
    """Whether layers are Megatron-Core's own modules and not Transformer Engine's."""
    return args.get("transformer-impl") == "local" or args.get("spec") == "local"


def _recomputed(args: Args) -> tuple[str, ...]:
    """Raises SkippedError."""
    granularity = args.get("recompute-granularity")
    if granularity == "full":
        if args.get("recompute-method") == "block":
            raise SkippedError("some of the layers are computed again")
        return ("full",)
    modules = tuple(re.findall(r"\w+", str(args.get("recompute-modules", ""))))
    return (modules or ("core_attn",)) if granularity == "selective" else ()


def _state_bytes(args: Args) -> int:
    """Of the copy and the moments, which a precision-aware optimiser may have in other precisions."""
    keys = ("main-params-dtype", "exp-avg-dtype", "exp-avg-sq-dtype")
    return sum(STATE_BYTES[str(args.get(key, "fp32"))] for key in keys)


def setup_of(row: Row, model: Model) -> Setup:
    """Raises SkippedError, and ValueError for words that are not known."""
    args, tp, cp, name = row["args"], row["tp"], row["cp"], str(row["model"])
    generation = next((found for word, found in GENERATIONS if word in str(row["gpu"])), "")
    if not generation:
        raise SkippedError(f"gpu {row['gpu']} is not known")
    if not (_flag(args, "bf16") or _flag(args, "fp16")):
        raise SkippedError("neither bf16 nor fp16")
    ep, etp = row["ep"], _number(args, "expert-tensor-parallel-size", tp)
    dp, batch = _replicas(row, ep * etp), _number(args, "micro-batch-size", 1)
    return Setup(
        chunks=blocks_of(row, model),
        micro_batch=batch,
        tp=tp,
        pp=row["pp"],
        cp=cp,
        ep=ep,
        etp=etp,
        dp=dp,
        micro_batches=max(_number(args, "global-batch-size", 1 << 20) // (batch * dp), 1),
        group=_number(args, "microbatch-group-size-per-virtual-pipeline-stage", 0),
        precision="fp8" if "fp8-format" in args else "fp16" if _flag(args, "fp16") else "bf16",
        implementation="local" if is_local(args) else "te",
        attention=_attention(row, generation),
        fused_softmax=not _flag(args, "no-masked-softmax-fusion"),
        hidden_dropout=_dropout(row),
        attention_dropout=_dropout(row),
        sequence_parallel=_flag(args, "sequence-parallel") and tp > 1,
        distributed_optimizer=bool(row["distributed_optimizer"]),
        # By the cases' --data-parallel-sharding-strategy optim_grads_params, which args leaves out.
        sharded_parameters=_flag(args, "use-megatron-fsdp"),
        optimizer="muon" if "muon" in str(args.get("optimizer", "")) else "adam",
        optimizer_bytes=_state_bytes(args),
        host_optimizer=_host_share(args),
        optimizer_instances=2 if "multi_dist_optimizer_instances" in name else 1,
        whole_parameters=_flag(args, "no-use-layer-wise-param-layout"),
        shared_blocks=_shared(args, model),
        half_gradients=_flag(args, "grad-reduce-in-bf16") or args.get("main-grads-dtype") == "bf16",
        has_fp8_parameters=_flag(args, "fp8-param-gather"),
        fused_wgrad=not _flag(args, "no-gradient-accumulation-fusion"),
        deferred_wgrads=_number(args, "wgrad-deferral-limit", 0),
        fused_loss=_flag(args, "cross-entropy-loss-fusion"),
        overlapped_tp=_flag(args, "tp-comm-overlap"),
        # Cases with Mamba, or experts and cp, set the same workspace in their environment.
        deterministic=_flag(args, "deterministic-mode") or bool(model.mamba or (model.experts and cp > 1)),
        dense_mask="no_create_attention_mask" not in name,
        dispatcher=str(args.get("moe-token-dispatcher-type", "allgather")),
        grouped_experts=_flag(args, "moe-grouped-gemm"),
        recompute=_recomputed(args),
        offload=OFFLOADED if "fine_grained_offloading" in name else (),
        generation=generation,
    )


def _dropout(row: Row) -> float:
    """`args` leaves it out. None have released models, those that route as DeepSeek does, and cases over cp ranks that
    are neither deterministic nor hybrid."""
    args = row["args"]
    is_cut = row["cp"] > 1 and not _flag(args, "deterministic-mode") and kind_of(row) != "hybrid"
    return 0.0 if is_cut or is_release(args) or "moe-router-score-function" in args else 0.1


def _host_share(args: Args) -> float:
    return float(args.get("optimizer-offload-fraction", 1.0)) if _flag(args, "optimizer-cpu-offload") else 0.0


def _shared(args: Args, model: Model) -> int:
    """Blocks of extra predictions after the first, where one layer is repeated."""
    if not _flag(args, "mtp-use-repeated-layer"):
        return 0
    parts = str(args.get("hybrid-layer-pattern", "")).split("/")[2:]
    return sum(1 + len(part) for part in parts) if parts else 3 * (model.extra_predictions - 1)


def _replicas(row: Row, expert_ranks: int) -> int:
    """Where the number of GPUs is not given: a node's, or as many as the experts need."""
    model_ranks = row["tp"] * row["pp"] * row["cp"]
    node = 4 if "1node" in str(row["model"]) and "GB" in str(row["gpu"]) else 8
    total = row.get("gpus_total") or max(node, model_ranks, expert_ranks * row["pp"])
    if total % model_ranks:
        raise SkippedError("gpus_total is not a whole number of replicas")
    return int(total // model_ranks)


def lacks_gpus(row: Row) -> bool:
    """Whether nothing tells over how many GPUs optimiser state is sharded."""
    return not row.get("gpus_total") and is_release(row["args"]) and bool(row["distributed_optimizer"])


def case_of(row: Row) -> tuple[Model, Setup]:
    """The model of a case and the setup of its last rank, from what was asked for alone. Raises SkippedError for what
    is not described."""
    try:
        model = model_of(row)
        return model, setup_of(row, model)
    except (KeyError, ValueError) as error:
        raise error if isinstance(error, SkippedError) else SkippedError(f"arguments: {error}") from None


def on_gpus_of(row: Row, model: Model, setup: Setup) -> Setup:
    """The setup of a row that `lacks_gpus`, over as many more replicas as what stayed allocated comes closest to.

    That figure then is no prediction any more; the peak is.
    """
    measured = row["mem_allocated_gb"]
    others = [replace(setup, dp=setup.dp * 2**power) for power in range(8)]
    return min(others, key=lambda other: abs(rank_memory(model, other).allocated / 2**30 - measured))
