"""The prediction of a strategy with its scenario: its timeline, and a comparison with a changed step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autopar.costs.layer_costs import ACCUMULATION, FIRST_PASS, HIDDEN, HOST, RECOMPUTATION
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import BUBBLE, Simulated
from autopar.ir.plan_data import Prediction
from autopar.strategies.scenario import Scenario
from autopar.strategies.timeline import StepEvent, events_of
from autopar.strategies.trace_file import write_trace
from autopar.strategies.what_if import changed
from cost_models.certainty import Certainty, spread
from cost_models.framework_profiles import Framework
from cost_models.hardware import Device, Link
from cost_models.mixed_cluster import AnyCluster

GROUPS = ("compute", "exposed communication", "hidden communication", "idle", "optimizer", "memory")
COMPUTE = frozenset({RECOMPUTATION, FIRST_PASS, ACCUMULATION, "local resharding"})


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of seconds or (group "memory") bytes before and after. group: of GROUPS."""

    group: str
    kind: str
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class StrategyPrediction(Prediction):
    """Seconds and bytes by kind, and the simulation that they come from. scenario: the predicted setting. simulated:
    the schedule, event by event. capacity_bytes: the bytes that a rank may use, by the strategy's `memory` or the
    device. If pipeline ranks differ, it is that of the fullest one."""

    scenario: Scenario = field(kw_only=True, compare=False, repr=False)
    simulated: Simulated = field(kw_only=True, compare=False, repr=False)
    capacity_bytes: float = field(kw_only=True)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def certainty(self) -> Certainty:
        """Return how sure the fullest rank's bytes are, by rows of this framework (cost_models/certainty.py)."""
        error_spread = spread(self.scenario.framework.name, is_cpu(self.scenario.cluster.groups[0]))
        return error_spread.certainty(self.num_bytes, self.capacity_bytes)

    @property
    def timeline(self) -> tuple[StepEvent, ...]:
        """The simulated step (strategies/timeline.py); the last event ends with it."""
        return events_of(self.simulated)

    def write_timeline(self, path: str | Path, force: bool = False) -> Path:
        """Write the step as a trace for Perfetto or chrome://tracing; force: also over a file that is not autopar's.

        Raises OutputError where it cannot be written.
        """
        return write_trace(self.simulated, path, force)

    def what_if(
        self,
        *,
        cluster: AnyCluster | str | None = None,
        device: Device | str | Mapping[str, Any] | None = None,
        intra_node: Link | str | Mapping[str, Any] | None = None,
        inter_node: Link | str | Mapping[str, Any] | None = None,
        global_batch_size: int | None = None,
        strategy: Mapping[str, Any] | None = None,
        framework: Framework | str | None = None,
        precision: str | None = None,
    ) -> WhatIf:
        """Compare this step with a changed one. Arguments that are None stay unchanged; several changes apply together.

        device, intra_node, inter_node: a name from the catalog, a complete record, or fields to change, such as
        {"bytes_per_second": 50e9} or {"memory_bytes": "80GiB"}; "x2" doubles a value. strategy: fields to change; None
        removes a field. The model is traced again only if cp or ep gets a value for the first time. Raises
        ConstraintError for impossible changes.
        """
        parts = {"device": device, "intra_node": intra_node, "inter_node": inter_node}
        other = changed(self.scenario, cluster, parts, global_batch_size, strategy or {}, framework, precision)
        return WhatIf(self, other.predict())


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Two predictions of one model."""

    before: StrategyPrediction
    after: StrategyPrediction

    @property
    def speedup(self) -> float:
        """Return how many times as many rows a second the changed step trains."""
        rows = self.after.scenario.global_batch_size / self.before.scenario.global_batch_size
        return rows * self.before.step_seconds / self.after.step_seconds

    def parts(self) -> tuple[Part, ...]:
        """All kinds that either has, by group, largest first. Seconds of all but hidden communication add up to each
        step, bytes to the fullest rank."""
        first, second = _kinds(self.before), _kinds(self.after)
        parts = [Part(*key, first.get(key, 0.0), second.get(key, 0.0)) for key in first | second]
        return tuple(sorted(parts, key=lambda part: (GROUPS.index(part.group), -max(part.before, part.after))))


def _kinds(prediction: Prediction) -> dict[tuple[str, str], float]:
    by_group = {(_group(kind), kind): value for kind, value in prediction.seconds.items() if value}
    return by_group | {("memory", kind): value for kind, value in prediction.num_bytes.items() if value}


def _group(kind: str) -> str:
    if kind == HIDDEN:
        return "hidden communication"
    if kind in (BUBBLE, HOST):
        return "idle"
    if kind == "optimizer":
        return "optimizer"
    return "compute" if kind in COMPUTE or kind.startswith(("forward ", "backward ")) else "exposed communication"


def comparison_rows(what_if: WhatIf) -> Iterator[Part]:
    """Yield a sum per group, then its kinds, indented. Kinds that matter in neither step are left out."""
    least = 0.0005
    for group in GROUPS:
        parts_of_group = [part for part in what_if.parts() if part.group == group]
        whole = what_if.before.peak_bytes if group == "memory" else what_if.before.step_seconds
        if parts_of_group:
            yield Part(group, group, sum(p.before for p in parts_of_group), sum(p.after for p in parts_of_group))
            shown = [p for p in parts_of_group if max(p.before, p.after) > least * whole and p.kind != group]
            yield from (replace(p, kind=f"  {p.kind}") for p in shown)
