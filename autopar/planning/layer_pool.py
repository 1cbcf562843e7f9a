"""Solved layers that searches about one model share, for any number of rows, devices or micro-batches."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request
from autopar.planning.shared_costs import of_batch
from autopar.planning.solved_layers import GRID_ROWS, SolvedLayers


@dataclass
class LayerPool:
    """Solved layers, by all facts that they depend on: a search gives the same result alone. fitting: configs with a
    plan that fitted, the last one first, one of each kind."""

    layers: list[SolvedLayers] = field(default_factory=list)
    fitting: list[ParallelConfig] = field(default_factory=list)

    def of(self, request: Request, typical_rows: int | None) -> SolvedLayers:
        """Return those for the request, new ones if there are none yet. typical_rows: see `SolvedLayers`."""
        for layers in self.layers:
            if layers.typical_rows == typical_rows and _is_alike(request, layers.request):
                return layers
        self.layers.append(SolvedLayers(request, typical_rows))
        return self.layers[-1]

    def fitted(self, config: ParallelConfig) -> None:
        """Record that a plan fits under a config."""
        self.fitting = [config, *(other for other in self.fitting if kind_of(other) != kind_of(config))]


def kind_of(config: ParallelConfig) -> Hashable:
    """Return a config without rows and micro-batches."""
    return (
        config.pipeline_ranks,
        config.stage_meshes,
        config.zero,
        config.multiplier,
        config.offload,
        config.schedule,
    )


def _is_alike(request: Request, other: Request) -> bool:
    """Return whether layers are solved alike: their rows are solved one by one, and memory is ignored."""
    limits = replace(
        request.constraints,
        micro_batches=other.constraints.micro_batches,
        memory_bytes=other.constraints.memory_bytes,
    )
    rows = [min(GRID_ROWS, asked.global_batch_size) for asked in (request, other)]
    return rows[0] == rows[1] and replace(of_batch(request, other), constraints=limits) == other
