"""A scenario with something changed: a link, a device, the batch or the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from autopar.cluster import as_cluster
from autopar.errors import ConstraintError
from autopar.settings.constraints import parse_bytes
from autopar.strategies.scenario import Scenario
from autopar.strategies.strategy import profile_of
from cost_models import catalog
from cost_models.framework_profiles import Framework
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster
from cost_models.mixed_cluster import AnyCluster

Piece = TypeVar("Piece", Device, Link)

PARTS = ("device", "intra_node", "inter_node")

SHORT: Mapping[str, str] = {
    "peak": "peak_flops_per_second",
    "memory": "memory_bytes",
    "bandwidth": "memory_bytes_per_second",
    "device.bandwidth": "memory_bytes_per_second",
    "link.bandwidth": "bytes_per_second",
    "link.latency": "latency_seconds",
}
"""Words of the command line for fields of a device or link."""


def changed(
    scenario: Scenario,
    cluster: AnyCluster | str | None,
    parts: Mapping[str, Device | Link | str | Mapping[str, Any] | None],
    global_batch_size: int | None,
    strategy: Mapping[str, Any],
    framework: Framework | str | None,
    precision: str | None,
) -> Scenario:
    """The scenario with the changes of `StrategyPrediction.what_if`. Raises ConstraintError."""
    spec = as_cluster(cluster) if cluster is not None else scenario.cluster
    if any(change is not None for change in parts.values()):
        if not isinstance(spec, Cluster):
            raise ConstraintError(
                "parts are changed of equal nodes only", values=str(spec), alternatives="another cluster as a whole"
            )
        spec = _changed_cluster(spec, parts)
    merged = {**scenario.strategy, **strategy}
    return replace(
        scenario,
        cluster=spec,
        strategy={key: value for key, value in merged.items() if value is not None},
        global_batch_size=global_batch_size or scenario.global_batch_size,
        framework=profile_of(framework) if framework is not None else scenario.framework,
        precision=precision or scenario.precision,
    )


def _changed_cluster(spec: Cluster, parts: Mapping[str, Any]) -> Cluster:
    device, intra, inter = (parts.get(name) for name in PARTS)
    try:
        return replace(
            spec,
            device=_changed_part(spec.device, device, catalog.device),
            intra_node=_changed_part(spec.intra_node, intra, catalog.link),
            inter_node=_changed_part(spec.inter_node, inter, catalog.link),
        )
    except ConstraintError:
        raise
    except ValueError as error:
        raise ConstraintError("no such cluster", values=str(error)) from None


def _changed_part(part: Piece, change: Any, named: Any) -> Piece:
    """The part with its fields changed, or another one. Raises ConstraintError and ValueError."""
    if change is None:
        return part
    if isinstance(change, str):
        piece: Piece = named(change)
        return piece
    if isinstance(change, type(part)):
        return change
    if not isinstance(change, Mapping):
        raise ConstraintError("a device or link is changed by its fields", values=repr(change))
    field_names = {item.name for item in fields(part)} - {"name", "source"}
    values: dict[str, Any] = {}
    for key, value in change.items():
        name, _, entry = str(key).partition(".")
        if name not in field_names:
            raise ConstraintError(
                f"a {type(part).__name__.lower()} has no field {name!r}", alternatives=", ".join(sorted(field_names))
            )
        old = values.get(name, getattr(part, name))
        if isinstance(old, Mapping):
            values[name] = {k: _value(k, v, value) if entry in ("", k) else v for k, v in old.items()}
        else:
            values[name] = _value(name, old, value)
    return replace(part, **values)


def _value(name: str, old: Any, new: Any) -> Any:
    """Return the changed value: `new`, or `old` times the number after an "x"."""
    kind = type(old)
    try:
        if isinstance(new, str) and new.startswith("x"):
            return kind(old * float(new[1:]))
        if isinstance(new, str) and name.endswith("_bytes"):
            return parse_bytes(new)
        if isinstance(old, (bool, str)):
            return kind(new)
        return kind(float(new))
    except (TypeError, ValueError):
        raise ConstraintError(f"{name} is a number, or x and a factor", values=repr(new)) from None


def parse_changes(assignments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `what_if` from words: `batch`, `precision`, `framework`, `cluster`, `device`, `device.FIELD`,
    `intra_node`, `intra_node.FIELD`, ..., and any field of a strategy."""
    changes: dict[str, Any] = {}
    strategy: dict[str, Any] = {}
    for key, value in assignments.items():
        name, _, entry = key.partition(".")
        if name in PARTS and entry:
            owner = "device" if name == "device" else "link"
            field = SHORT.get(f"{owner}.{entry}") or SHORT.get(entry, entry)
            so_far = changes.setdefault(name, {})
            if isinstance(so_far, str):
                raise ConstraintError(f"{name} is replaced or changed, not both", values=f"{name}={so_far}, {key}")
            changes[name] = {**so_far, field: value}
        elif name in (*PARTS, "cluster", "framework", "precision"):
            changes[name] = str(value)
        elif name == "batch":
            changes["global_batch_size"] = value
        else:
            strategy[key] = value
    return changes | ({"strategy": strategy} if strategy else {})
