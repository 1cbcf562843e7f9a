"""How near predictions are to measurements: errors, ranks, and bytes of the same kind."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.published_runs.predictions import Outcome
from benchmarks.published_runs.rows import Row
from cost_models.memory import FRAGMENTATION


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


def group_of(row: Row) -> tuple[Any, ...]:
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


def memory_kind(row: Row) -> str:
    """What of the predicted bytes a row's figure is to be compared with; "" if there is none."""
    text = str(row.get("mem_kind", "")).lower()
    if row.get("mem_gb") is None:
        return ""
    if "allocated max" in text or "max allocated" in text:
        return "allocated (beside reserved)"
    if _is_nanotron(row):
        return "reserved on the first rank (inferred)"
    for word, kind in (("nvidia-smi", "nvidia-smi"), ("compile-time", "XLA estimate"), ("xla", "XLA peak")):
        if word in text:
            return kind
    return "reserved" if "reserved" in text and "allocated" not in text else "allocated or not stated"


def measured_bytes(row: Row) -> float:
    """Of the row's figure; of the allocated one where the text has it."""
    text = str(row.get("mem_kind", ""))
    found = re.search(r"allocated(?: max)? (\d+(?:\.\d+)?)", text)
    value = float(found.group(1)) if found else float(row["mem_gb"])
    return value * (2**30 if "GiB" in str(row.get("mem_unit")) or found or _is_nanotron(row) else 1e9)


def _is_nanotron(row: Row) -> bool:
    """nanotron's first rank writes the table of a benchmark, in units of 2^30 that it calls GB (helpers.py,
    create_table_log). Which of its two columns rows have is not stated; what the allocator reserved fits better."""
    return "nanotron" in str(row["framework"]).lower()


def predicted_bytes(outcome: Outcome) -> float:
    """Comparable with `measured_bytes`: nvidia-smi also sees the context and what the allocator holds."""
    kinds, kind = outcome.prediction.num_bytes, memory_kind(outcome.row)
    if _is_nanotron(outcome.row):
        kinds = (outcome.prediction.pipeline_ranks or (kinds,))[0]
    allocated = sum(value for name, value in kinds.items() if name != "workspace")
    if _is_nanotron(outcome.row):
        return allocated + FRAGMENTATION * (kinds["activations"] + kinds["transient"])
    if kind == "nvidia-smi":
        return allocated + kinds.get("workspace", 0.0)
    return allocated
