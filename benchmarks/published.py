"""Predictions against published training runs.

    python -m benchmarks.published --rows FILE [--source NAME] [--leave-one-source-out] [--csv]

FILE has one run per line, in the form of shared/data/measured_runs.jsonl. The model of each row is built on meta, its
strategy is scored under the profile of its framework, and printed are, per source: rows, skipped rows with the reason,
median and 90th-percentile absolute relative error of step time, signed bias, the same for memory by kind of
measurement, and Kendall's tau of the ranking among rows that share model and GPUs. A row that lacks what a prediction
needs is skipped and says so. What had to be assumed for rows that are used is printed, too.

--leave-one-source-out: rates of kernels by architecture are fitted to the rows (fit_rates) once with all sources, and
once without each source, which is then predicted; sources weigh the same whatever their number of rows. Predictions
have no such rates: they only show what kernels seem to take in training steps.
--csv writes every row to benchmarks/results/published.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from autopar.costs.block_costs import RECOMPUTATION
from autopar.costs.stage_costs import BUBBLE
from autopar.errors import AutoparError
from autopar.graph import Graph
from autopar.plan import Prediction
from autopar.simulate import Predictor
from autopar.simulate.stages import HOST
from autopar.tracing.rebatch import BatchedTrace
from autopar.tracing.trace import find_cuts, trace
from cost_models import catalog
from cost_models.frameworks import Framework, architecture, framework
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster

RESULTS = Path(__file__).resolve().parent / "results" / "published.csv"
EXTRA_DEVICES = Path(__file__).resolve().parent / "published_devices.toml"
NEEDED = (
    "source", "framework", "arch_family", "layers", "hidden", "heads", "ffn", "vocab", "seq_len", "precision", "gpu",
    "gpus_total", "gpus_per_node", "dp", "tp", "pp", "zero_stage", "micro_batch", "global_batch", "recompute",
)  # fmt: skip

DEVICES: Mapping[str, str] = {
    "V100-32GB": "v100-32g",
    "V100-16GB": "v100-16g",
    "A100-40GB": "a100-40g",
    "A100-80GB": "a100-80g",
    "A100-40GB-PCIe": "a100-40g-pcie",
    "A100-80GB-PCIe": "a100-80g-pcie",
    "H100-80GB": "h100-sxm",
    "H100-80GB-PCIe": "h100-pcie",
    "H200-141GB": "h200-sxm",
    "B200-192GB": "b200",
    "L4-24GB": "l4",
    "L4": "l4",
    "L40S-48GB": "l40s",
    "A10G-24GB": "a10g",
    "A10-24GB": "a10",
    "RTX3090-24GB": "rtx3090",
    "RTX4090-24GB": "rtx4090",
    "A6000-48GB": "a6000",
    "RTX6000Ada-48GB": "rtx6000-ada",
    "RTX8000-48GB": "rtx8000",
}
"""A row's gpu -> a device of the catalogue or of published_devices.toml."""

FAMILIES: Mapping[str, Mapping[str, str]] = {
    "V100": {"16": "v100-16g", "32": "v100-32g"},
    "A100": {"40": "a100-40g", "80": "a100-80g"},
    "A800": {"40": "a100-40g", "80": "a100-80g"},
    "H100": {"80": "h100-sxm"},
    "H800": {"80": "h100-sxm"},
    "H200": {"141": "h200-sxm"},
}
"""Beginning of a row's gpu that is not in DEVICES -> by gpu_mem_gb; A800 and H800 differ in their links."""

PROFILES: Sequence[tuple[str, str]] = (
    ("nanotron", "nanotron"),
    ("torchtitan", "torchtitan"),
    ("fsdp", "fsdp"),
    ("deepspeed-zero", "deepspeed-zero3"),
    ("megatron-lm v1", "megatron-2020"),
    ("megatron-core", "megatron-2023"),
    ("nemo", "megatron-2023"),
    ("megatron", "megatron-2021"),
    ("internevo", "megatron-2023"),
    ("libai", "libai"),
    ("alpa", "xla"),
    ("ddp", "ddp"),
    ("deepspeed", "deepspeed-zero3"),
)
"""The first whose text is part of a row's framework, in lower case."""

