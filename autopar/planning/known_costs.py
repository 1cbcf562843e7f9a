"""What searches that share solved layers find once for all of them.

Requests that differ in their constraints alone price the same parameters, bound the same configs and cut many of them
alike. Each thing is kept under all that it depends on, so that a search gives what it would give by itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.costs.layer_costs import LayerCost, defers_weights
from autopar.costs.pipeline_costs import ChainCosts
from autopar.costs.stored_costs import StoredCost, StoredParameters
from autopar.ir.graph import Graph
from autopar.options.assignment import Assignment
from autopar.options.strategies import Operator
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, operators_at

Limits = tuple[str | None, tuple[float, ...]]
"""Of a search: the pinned recompute mode, and the bytes that a rank of every group of nodes may use."""

Synchronised = tuple[list[float], list[float], list[tuple[float, float]], list[float]]
"""Of the parameters of every class of units: exposed seconds per micro-batch and per step, those of hosts, and what of
the ones per step is gradients on their way."""


@dataclass
class KnownCosts:
    """Of all requests that are `request` but for their batch and constraints on which no price depends.

    stored, parameters, synchronised, chains: as `ConfigCosts` finds them. bounds: with memory free, by config; tight:
    with memory, by limits and config. solutions: by limits and config, with their cutoff. cuts: by config and
    recompute mode. decided, unit_costs, candidates: what plans are made of (candidates.py).
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
        """The graph of so many rows of a micro-batch of the request's batch and its calls."""
        key = request.global_batch_size, rows
        if key not in self._operators:
            self._operators[key] = operators_at(request, rows)
        return self._operators[key]

    def serves(self, request: Request) -> bool:
        """Whether all of it holds for the request."""
        defers = [defers_weights(each.constraints.schedule or "") for each in (request, self.request)]
        own = self.request
        return defers[0] == defers[1] and replace(of_batch(request, own), constraints=own.constraints) == own


def of_batch(request: Request, other: Request) -> Request:
    """The request with another one's batch, if both are about the same model; all configs say their rows."""
    source = request.trace.source
    trace = other.trace if source is not None and source == other.trace.source else request.trace
    return replace(request, trace=trace, unpadded=other.unpadded, global_batch_size=other.global_batch_size)


def known_costs(found: list[KnownCosts], request: Request) -> KnownCosts:
    """Those that serve the request, which are added where there are none yet."""
    for each in found:
        if each.serves(request):
            return each
    found.append(KnownCosts(request))
    return found[-1]
