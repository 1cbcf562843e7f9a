"""The setup of one run of a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.costs.updates import OptimizerFactory
from autopar.training.callbacks import Callback
from autopar.training.config import Batches, TrainerConfig
from autopar.training.metrics import Metric
from autopar.training.optimizers import Schedule
from cost_models.mixed import AnyCluster


@dataclass(frozen=True, slots=True)
class Setup:
    """The model, its data, and how to train it.

    schedule: None for a constant rate. eval_batches: None without evaluations. metrics: of the evaluations. source:
    further fields of a configuration file ("model", "data", "sequence_length"), for the dump.
    """

    model: nn.Module
    config: TrainerConfig
    batches: Batches
    loss_fn: Callable[..., torch.Tensor] | None
    optimizer: OptimizerFactory
    schedule: Schedule | None = None
    eval_batches: Batches | None = None
    callbacks: tuple[Callback, ...] = ()
    metrics: tuple[Metric, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict)

    def dump(self, cluster: AnyCluster | None = None) -> dict[str, Any]:
        """Return the configuration and its source as a file has them. cluster: the one that "detect" returned."""
        config = self.config if cluster is None else replace(self.config, cluster=cluster)
        return {**self.source, **config.dump()}
