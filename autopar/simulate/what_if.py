"""One step beside another: a changed link, device, batch or strategy, and which parts of the step that moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from autopar.cluster import as_cluster
from autopar.constraints import parse_bytes
from autopar.costs.block_costs import ACCUMULATION, HIDDEN, RECOMPUTATION
from autopar.costs.stage_costs import BUBBLE
from autopar.errors import ConstraintError
from autopar.plan import Prediction
from autopar.simulate.prediction import Scenario, StrategyPrediction
from autopar.simulate.stages import HOST
from autopar.simulate.strategy import profile_of
from cost_models import catalog
from cost_models.frameworks import Framework
from cost_models.hardware import Device, Link
from cost_models.machine import Cluster
from cost_models.mixed import AnyCluster

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

GROUPS = ("compute", "exposed communication", "hidden communication", "idle", "optimizer", "memory")
COMPUTE = frozenset({RECOMPUTATION, ACCUMULATION, "local resharding"})


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of seconds or (group "memory") bytes before and after. group: of GROUPS."""

    group: str
    kind: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Two predictions of one model."""

    before: StrategyPrediction
    after: StrategyPrediction

    @property
    def speedup(self) -> float:
        """How many times as many rows a second the changed step trains."""
        rows = self.after.scenario.global_batch_size / self.before.scenario.global_batch_size
        return rows * self.before.step_seconds / self.after.step_seconds

    def parts(self) -> tuple[Part, ...]:
        """All kinds that either has, by group, largest first. Seconds of all but hidden communication add up to each
        step, bytes to the fullest rank."""
        first, second = _kinds(self.before), _kinds(self.after)
        found = [Part(*key, first.get(key, 0.0), second.get(key, 0.0)) for key in first | second]
        return tuple(sorted(found, key=lambda part: (GROUPS.index(part.group), -max(part.before, part.after))))


def _kinds(prediction: Prediction) -> dict[tuple[str, str], float]:
    found = {(_group(kind), kind): value for kind, value in prediction.seconds.items() if value}
    return found | {("memory", kind): value for kind, value in prediction.num_bytes.items() if value}


def _group(kind: str) -> str:
    if kind == HIDDEN:
        return "hidden communication"
    if kind in (BUBBLE, HOST):
        return "idle"
    if kind == "optimizer":
        return "optimizer"
    return "compute" if kind in COMPUTE or kind.startswith(("forward ", "backward ")) else "exposed communication"


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
        found: Piece = named(change)
        return found
    if isinstance(change, type(part)):
        return change
    if not isinstance(change, Mapping):
        raise ConstraintError("a device or link is changed by its fields", values=repr(change))
    known = {item.name for item in fields(part)} - {"name", "source"}
    values: dict[str, Any] = {}
    for key, value in change.items():
        name, _, entry = str(key).partition(".")
        if name not in known:
            raise ConstraintError(
                f"a {type(part).__name__.lower()} has no field {name!r}", alternatives=", ".join(sorted(known))
            )
        old = values.get(name, getattr(part, name))
        if isinstance(old, Mapping):
            values[name] = {k: _value(k, v, value) if entry in ("", k) else v for k, v in old.items()}
        else:
            values[name] = _value(name, old, value)
    return replace(part, **values)


def _value(name: str, old: Any, new: Any) -> Any:
    """`new`, or `old` times what follows an "x"."""
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


def parse_changes(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `what_if` from words: `batch`, `precision`, `framework`, `cluster`, `device`, `device.FIELD`,
    `intra_node`, `intra_node.FIELD`, ..., and any field of a strategy."""
    found: dict[str, Any] = {}
    strategy: dict[str, Any] = {}
    for key, value in given.items():
        name, _, entry = key.partition(".")
        if name in PARTS and entry:
            owner = "device" if name == "device" else "link"
            field = SHORT.get(f"{owner}.{entry}") or SHORT.get(entry, entry)
            so_far = found.setdefault(name, {})
            if isinstance(so_far, str):
                raise ConstraintError(f"{name} is replaced or changed, not both", values=f"{name}={so_far}, {key}")
            found[name] = {**so_far, field: value}
        elif name in (*PARTS, "cluster", "framework", "precision"):
            found[name] = str(value)
        elif name == "batch":
            found["global_batch_size"] = value
        else:
            strategy[key] = value
    return found | ({"strategy": strategy} if strategy else {})


def comparison_rows(found: WhatIf) -> Iterator[Part]:
    """A sum per group above its kinds, whose names are indented; kinds that matter in neither step are left out."""
    least = 0.0005
    for group in GROUPS:
        own = [part for part in found.parts() if part.group == group]
        whole = found.before.peak_bytes if group == "memory" else found.before.step_seconds
        if own:
            yield Part(group, group, sum(p.before for p in own), sum(p.after for p in own))
            shown = [p for p in own if max(p.before, p.after) > least * whole and p.kind != group]
            yield from (replace(p, kind=f"  {p.kind}") for p in shown)
