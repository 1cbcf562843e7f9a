"""What was predicted of a strategy, with what it was predicted of: its timeline, and what-if questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.costs.stage_costs import Simulated
from autopar.plan import Prediction
from autopar.simulate.timeline import StepEvent, events_of
from cost_models.frameworks import Framework
from cost_models.hardware import Device, Link
from cost_models.mixed import AnyCluster

if TYPE_CHECKING:
    from autopar.simulate.predictor import Predictor
    from autopar.simulate.what_if import WhatIf


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a prediction depends on. strategy: as the user wrote it."""

    predictor: Predictor
    cluster: AnyCluster
    strategy: Mapping[str, Any]
    global_batch_size: int
    framework: Framework
    precision: str

    def predict(self) -> StrategyPrediction:
        """Raises ConstraintError where a strategy does not suit the rest."""
        return self.predictor.predict(
            self.cluster,
            self.strategy,
            global_batch_size=self.global_batch_size,
            framework=self.framework,
            precision=self.precision,
        )


@dataclass(frozen=True, slots=True)
class StrategyPrediction(Prediction):
    """Seconds and bytes by kind, and how they came about.

    scenario: what was predicted. simulated: the schedule, event by event. capacity_bytes: what a rank may use, by the
    strategy's `memory` or the device; where they differ, on the fullest position.
    """

    scenario: Scenario = field(kw_only=True, compare=False, repr=False)
    simulated: Simulated = field(kw_only=True, compare=False, repr=False)
    capacity_bytes: float = field(kw_only=True)

    @property
    def fits(self) -> bool:
        """Whether the fullest rank has room."""
        return self.peak_bytes <= self.capacity_bytes

    @property
    def timeline(self) -> tuple[StepEvent, ...]:
        """The simulated step (simulate/timeline.py); the last event ends with it."""
        return events_of(self.simulated)

    def write_timeline(self, path: str | Path, force: bool = False) -> Path:
        """Write the step as a trace for Perfetto or chrome://tracing; force: also over a file that is not autopar's.

        Raises OutputError where it cannot be written.
        """
        from autopar.report.timeline import write_trace

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
        """This step beside the one with something changed; what is left out stays, and several changes hold at once.

        device, intra_node, inter_node: one of the catalogue by name, one in full, or fields to change, such as
        {"bytes_per_second": 50e9} or {"memory_bytes": "80GiB"}, where "x2" doubles what is there. strategy: fields to
        change; None takes one away. The model is not traced again, unless cp or ep have a value for the first time.
        Raises ConstraintError for what cannot be.
        """
        from autopar.simulate.what_if import WhatIf, changed

        parts = {"device": device, "intra_node": intra_node, "inter_node": inter_node}
        other = changed(self.scenario, cluster, parts, global_batch_size, strategy or {}, framework, precision)
        return WhatIf(self, other.predict())
