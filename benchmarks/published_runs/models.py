"""From a row to its model: built on meta, and traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

from autopar.frontend.trace import find_cuts, trace
from autopar.ir.graph import Graph
from benchmarks.published_runs.machines import precision_of
from benchmarks.published_runs.rows import Row, SkippedError, has_dropout, is_flash

BUILT_LAYERS = 4

FAMILIES: Sequence[tuple[str, str]] = (("bert", "BERT"), ("llama", "Llama"), ("gpt", "GPT"))
"""The first whose text is part of a row's arch_family, in lower case -> the family whose model is built."""

OTHERS = (
    "t5",
    "bart",
    "encoder-decoder",
    "vit",
    "swin",
    "clip",
    "resnet",
    "unet",
    "diffusion",
    "moe",
    "mixtral",
    "mamba",
)
"""Words of families that are none of these, however their layers look."""


def built_as(row: Row) -> str:
    """The configuration of transformers that the row's model is built from, "" where its family says how."""
    return str(row.get("config", ""))


def family_of(row: Row) -> str:
    """Other decoders have a Llama's layers where the feed-forward one has a gate, else a GPT's; `assumptions` tells.

    Raises SkippedError for what is no such model.
    """
    text = str(row["arch_family"]).lower()
    if any(word in text for word in OTHERS) or max((row.get(key) or 1) for key in ("experts", "num_experts")) > 1:
        raise SkippedError(f"architecture {row['arch_family']} is not built")
    for word, family in FAMILIES:
        if word in text:
            return family
    if row.get("ffn_gated") is None:
        raise SkippedError(f"architecture {row['arch_family']} is not built")
    return "Llama" if row["ffn_gated"] else "GPT"


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


def model_key(row: Row) -> tuple[Any, ...]:
    """Rows of equal keys are traced once."""
    if built_as(row):
        return (built_as(row), row["model"], row["seq_len"])
    family = family_of(row)
    kind = _bert_task(row) if family == "BERT" else ""
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "bias", "tied_embeddings")
    exact = "fp32" if precision_of(row) in ("fp32", "tf32") else "16"
    return (family, *(row.get(name) for name in names), kind, has_dropout(row), is_flash(row), exact)


def _bert_task(row: Row) -> str:
    """SQuAD has no vocabulary-sized head; NVIDIA's pretraining masks 20 of 128 and 80 of 512 positions."""
    if "squad" in f"{row['model']} {row['source']} {row.get('source_ref', '')}".lower() or row["seq_len"] == 384:
        return "squad"
    return "picked" if "dle" in row["framework"].lower() else "whole"


def build(row: Row) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """(model, batch of two rows), on meta. Raises SkippedError for architectures that are not known."""
    if built_as(row):
        return _configured(row)
    rate = 0.1 if has_dropout(row) else 0.0
    in_attention = 0.0 if is_flash(row) else rate
    family, seq = family_of(row), row["seq_len"]
    with torch.device("meta"):
        ids = torch.zeros(2, seq, dtype=torch.int64)
        if family == "Llama":
            return _llama(row), {"input_ids": ids, "labels": ids.clone()}
        if family == "GPT":
            config = transformers.GPT2Config(
                vocab_size=row["vocab"], n_positions=seq, n_embd=row["hidden"], n_layer=row["layers"],
                n_head=row["heads"], n_inner=row["ffn"], resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=in_attention,
                activation_function="gelu", tie_word_embeddings=row.get("tied_embeddings", True),
                bos_token_id=0, eos_token_id=0,
            )  # fmt: skip
            model: Any = transformers.GPT2LMHeadModel(config)
            model.loss_type = "ForCausalLM"
            return model, {"input_ids": ids, "labels": ids.clone()}
        return _bert(row, rate, in_attention, ids)


def _configured(row: Row) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    kind = getattr(transformers, built_as(row))
    config = kind(
        vocab_size=row["vocab"], hidden_size=row["hidden"], num_hidden_layers=row["layers"],
        num_attention_heads=row["heads"], num_key_value_heads=row["kv_heads"], tie_word_embeddings=False,
        max_position_embeddings=row["seq_len"], bos_token_id=0, eos_token_id=0, pad_token_id=None,
        **{name: value or None for name, value in row["more"].items()},  # TOML has no None
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(2, row["seq_len"], dtype=torch.int64)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model, {"input_ids": ids, "labels": ids.clone()}


def _llama(row: Row) -> nn.Module:
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


def _bert(row: Row, rate: float, in_attention: float, ids: torch.Tensor) -> tuple[nn.Module, dict[str, torch.Tensor]]:
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


def graph_of(row: Row, rows: int) -> Graph:
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
