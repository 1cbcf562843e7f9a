"""Sizes of models and nodes of machines that rows only name (architectures.toml)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).resolve().parent / "architectures.toml"
FRAMEWORKS = ("megatron-bridge", "megatron-core moe")
"""Texts of rows' frameworks whose pages give model, GPU and degrees alone."""
SIZES = ("layers", "hidden", "heads", "ffn", "vocab")
NAMELESS = ("words", "source")


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


def architecture_of(model: str) -> Mapping[str, Any] | None:
    """The sizes of a model by its name, None for one that architectures.toml does not have."""
    text = re.sub(r"[-_ ]", "", model.lower())
    found = _tables()["models"].values()
    return next((table for table in found if all(word in text for word in table["words"])), None)


def machine_of(gpu: str) -> Mapping[str, Any] | None:
    """The node of a GPU by its name, None for one that architectures.toml does not have."""
    tables = _tables()["machines"]
    return next((tables[name] for name in sorted(tables, key=len, reverse=True) if name in gpu), None)


def completed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with what its page leaves out; other frameworks' rows, and fields that it has, stay as they are."""
    text = str(row.get("framework", "")).lower()
    if not any(word in text for word in FRAMEWORKS) or "args" in row:
        return dict(row)
    found: dict[str, Any] = {}
    for table in (architecture_of(str(row.get("model", ""))), machine_of(str(row.get("gpu", "")))):
        found |= {key: value for key, value in (table or {}).items() if key not in NAMELESS}
    if {"gpus_total", "tp", "pp", "cp"} <= row.keys():
        found["dp"] = row["gpus_total"] // (row["tp"] * row["pp"] * row["cp"])
    found |= {"zero_stage": 3 if row.get("fsdp") else 1, "recompute": "none"}
    return {**found, **row, "left_out": True}


def assumed(row: Mapping[str, Any]) -> Iterable[str]:
    """What `completed` takes the row to be."""
    if row.get("left_out"):
        yield f"zero_stage taken as {row['zero_stage']}"
        if row["recompute"] == "none":
            yield "recompute absent, taken as none"
