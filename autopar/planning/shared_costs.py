"""Costs that searches share along with solved layers.

Requests that differ in their constraints alone price the same parameters, bound the same configs and cut many of
them alike. The key of each entry covers all that it depends on, so that a search gives the same result alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.costs.layer_costs import LayerCost, defers_weights
from autopar.costs.pipeline_costs import ChainCosts
from autopar.costs.stored_costs import StoredCost, StoredParameters
from autopar.ir.graph import Graph
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, operators_at
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator

Limits = tuple[str | None, tuple[float, ...]]
"""Limits of a search: the pinned recompute mode, and the usable bytes of a rank of every group of nodes."""

Synchronised = tuple[list[float], list[float], list[tuple[float, float]], list[float]]
"""Seconds of the parameters of every class of units: exposed per micro-batch, exposed per step, and of hosts. The last
value is the share of the step's seconds with gradients in flight."""


@dataclass
class KnownCosts:
    """Costs of all requests that equal `request` but for their batch and constraints that affect no price.

    stored, parameters, synchronised, chains: as `ConfigCosts` computes them. bounds: with memory free, by config;
    tight: with memory, by limits and config. solutions: by limits and config, with their cutoff. cuts: by config and
    recompute mode. decided, unit_costs, candidates: parts of plans (candidates.py).
    """

    request: Request
    stored: dict[Hashable, dict[str, StoredCost]] = field(default_factory=dict)
    parameters: dict[Hashable, StoredParameters] = field(default_factory=dict)
    synchronised: dict[Hashable, Synchronised] = field(default_factory=dict)
    chains: dict[Hashable, ChainCosts] = field(default_factory=dict)
    bounds: dict[ParallelConfig, float] = field(default_factory=dict)
    tight: dict[tuple[Limits, ParallelConfig], float] = field(default_factory=dict)
    solutions: dict[Hashable, Any] = field(default_factory=dict)
    cuts: dict[tuple[ParallelConfig, str], Any] = field(default_factory=dict)
    decided: dict[Hashable, tuple[Assignment, Mapping[str, Any]]] = field(default_factory=dict)
    unit_costs: dict[Hashable, dict[str, LayerCost]] = field(default_factory=dict)
    candidates: dict[Hashable, list[Any]] = field(default_factory=dict)
    _operators: dict[tuple[int, int], tuple[Graph, dict[tuple[str, str], Operator]]] = field(default_factory=dict)

    def operators(self, request: Request, rows: int) -> tuple[Graph, dict[tuple[str, str], Operator]]:
        """Return the graph of so many rows of a micro-batch of the request's batch and its calls."""
        key = request.global_batch_size, rows
        if key not in self._operators:
            self._operators[key] = operators_at(request, rows)
        return self._operators[key]

    def serves(self, request: Request) -> bool:
        """Return whether all entries are valid for the request."""
        defers = [defers_weights(asked.constraints.schedule or "") for asked in (request, self.request)]
        first = self.request
        return defers[0] == defers[1] and replace(of_batch(request, first), constraints=first.constraints) == first


def of_batch(request: Request, other: Request) -> Request:
    """Return the request with another one's batch, if both are about the same model; all configs include their rows."""
    source = request.trace.source
    trace = other.trace if source is not None and source == other.trace.source else request.trace
    return replace(request, trace=trace, unpadded=other.unpadded, global_batch_size=other.global_batch_size)


def known_costs(pool: list[KnownCosts], request: Request) -> KnownCosts:
    """Return those that serve the request; add new ones if there are none yet."""
    for costs in pool:
        if costs.serves(request):
            return costs
    pool.append(KnownCosts(request))
    return pool[-1]
