"""Costs of decisions on a mesh per micro-batch without their parameters, as measured and as plan choice counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autopar.costs.emitted import Known
from autopar.costs.evaluate import layer_costs, layer_seconds
from autopar.costs.layer_costs import ComputeSeconds, LayerCost
from autopar.costs.price import Pricer
from autopar.costs.stage_boundaries import boundary_bytes
from autopar.ir.chain import chain
from autopar.ir.graph import Graph
from autopar.planning.host_bound import Stretch, layers_of, total
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator


@dataclass
class CallCosts:
    """Costs of an assignment on a mesh per micro-batch, without parameters, computed on demand.

    known: cached lowered programs of the model. decisions: equal for assignments that agree at several numbers of
    rows. Bounds need seconds only, and most configs get no further than their bound.
    """

    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    pricer: Pricer
    assignment: Assignment
    emitted_programs: Known = field(default_factory=dict)
    decisions: Hashable = None

    @cached_property
    def seconds(self) -> Mapping[str, ComputeSeconds]:
        """Return unit -> seconds of forward and backward, and of deferrable weight gradients."""
        return layer_seconds(
            self.graph, self.operators, self.pricer, self.assignment, self.emitted_programs, self.decisions
        )

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        """Return the same including waits for hosts."""
        layers, counts = layers_of(self.graph), Counter(chain(self.graph))
        return tuple(
            Stretch(name if name in layers else "", device, host, counts[name])
            for name, seconds in self.seconds.items()
            for device, host in zip((seconds.forward, seconds.backward), seconds.host, strict=True)
        )

    @cached_property
    def chosen_seconds(self) -> float:
        """Return the seconds of a micro-batch as plan choice counts them."""
        return total(self.stretches)

    @cached_property
    def boundary_bytes(self) -> tuple[float, ...]:
        """Return the bytes of one rank per micro-batch, at the boundary before each unit."""
        return boundary_bytes(self.graph, self.pricer.mesh, self.assignment)

    @cached_property
    def costs(self) -> Mapping[str, LayerCost]:
        """Return unit -> seconds by kind and bytes."""
        return layer_costs(self.graph, self.operators, self.pricer, self.assignment, self.emitted_programs)