DROPOUT = ("megatron", "libai", "dle", "aceso")
"""Frameworks whose published configurations train with dropout of 0.1, of their time and by default."""

LINKS: Sequence[tuple[str, str]] = (
    ("hf cluster", "efa-400g"),
    ("efa", "efa-400g"),
    ("infiniband", "ib-200g"),
    ("omni-path", "ib-100g"),
    ("roce", "roce-100g"),
    ("ethernet", "ethernet-25g"),
    ("ib", "ib-200g"),
)
"""The first whose text is part of a row's inter_node, in lower case; its rate is the row's where that is known."""


BUILT_LAYERS = 4


class SkippedError(ValueError):
    """A row that cannot be predicted, and why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One predicted row."""

    row: Mapping[str, Any]
    prediction: Prediction
    architecture: str

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def error(self) -> float:
        """Signed, relative."""
        return self.seconds / float(self.row["iter_time_s"]) - 1


# --- from a row to its model ------------------------------------------------------------------------------------------


class PickedBert(nn.Module):
    """BERT whose language-model head sees only the masked positions, as NVIDIA's pretraining does."""

    def __init__(self, config: Any, picked: int) -> None:
        super().__init__()
        self.bert = transformers.BertModel(config, add_pooling_layer=False)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.head.weight = self.bert.embeddings.word_embeddings.weight
        self.picked = picked

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states = self.bert(input_ids=input_ids).last_hidden_state[:, : self.picked]
        states = self.norm(nn.functional.gelu(self.dense(states)))
        logits = self.head(states)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, : self.picked].flatten())


def model_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Rows of equal keys are traced once."""
    kind = _bert_task(row) if row["arch_family"] == "BERT" else ""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "bias", "tied_embeddings")
    exact = "fp32" if precision_of(row) in ("fp32", "tf32") else "16"
    return (row["arch_family"], *(row.get(name) for name in names), kind, has_dropout(row), _is_flash(row), exact)


def _bert_task(row: Mapping[str, Any]) -> str:
    """SQuAD has no vocabulary-sized head; NVIDIA's pretraining masks 20 of 128 and 80 of 512 positions."""
    if "squad" in f"{row['model']} {row['source']} {row.get('source_ref', '')}".lower() or row["seq_len"] == 384:
        return "squad"
    return "picked" if "dle" in row["framework"].lower() else "whole"


def has_dropout(row: Mapping[str, Any]) -> bool:
    """Whether the framework's runs of the time had dropout."""
    return any(word in row["framework"].lower() for word in DROPOUT)


def _is_flash(row: Mapping[str, Any]) -> bool:
    return attention_of(row) not in ("", "unfused")


def attention_of(row: Mapping[str, Any]) -> str:
    """The row's attention kernel, or "" for the framework's own."""
    text = str(row.get("attention_impl", "")).lower()
    if not text:
        return ""
    if "flash" not in text or "no flash" in text:
        return "unfused"
    return "triton" if "triton" in text else "fa3" if "attn3" in text or "fa3" in text else "fa2"


