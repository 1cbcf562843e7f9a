"""The JSON that `--json` prints, for a report, a plan file, an explanation or a comparison. docs/cli.md lists the keys.
Keys are stable: new ones may be added, and `schema` rises when a key is removed or changes its meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from autopar.plan import Plan
from autopar.report.facts import Facts
from autopar.report.plan_words import full_words

SCHEMA = 1

RATES = ("rows_per_second", "tokens_per_second", "tokens_per_second_per_device")


def facts_json(facts: Facts) -> dict[str, Any]:
    """Return a report. Seconds are of one step, bytes of one rank, placements in words."""
    record: dict[str, Any] = {"schema": SCHEMA, "kind": "report", **as_data(facts)}
    record["figures"] |= {name: getattr(facts.figures, name) for name in RATES}
    return record


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the summary of a plan file. Placements are left out."""
    return {
        "schema": SCHEMA,
        "kind": "plan",
        "model": plan.model,
        "cluster": plan.cluster,
        "mesh": plan.mesh_text,
        "plan": full_words(plan),
        "global_batch_size": plan.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "precision": plan.precision,
        "schedule": plan.pipeline.schedule,
        "step_seconds": plan.prediction.step_seconds,
        "peak_bytes": plan.prediction.peak_bytes,
        "seconds": dict(plan.prediction.seconds),
        "memory": dict(plan.prediction.num_bytes),
    }


def record_json(kind: str, record: Any) -> dict[str, Any]:
    """Return another dataclass of facts, such as an explanation."""
    return {"schema": SCHEMA, "kind": kind, **as_data(record)}


def as_data(value: Any) -> Any:
    """Convert dataclasses to dicts, tuples to lists and plans by `plan_json`; numbers, texts and None stay."""
    if isinstance(value, Plan):
        return plan_json(value)
    if is_dataclass(value):
        return {item.name: as_data(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(item) for item in value]
    return value
