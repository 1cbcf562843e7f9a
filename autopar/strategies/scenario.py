"""All that a prediction of a strategy depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models.framework_profiles import Framework
from cost_models.mixed_cluster import AnyCluster

if TYPE_CHECKING:  # a scenario predicts itself again, so both sides name each other
    from autopar.strategies.prediction import StrategyPrediction
    from autopar.strategies.predictor import Predictor


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that a prediction depends on. strategy: as the user wrote it."""

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