def build(row: Mapping[str, Any]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """(model, batch of two rows), on meta. Raises SkippedError for architectures that are not known."""
    rate = 0.1 if has_dropout(row) else 0.0
    in_attention = 0.0 if _is_flash(row) else rate
    family, seq = row["arch_family"], row["seq_len"]
    with torch.device("meta"):
        ids = torch.zeros(2, seq, dtype=torch.int64)
        if family == "Llama":
            return _llama(row), {"input_ids": ids, "labels": ids.clone()}
        if family.startswith("GPT"):
            config = transformers.GPT2Config(
                vocab_size=row["vocab"], n_positions=seq, n_embd=row["hidden"], n_layer=row["layers"],
                n_head=row["heads"], n_inner=row["ffn"], resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=in_attention,
                activation_function="gelu", tie_word_embeddings=row.get("tied_embeddings", True),
                bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            model: Any = transformers.GPT2LMHeadModel(config)
            model.loss_type = "ForCausalLM"
            return model, {"input_ids": ids, "labels": ids.clone()}
        if family == "BERT":
            return _bert(row, rate, in_attention, ids)
    raise SkippedError(f"architecture {family} is not built")


def _llama(row: Mapping[str, Any]) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=row["vocab"], hidden_size=row["hidden"], intermediate_size=row["ffn"],
        num_hidden_layers=row["layers"], num_attention_heads=row["heads"],
        num_key_value_heads=row.get("kv_heads", row["heads"]), max_position_embeddings=row["seq_len"],
        attention_bias=bool(row.get("bias", False)), tie_word_embeddings=row.get("tied_embeddings", False),
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    for module in list(model.modules()):  # training frameworks have the norm as one kernel
        for name, child in module.named_children():
            if "RMSNorm" in type(child).__name__:
                setattr(module, name, nn.RMSNorm(row["hidden"], eps=1e-6))
    return model


def _bert(
    row: Mapping[str, Any], rate: float, in_attention: float, ids: torch.Tensor
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = transformers.BertConfig(
        vocab_size=row["vocab"], hidden_size=row["hidden"], num_hidden_layers=row["layers"],
        num_attention_heads=row["heads"], intermediate_size=row["ffn"],
        max_position_embeddings=max(row["seq_len"], 512), hidden_dropout_prob=rate,
        attention_probs_dropout_prob=in_attention,
    )  # fmt: skip
    task = _bert_task(row)
    if task == "squad":
        model: nn.Module = transformers.BertForQuestionAnswering(config)
        first = ids[:, 0].clone()
        return model, {"input_ids": ids, "start_positions": first, "end_positions": first.clone()}
    if task == "picked":
        return PickedBert(config, 20 if row["seq_len"] <= 128 else 80), {"input_ids": ids, "labels": ids.clone()}
    return transformers.BertForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


def graph_of(row: Mapping[str, Any], rows: int) -> Graph:
    """The row's model traced at a batch of `rows`: built with a few layers, and extended."""
    depth = min(row["layers"], BUILT_LAYERS)
    model, batch = build({**row, "layers": depth})
    dtype = None if precision_of(row) in ("fp32", "tf32") else torch.bfloat16
    cuts = find_cuts(model, batch)
    if depth < row["layers"] and len(cuts) != 1:
        model, batch = build(row)
        cuts = find_cuts(model, batch)
    deep = tuple(replace(cut, num_blocks=row["layers"]) for cut in cuts)
    return trace(model, batch, batch_size=rows, param_dtype=dtype, cuts=deep)


def share_of(row: Mapping[str, Any], cp: int, ep: int) -> BatchedTrace:
    """`graph_of` with the cp-th part of the tokens. Raises SkippedError for what no row has described yet."""
    if ep > 1:
        raise SkippedError("ep, but the row's architecture has no experts")
    if row["seq_len"] % cp:
        raise SkippedError("cp does not divide seq_len")
    return BatchedTrace(partial(graph_of, {**row, "seq_len": row["seq_len"] // cp}))


# --- from a row to its cluster, strategy and profile ------------------------------------------------------------------


def devices() -> Mapping[str, Device]:
    """Those of the catalogue, and workstation cards that only these rows have."""
    import tomllib

    tables = tomllib.loads(EXTRA_DEVICES.read_text(encoding="utf-8"))
    found = dict(catalog.devices())
    for name, table in tables.items():
        if name not in found:
            base = found[table.pop("like")]
            peaks = {**base.peak_flops_per_second, **table.pop("peak_flops_per_second", {})}
            found[name] = replace(base, name=name, peak_flops_per_second=peaks, **table)
    return found


def device_of(row: Mapping[str, Any]) -> Device:
    """Raises SkippedError."""
    known, text = devices(), str(row["gpu"])
    name = DEVICES.get(max((key for key in DEVICES if text.startswith(key)), key=len, default=""))
    for start, sizes in FAMILIES.items():
        if name is None and text.startswith(start):
            name = sizes.get(str(row.get("gpu_mem_gb")))
    if name is None or name not in known:
        raise SkippedError(f"gpu {row['gpu']} is not in the catalogue")
    return known[name]


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    """Raises SkippedError where a link that matters is not described."""
    device, total, per_node = device_of(row), row["gpus_total"], row["gpus_per_node"]
    if total > per_node and total % per_node:
        raise SkippedError("gpus_total is not whole nodes")
    nodes = max(total // per_node, 1)
    intra = _intra(row, device)
    inter = _inter(row) if nodes > 1 else catalog.link(device.inter_link)
    return Cluster(device, nodes, min(per_node, total), intra, inter)


def _intra(row: Mapping[str, Any], device: Device) -> Link:
    text = str(row.get("intra_node", "")).lower()
    usual = catalog.link(device.intra_link)
    if row["gpus_total"] == 1 or row["gpus_per_node"] == 1:
        return usual
    if not text and "intra_bw_gbs" not in row:
        raise SkippedError("neither intra_node nor intra_bw_gbs is given")
    is_mesh = "mesh" in text or (usual.name == "nvlink2" and row["gpus_per_node"] == 8 and "switch" not in text)
    if is_mesh:
        return catalog.link("nvlink2-mesh")
    if "pcie" in text and usual.name.startswith("nvlink"):
        return catalog.link("pcie4")
    rate = row.get("intra_bw_gbs")
    if rate and usual.name.startswith("nvlink") and abs(usual.bytes_per_second / (rate * 0.5e9) - 1) > 0.1:
        return replace(usual, bytes_per_second=rate * 0.5e9)  # both directions are counted in intra_bw_gbs
    return usual


def _inter(row: Mapping[str, Any]) -> Link:
    text = str(row.get("inter_node", "")).lower()
    rate = row.get("inter_bw_gbps_per_node")
    name = next((link for word, link in LINKS if word in text), "ib-200g" if rate else "")
    if not name:
        raise SkippedError("the link between nodes is not given")
    link = catalog.link(name)
    return replace(link, bytes_per_second=rate / 8 * 1e9 / row["gpus_per_node"], shared_by_node=False) if rate else link


def precision_of(row: Mapping[str, Any]) -> str:
    """Raises SkippedError."""
    text = row["precision"].lower()
    if text.startswith(("amp_fp8", "fp8")):
        return "fp8"
    if text.startswith(("bf16", "amp_bf16")):
        return "bf16"
    if text.startswith(("fp16", "amp_fp16")):
        return "fp16"
    if text.startswith("tf32"):
        return "tf32"
    if text.startswith("fp32"):
        return "tf32" if "tf32" in text and "tf32" in device_of(row).peak_flops_per_second else "fp32"
    raise SkippedError(f"precision {row['precision']!r} is not known")


def profile_of(row: Mapping[str, Any]) -> Framework:
    """Of the row's framework; without one of its own that of a like system (`assumptions` tells)."""
    text = row["framework"].lower()
    name = next((profile for word, profile in PROFILES if word in text), "")
    if not name:
        name = "fsdp" if row["zero_stage"] == 3 else "megatron-2021"
    if name == "megatron-2021" and attention_of(row) not in ("", "unfused"):
        name = "megatron-2023"  # which it has had since
    profile = framework(name)
    is_half = name == "megatron-2023" and precision_of(row) == "fp16"  # which sums in fp32 for bf16 only
    if is_half or (name == "fsdp" and "PURE" in row["precision"]):
        profile = replace(profile, gradient_bytes=2)
    if "composer" in text:
        profile = replace(profile, loss_bytes=10.0)  # llm-foundry's default is flash-attn's fused cross-entropy
    return profile


def strategy_of(row: Mapping[str, Any]) -> dict[str, Any]:
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
    if row["pp"] > 1:
        strategy |= _schedule(row)
    if str(row.get("offload", "none")) != "none":
        strategy["offload"] = row["offload"]
    if attention_of(row):
        strategy["attention"] = attention_of(row)
    return strategy


def _recompute(row: Mapping[str, Any]) -> str:
    known = {"none": "none", "full": "full", "selective": "selective", "op-level": "selective"}
    if row["recompute"] not in known:
        raise SkippedError(f"recompute {row['recompute']!r} is not known")
    return known[row["recompute"]]


def _schedule(row: Mapping[str, Any]) -> dict[str, Any]:
    text = str(row.get("schedule", "")).lower()
    if row.get("vpp", 1) > 1 or "interleaved" in text:
        return {"schedule": "interleaved", "chunks": max(row.get("vpp", 1), 2)}
    if "gpipe" in text:
        return {"schedule": "gpipe"}
    return {"schedule": "1f1b"}


def assumptions(row: Mapping[str, Any]) -> Iterable[str]:
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
    text = row["framework"].lower()
    if "internevo" in text or not any(word in text for word, _ in PROFILES):
        yield f"framework {row['framework']} under the profile {profile_of(row).name}"


# --- predictions ------------------------------------------------------------------------------------------------------


def check(row: Mapping[str, Any]) -> None:
    """Raises SkippedError for rows without what is needed, and for runs that failed."""
    missing = [name for name in NEEDED if row.get(name) is None]
    if missing:
        raise SkippedError(f"missing {', '.join(missing)}")
    if row.get("status", "ok") != "ok":
        raise SkippedError(f"status {row['status']}")
    if not row.get("iter_time_s"):
        raise SkippedError("missing iter_time_s")
    if utilisation(row) > 1:
        raise SkippedError("more FLOP/s than the device has")


def utilisation(row: Mapping[str, Any]) -> float:
    """Least floating-point operations of the row, by the peak of its GPUs."""
    h, s, gates = row["hidden"], row["seq_len"], 2 if row.get("ffn_gated") else 1
    weights = (
        row["layers"] * h * (h * (2 + 2 * row.get("kv_heads", row["heads"]) / row["heads"]) + row["ffn"] * (gates + 1))
    )
    flops = 6 * row["global_batch"] * s * (weights + row["layers"] * s * h)
    peak = device_of(row).peak(precision_of(row)) * row["gpus_total"]
    return float(flops / peak / row["iter_time_s"])


@dataclass
class Predictions:
    """All rows of a file, each model traced once."""

    predictors: dict[Any, Predictor] = field(default_factory=dict)
    trace_seconds: float = 0.0
    score_seconds: float = 0.0

    def outcome(self, row: Mapping[str, Any]) -> Outcome:
        """Raises SkippedError."""
        check(row)
        cluster, strategy, profile = cluster_of(row), strategy_of(row), profile_of(row)
        predictor = self.predictor(row)
        started = time.perf_counter()
        try:
            found = predictor.predict(
                cluster, strategy, global_batch_size=row["global_batch"], framework=profile,
                precision=precision_of(row),
            )  # fmt: skip
        except AutoparError as error:
            raise SkippedError(str(error).splitlines()[0]) from None
        self.score_seconds += time.perf_counter() - started
        return Outcome(row, found, architecture(cluster.device.name))

    def predictor(self, row: Mapping[str, Any]) -> Predictor:
        """Of the row's model."""
        key = model_key(row)
        if key not in self.predictors:
            started = time.perf_counter()
            traced = BatchedTrace(partial(graph_of, row))
            self.predictors[key] = Predictor.of_trace(traced, 2, precision_of(row), partial(share_of, row))
            self.trace_seconds += time.perf_counter() - started
        return self.predictors[key]


# --- what is printed --------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest above."""
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)) - 1, len(ordered) - 1)] if ordered else math.nan


def tau(pairs: Iterable[tuple[Any, float, float]]) -> tuple[float, int]:
    """Kendall's tau-a of (group, measured, predicted) within groups, ties of the measurement left out; and the number
    of pairs."""
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for group, measured, predicted in pairs:
        groups[group].append((measured, predicted))
    agreeing = count = 0
    for members in groups.values():
        for i, (measured, predicted) in enumerate(members):
            for other, guess in members[:i]:
                if measured != other:
                    count += 1
                    agreeing += 1 if (measured - other) * (predicted - guess) > 0 else -1
    return (agreeing / count if count else math.nan), count


def group_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Rows of equal groups are compared in rank, by seconds per row of the batch."""
    return row["model"], row["gpu"], row["gpus_total"], row["seq_len"], row["precision"]


def tau_of(outcomes: Iterable[Outcome], seconds: Mapping[str, float] | None = None) -> tuple[float, int]:
    """Over all groups together."""
    rows = list(outcomes)
    return tau(
        (
            group_of(o.row),
            o.row["iter_time_s"] / o.row["global_batch"],
            (seconds[o.row["id"]] if seconds else o.seconds) / o.row["global_batch"],
        )
        for o in rows
    )


def memory_kind(row: Mapping[str, Any]) -> str:
    """What of the predicted bytes a row's figure is to be compared with; "" if there is none."""
    text = str(row.get("mem_kind", "")).lower()
    if row.get("mem_gb") is None:
        return ""
    if "allocated max" in text or "max allocated" in text:
        return "allocated (beside reserved)"
    for word, kind in (("nvidia-smi", "nvidia-smi"), ("compile-time", "XLA estimate"), ("xla", "XLA peak")):
        if word in text:
            return kind
    return "reserved" if "reserved" in text and "allocated" not in text else "allocated or not stated"


def measured_bytes(row: Mapping[str, Any]) -> float:
    """Of the row's figure; of the allocated one where the text has it."""
    text = str(row.get("mem_kind", ""))
    found = re.search(r"allocated(?: max)? (\d+(?:\.\d+)?)", text)
    value = float(found.group(1)) if found else float(row["mem_gb"])
    return value * (2**30 if "GiB" in str(row.get("mem_unit")) or found else 1e9)


def predicted_bytes(outcome: Outcome) -> float:
    """Comparable with `measured_bytes`: nvidia-smi also sees the context and what the allocator holds."""
    kinds, kind = outcome.prediction.num_bytes, memory_kind(outcome.row)
    allocated = sum(value for name, value in kinds.items() if name != "workspace")
    if kind == "nvidia-smi":
        return allocated + kinds.get("workspace", 0.0)
    return allocated


def show(outcomes: Sequence[Outcome], skipped: Sequence[tuple[Mapping[str, Any], str]]) -> None:
    """The tables."""
    sources = list(dict.fromkeys([o.row["source"] for o in outcomes] + [str(r.get("source")) for r, _ in skipped]))
    print(f"{'source':48} rows skip   median     p90    bias     tau (pairs)")
    medians = []
    for source in sources:
        own = [o for o in outcomes if o.row["source"] == source]
        left = Counter(reason for row, reason in skipped if row.get("source") == source)
        if own:
            errors = [o.error for o in own]
            medians.append(statistics.median(map(abs, errors)))
            ranking, pairs = tau_of(own)
            print(
                f"{source[:48]:48} {len(own):4} {sum(left.values()):4} {medians[-1]:8.1%} "
                f"{percentile([abs(e) for e in errors], 0.9):7.1%} {statistics.median(errors):+7.1%} "
                f"{ranking:7.2f} ({pairs})"
            )
        for reason, count in left.items():
            print(f"    skipped {count}: {reason}")
        for text, count in Counter(text for o in own for text in assumptions(o.row)).items():
            print(f"    {count} rows: {text}")
    if medians:
        print(f"mean over {len(medians)} sources of the median error {statistics.fmean(medians):.1%}")
    _show_memory(outcomes)


def _show_memory(outcomes: Sequence[Outcome]) -> None:
    tables: dict[tuple[str, str], list[float]] = defaultdict(list)
    for o in outcomes:
        if memory_kind(o.row):
            tables[o.row["source"], memory_kind(o.row)].append(predicted_bytes(o) / measured_bytes(o.row) - 1)
    if tables:
        print(f"\n{'memory: source and kind':76} rows   median     p90    bias")
    for (source, kind), errors in tables.items():
        sizes = [abs(e) for e in errors]
        print(
            f"{f'{source}, {kind}'[:76]:76} {len(errors):4} {statistics.median(sizes):8.1%} "
            f"{percentile(sizes, 0.9):7.1%} {statistics.median(errors):+7.1%}"
        )


# --- fitted rates -----------------------------------------------------------------------------------------------------

Rates = Mapping[tuple[str, str], float]
"""(architecture, kind of kernel) -> by what its predicted seconds are multiplied."""

SCALED = ("matmuls", "attention", "memory-bound kernels")
STEPS = (1.25, 1.08, 1.03)
LIMITS = (0.4, 2.5)


def kernel_kinds(outcome: Outcome) -> dict[str, float]:
    """Seconds of forward and backward by kind of kernel; the attention kernels are told apart."""
    seconds = outcome.prediction.seconds
    variant = (attention_of(outcome.row) or profile_of(outcome.row).attention).replace("flash", "fa2")
    found = {}
    for kind in SCALED:
        name = f"{variant} attention" if kind == "attention" else kind
        found[name] = seconds.get(f"forward {kind}", 0.0) + seconds.get(f"backward {kind}", 0.0)
    return found


def scaled_seconds(outcome: Outcome, rates: Rates) -> float:
    """The step if kernels took other times: recomputation and bubbles scale with what they repeat and wait for, the
    optimiser with memory-bound kernels, and the host's floor stays."""
    seconds, kernels = outcome.prediction.seconds, kernel_kinds(outcome)
    before = sum(kernels.values())
    after = sum(value * rates.get((outcome.architecture, kind), 1.0) for kind, value in kernels.items())
    ratio = after / before if before else 1.0
    memory = rates.get((outcome.architecture, "memory-bound kernels"), 1.0)
    again, late, idle = (seconds.get(kind, 0.0) for kind in (RECOMPUTATION, HOST, BUBBLE))
    update = seconds.get("optimizer", 0.0)
    other = outcome.seconds - before - again - late - idle - update
    late_after = max(late + before + again - (before + again) * ratio, 0.0) if late else 0.0
    busy, busy_after = before + again + late + other, after + again * ratio + late_after + other
    return busy_after + idle * (busy_after / busy if busy else 1.0) + update * memory


def loss(outcomes: Sequence[Outcome], rates: Rates) -> float:
    """Mean over sources of the mean absolute logarithm of predicted by measured, each row's at most 1."""
    logs: dict[str, list[float]] = defaultdict(list)
    for o in outcomes:
        logs[o.row["source"]].append(min(abs(math.log(scaled_seconds(o, rates) / o.row["iter_time_s"])), 1.0))
    return statistics.fmean(statistics.fmean(values) for values in logs.values())


def fit_rates(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], float]:
    """Multipliers that minimise `loss`, one at a time by smaller and smaller steps from 1."""
    keys = sorted({(o.architecture, kind) for o in outcomes for kind, value in kernel_kinds(o).items() if value})
    rates = dict.fromkeys(keys, 1.0)
    own = {key: [o for o in outcomes if o.architecture == key[0]] for key in keys}
    weight = Counter(o.row["source"] for o in outcomes)

    def part(key: tuple[str, str], tried: Rates) -> float:
        return sum(
            min(abs(math.log(scaled_seconds(o, tried) / o.row["iter_time_s"])), 1.0) / weight[o.row["source"]]
            for o in own[key]
        )

    for step in STEPS:
        for _ in range(3):
            moved = False
            for key in keys:
                best = part(key, rates)
                for factor in (step, 1 / step):
                    tried = {**rates, key: min(max(rates[key] * factor, LIMITS[0]), LIMITS[1])}
                    if part(key, tried) < best - 1e-6:
                        rates, moved = tried, True
                        break
            if not moved:
                break
    return rates


def leave_one_out(outcomes: Sequence[Outcome], everywhere: Rates) -> dict[str, float]:
    """Row id -> seconds with rates fitted without the row's source; prints both errors. everywhere: fitted
    to all of them."""
    found: dict[str, float] = {}
    print(f"\n{len(everywhere)} rates fitted to {len(outcomes)} rows:")
    print("    " + ", ".join(f"{owner} {kind} {rate:.2f}" for (owner, kind), rate in everywhere.items()))
    print(f"{'source':48} rows unfitted  fitted  left out     p90    bias     tau (pairs)")
    medians = []
    for source in dict.fromkeys(o.row["source"] for o in outcomes):
        own = [o for o in outcomes if o.row["source"] == source]
        rates = fit_rates([o for o in outcomes if o.row["source"] != source])
        seconds = {o.row["id"]: scaled_seconds(o, rates) for o in own}
        errors = [seconds[o.row["id"]] / o.row["iter_time_s"] - 1 for o in own]
        fitted = [abs(scaled_seconds(o, everywhere) / o.row["iter_time_s"] - 1) for o in own]
        medians.append(statistics.median(map(abs, errors)))
        ranking, pairs = tau_of(own, seconds)
        print(
            f"{source[:48]:48} {len(own):4} {statistics.median(abs(o.error) for o in own):8.1%} "
            f"{statistics.median(fitted):7.1%} {medians[-1]:9.1%} {percentile([abs(e) for e in errors], 0.9):7.1%} "
            f"{statistics.median(errors):+7.1%} {ranking:7.2f} ({pairs})"
        )
        found |= seconds
    print(f"mean over {len(medians)} sources of the median error, left out: {statistics.fmean(medians):.1%}")
    return found


def write(
    outcomes: Sequence[Outcome], skipped: Sequence[tuple[Mapping[str, Any], str]], left_out: Mapping[str, float]
) -> None:
    """All rows, to RESULTS."""
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        head = ["id", "source", "model", "gpu", "gpus", "measured_seconds", "predicted_seconds", "left_out_seconds"]
        writer.writerow([*head, "measured_gib", "predicted_gib", "memory_kind", "skipped"])
        for o in outcomes:
            row, kind = o.row, memory_kind(o.row)
            names = [row["id"], row["source"], row["model"], row["gpu"], row["gpus_total"], row["iter_time_s"]]
            left = f"{left_out[row['id']]:.5g}" if row["id"] in left_out else ""
            size = f"{measured_bytes(row) / 2**30:.3f}" if kind else ""
            writer.writerow([*names, f"{o.seconds:.5g}", left, size, f"{predicted_bytes(o) / 2**30:.3f}", kind, ""])
        for row, reason in skipped:
            names = [row.get(key, "") for key in ("id", "source", "model", "gpu", "gpus_total", "iter_time_s")]
            writer.writerow([*names, "", "", "", "", "", reason])


def read(path: str, source: str | None) -> list[dict[str, Any]]:
    """Rows of a file, one JSON object per line."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if source is None or source.lower() in str(row.get("source", "")).lower()]


def predict_rows(
    rows: Iterable[Mapping[str, Any]], predictions: Predictions | None = None
) -> tuple[list[Outcome], list[tuple[Mapping[str, Any], str]], Predictions]:
    """(predicted rows, skipped rows with the reason)."""
    outcomes, skipped = list[Outcome](), list[tuple[Mapping[str, Any], str]]()
    predictions = predictions or Predictions()
    for row in rows:
        try:
            outcomes.append(predictions.outcome(row))
        except SkippedError as error:
            skipped.append((row, str(error)))
    return outcomes, skipped, predictions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", required=True, help="a file of runs, one JSON object per line")
    parser.add_argument("--source", help="only rows whose source contains this text")
    parser.add_argument("--leave-one-source-out", action="store_true")
    parser.add_argument("--csv", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    outcomes, skipped, predictions = predict_rows(read(options.rows, options.source))
    show(outcomes, skipped)
    print(
        f"\n{len(predictions.predictors)} models traced in {predictions.trace_seconds:.0f} s, "
        f"{len(outcomes)} rows predicted in {predictions.score_seconds:.1f} s"
    )
    left_out = leave_one_out(outcomes, fit_rates(outcomes)) if options.leave_one_source_out else {}
    if options.csv:
        write(outcomes, skipped, left_out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
