"""Rows of published runs as they are written, and what their words say of attention and dropout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.published_runs.architectures import completed

Row = Mapping[str, Any]
"""One run, in the form of shared/data/measured_runs.jsonl."""

NEEDED = (
    "source", "framework", "arch_family", "layers", "hidden", "heads", "ffn", "vocab", "seq_len", "precision", "gpu",
    "gpus_total", "gpus_per_node", "dp", "tp", "pp", "zero_stage", "micro_batch", "global_batch", "recompute",
)  # fmt: skip

DROPOUT = ("megatron", "libai", "dle", "aceso")
"""Frameworks whose published configurations train with dropout of 0.1, of their time and by default."""


class SkippedError(ValueError):
    """A row that cannot be predicted, and why."""


def read(path: str, source: str | None) -> list[dict[str, Any]]:
    """Rows of a file, one JSON object per line, with what their pages leave out (architectures.toml)."""
    rows = [completed(json.loads(line)) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return [row for row in rows if source is None or source.lower() in str(row.get("source", "")).lower()]


def has_dropout(row: Row) -> bool:
    """Whether the framework's runs of the time had dropout."""
    return any(word in row["framework"].lower() for word in DROPOUT)


def attention_of(row: Row) -> str:
    """The row's attention kernel, or "" for the framework's own."""
    text = str(row.get("attention_impl", "")).lower()
    if not text:
        return ""
    if "flash" not in text or "no flash" in text:
        return "unfused"
    return "triton" if "triton" in text else "fa3" if "attn3" in text or "fa3" in text else "fa2"


def is_flash(row: Row) -> bool:
    """Whether the row says that its attention is fused."""
    return attention_of(row) not in ("", "unfused")
