"""From a row to its strategy and to the profile of its framework, with what had to be assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.published_runs.architectures import assumed
from benchmarks.published_runs.machines import precision_of
from benchmarks.published_runs.models import FAMILIES, built_as, family_of
from benchmarks.published_runs.rows import Row, SkippedError, attention_of, is_flash
from cost_models.framework_profiles import Framework, framework

PROFILES: Sequence[tuple[str, str]] = (
    ("nanotron", "nanotron"),
    ("torchtitan", "torchtitan"),
    ("fsdp", "fsdp"),
    ("deepspeed-zero", "deepspeed-zero3"),
    ("megatron-lm v1", "megatron-2020"),
    ("megatron-core", "megatron-2023"),
    ("nemo", "megatron-2023"),
    ("megatron-bridge", "megatron-2023"),
    ("megatron", "megatron-2021"),
    ("internevo", "internevo"),
    ("libai", "libai"),
    ("alpa", "xla"),
    ("ddp", "ddp"),
    ("deepspeed", "deepspeed-zero3"),
)
"""The first whose text is part of a row's framework, in lower case."""


SCHEDULES: Sequence[tuple[str, str]] = (
    ("gpipe", "gpipe"),
    ("zb", "zero-bubble"),
    ("zero bubble", "zero-bubble"),
    ("zero-bubble", "zero-bubble"),
    ("1f1b", "1f1b"),
)
"""The first whose text is part of a row's schedule, in lower case."""

DISPATCHES: Sequence[tuple[str, str]] = (
    ("alltoall", "all_to_all"),
    ("overlap on", "hybrid_ep_overlapped"),
    ("canonical recipe", "hybrid_ep_overlapped"),
    ("hybridep", "hybrid_ep"),
    ("deepep", "deep_ep"),
)
"""The first whose text is part of what a row says of experts' rows, in lower case. Qwen3-30B-A3B's canonical recipe
in bf16 overlaps (NVIDIA-NeMo/Megatron-Bridge@067f987d, perf_recipes/qwen/h100/qwen3_moe.py)."""

OTHER_SCHEDULES = ("half", "vshape", "v-shape", "v-min", "dualpipe", "chimera", "interlaced", "vocab", "redis")
"""Words of schedules that have stages, or a vocabulary, laid out otherwise."""


FEW_GPUS, MANY_RANKS = 16, 32
"""nanotron's runs on at most FEW_GPUS, and others without a pipeline and with fewer than MANY_RANKS of tensor
parallelism, kept what they gathered; the rest gathered again, as its revision of 27 December 2024 does and those did
that slept between messages (regret.py). Inferred from their memory, of most: rows do not tell their revision."""


def profile_of(row: Row) -> Framework:
    """Of the row's framework; without one of its own that of a like system (`assumptions` tells)."""
    text = row["framework"].lower()
    name = next((profile for word, profile in PROFILES if word in text), "")
    if not name:
        name = "fsdp" if row["zero_stage"] == 3 else "megatron-2021"
    if name == "megatron-2021" and is_flash(row):
        name = "megatron-2023"  # which it has had since
    profile = framework(name)
    is_half = name == "megatron-2023" and precision_of(row) == "fp16"  # which sums in fp32 for bf16 only
    if is_half or (name == "fsdp" and "PURE" in row["precision"]):
        profile = replace(profile, gradient_bytes=2)
    if "megatron-bridge" in text and row.get("experts"):
        profile = replace(profile, dispatches=(dispatch_of(row),))
    if name == "nanotron" and (row["gpus_total"] <= FEW_GPUS or (row["pp"] == 1 and row["tp"] < MANY_RANKS)):
        profile = replace(profile, gathers_again=False)
    if "composer" in text:
        profile = replace(profile, loss_bytes=10.0)  # llm-foundry's default is flash-attn's fused cross-entropy
    return profile


def dispatch_of(row: Row) -> str:
    """How experts' rows travel. Where a row does not say: most of Megatron-Bridge's recipes have HybridEP with
    permutation apart and no overlap (the same revision, perf_recipes)."""
    said = " ".join(str(row.get(name, "")) for name in ("dispatcher", "variant", "notes")).lower()
    return next((kind for word, kind in DISPATCHES if word in said), "deep_ep")


def strategy_of(row: Row) -> dict[str, Any]:
    """As `autopar.predict` takes it. Raises SkippedError."""
    data, size = row["dp"], row.get("zero_group")
    zero = row["zero_stage"] if data > 1 else 0
    group = size if zero and size and data % size == 0 else data
    micro, rest = divmod(row["global_batch"], row["micro_batch"] * data)
    if rest or not micro:
        raise SkippedError("global_batch is not micro_batch x dp x a whole number")
    if row["dp"] * row["tp"] * row["pp"] * row.get("cp", 1) != row["gpus_total"]:
        raise SkippedError("dp x tp x pp x cp is not gpus_total")
    strategy: dict[str, Any] = {
        "pp": row["pp"],
        "ddp": data // group,
        "dp": group,
        "tp": row["tp"],
        "zero": zero,
        "micro_batches": micro,
        "recompute": _recompute(row),
        "sp": bool(row.get("sp", False)) and row["tp"] > 1,
    }
    strategy |= {key: row[key] for key in ("cp", "ep") if row.get(key, 1) != 1}
    if "force balance" in str(row.get("notes", "")).replace("-", " "):
        strategy["expert_skew"] = 0.0
    if row["pp"] > 1:
        strategy |= _schedule(row)
    if str(row.get("offload", "none")) != "none":
        strategy["offload"] = row["offload"]
    if attention_of(row):
        strategy["attention"] = attention_of(row)
    return strategy


def _recompute(row: Row) -> str:
    known = {"none": "none", "selective []": "none", "full": "full", "selective": "selective", "op-level": "selective"}
    if row["recompute"] not in known:
        raise SkippedError(f"recompute {row['recompute']!r} is not known")
    return known[row["recompute"]]


def _schedule(row: Row) -> dict[str, Any]:
    text = str(row.get("schedule") or "1f1b").lower()
    if any(word in text for word in OTHER_SCHEDULES):
        raise SkippedError(f"schedule {row['schedule']!r} is not modelled")
    if row.get("vpp", 1) > 1 or "interleaved" in text:
        return {"schedule": "interleaved", "chunks": max(row.get("vpp", 1), 2)}
    for word, schedule in SCHEDULES:
        if word in text:
            return {"schedule": schedule}
    raise SkippedError(f"schedule {row['schedule']!r} is not known")


def assumptions(row: Row) -> Iterable[str]:
    """What a row does not say and is taken to be."""
    if "sp" not in row and row["tp"] > 1:
        yield "sp absent, taken as false"
    if not row.get("attention_impl"):
        yield f"attention_impl absent, taken as {profile_of(row).attention}"
    if row["pp"] > 1 and "schedule" not in row:
        yield "schedule absent, taken as 1f1b"
    if row["recompute"] == "op-level":
        yield "recompute op-level taken as selective"
    if row.get("zero_stage") and row["dp"] > 1 and "zero_group" not in row and row["gpus_total"] > row["gpus_per_node"]:
        yield "zero_group absent, taken as dp"
    yield from assumed(row)
    family = str(row["arch_family"]).lower()
    if not built_as(row) and not any(word in family for word, _ in FAMILIES):
        yield f"architecture {row['arch_family']} built as a {family_of(row)}"
    text = row["framework"].lower()
    if not any(word in text for word, _ in PROFILES):
        yield f"framework {row['framework']} under the profile {profile_of(row).name}"
