"""What `--json` prints: the facts of a report, of a plan file, of an explanation or a comparison. docs/cli.md has the
keys, which stay; new ones may come, and `schema` rises where one changes its meaning or goes."""

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
    """A report. Seconds are of one step, bytes of one rank, placements in words."""
    found: dict[str, Any] = {"schema": SCHEMA, "kind": "report", **as_data(facts)}
    found["figures"] |= {name: getattr(facts.figures, name) for name in RATES}
    return found


def plan_json(plan: Plan) -> dict[str, Any]:
    """A plan as its file says it, without its placements, which are in that file."""
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
    """Another dataclass of facts, such as an explanation."""
    return {"schema": SCHEMA, "kind": kind, **as_data(record)}


def as_data(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, plans as `plan_json` has them; numbers, texts and None as they are."""
    if isinstance(value, Plan):
        return plan_json(value)
    if is_dataclass(value):
        return {each.name: as_data(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_data(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_data(each) for each in value]
    return value
