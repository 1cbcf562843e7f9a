"""Costs of every unit of the model on a rank of each stage mesh, under a parallel config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.cost_table import combined
from autopar.costs.host import host_of
from autopar.costs.layer_costs import SYNCHRONISATION, LayerCost, Mode, chosen_seconds, defers_weights, exposed
from autopar.costs.pipeline_costs import ChainCosts
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_boundaries import tied_parameters
from autopar.costs.stored_costs import StoredCost, StoredParameters, stored_costs
from autopar.ir.chain import chain, homes_of, uncut
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, pricer_for, usable_bytes
from autopar.planning.shared_assignments import SharedAssignments
from autopar.planning.shared_costs import Limits, known_costs
from autopar.planning.solved_layers import SolvedLayer, SolvedLayers, named_mesh
from autopar.planning.stage_points import modes_of
from autopar.sharding.scopes import scopes_of

Solved = SolvedLayers | SharedAssignments
"""Decisions, solved separately for equal stage meshes and shared by unlike ones. Another request's decisions may serve
if the requests differ only in facts that the decisions do not depend on (see solved_layers.py)."""


@dataclass(frozen=True, slots=True)
class ClassSeconds:
    """Seconds of every class of units on one stage mesh, in the order of `ConfigCosts.counts`: busy per micro-batch,
    of this forwards and weight gradients, and once per step. forward: only under zero bubble."""

    micro: list[float]
    weight: list[float]
    step: list[float]
    forward: list[float] = field(default_factory=list)


class ConfigCosts:
    """Prices of the units of one request's model, each computed on demand."""

    def __init__(self, request: Request, solved: Solved) -> None:
        self.request, self.solved = request, solved
        self.graph = request.trace(request.global_batch_size)
        self.units, self.uncut = chain(self.graph), uncut(self.graph)
        self.counts = Counter(self.units)
        self.homes, self.scopes = homes_of(self.graph), scopes_of(self.graph)
        self.shared = tied_parameters(self.graph)
        self.groups = [request.of_group(number) for number in range(len(request.whole.groups))]
        self.usable_bytes = [usable_bytes(group) for group in self.groups]
        self.is_on_cpu = is_cpu(request.whole.groups[0])
        self.host = host_of(pricer_for(self.groups[0], named_mesh(1, 1), 1).cluster)
        self.cached = known_costs(solved.known_costs, request)
        self.limits: Limits = request.constraints.recompute, tuple(self.usable_bytes)
        self._none = [0.0] * len(self.counts)

    @property
    def most_stages(self) -> int:
        """Return the most stages into which the units can be cut."""
        return len(self.units) - len(self.uncut)

    def solved_layer(self, config: ParallelConfig, stage_mesh: StageMesh) -> SolvedLayer:
        """Return the solved layer on a stage mesh, which must exist."""
        layer = self.solved.of(config, stage_mesh)
        assert layer is not None
        return layer

    def seconds(self, config: ParallelConfig, stage_mesh: StageMesh) -> ClassSeconds:
        """Return the seconds on a stage mesh."""
        solved_layer = self.solved_layer(config, stage_mesh)
        key = stage_mesh, solved_layer.storage, config.zero, config.offload, self._summing(config)
        if key not in self.cached.synchronised:
            stored = self.stored(config, stage_mesh)
            stored_of_classes = [stored.get(name, StoredCost()) for name in self.counts]
            micro, step = (
                [exposed(s.per_micro) for s in stored_of_classes],
                [chosen_seconds(s.per_step) for s in stored_of_classes],
            )
            sent = [s.per_step.get(SYNCHRONISATION, 0.0) for s in stored_of_classes]
            self.cached.synchronised[key] = micro, step, [s.host for s in stored_of_classes], sent
        return self._busy(solved_layer, config, *self.cached.synchronised[key])

    def seconds_without_parameters(self, config: ParallelConfig, stage_mesh: StageMesh) -> ClassSeconds:
        """Return the seconds on a stage mesh for free parameters."""
        return self.busy(self.solved_layer(config, stage_mesh), config)

    def busy(self, solved_layer: SolvedLayer, config: ParallelConfig) -> ClassSeconds:
        """Return the busy seconds of a solved layer under a config, for free parameters."""
        none = self._none
        return self._busy(solved_layer, config, none, none, [(0.0, 0.0)] * len(none), none)

    def _busy(
        self,
        solved_layer: SolvedLayer,
        config: ParallelConfig,
        per_micro: list[float],
        per_step: list[float],
        host: list[tuple[float, float]],
        sent: list[float],
    ) -> ClassSeconds:
        """Return the busy seconds. per_micro, per_step, host, sent: of the parameters of every class."""
        seconds_of = solved_layer.call_costs.seconds
        busy = [seconds_of[name] for name in self.counts]
        num_forwards = 2 if self.has_first_pass(config) else 1
        stored = list(zip(busy, per_micro, host, strict=True))
        micro = [
            layer_seconds.under(config.schedule, num_forwards, exposed, issued)
            for layer_seconds, exposed, issued in stored
        ]
        late = (layer_seconds.late(exposed, issued) for layer_seconds, exposed, issued in stored)
        step = [once - min(seconds_of, waits) for once, seconds_of, waits in zip(per_step, sent, late, strict=True)]
        totals = ClassSeconds(micro, [layer_seconds.weight for layer_seconds in busy], step)
        if defers_weights(config.schedule):
            totals.forward.extend(layer_seconds.ahead(num_forwards, issued) for layer_seconds, _, issued in stored)
        return totals

    def has_first_pass(self, config: ParallelConfig) -> bool:
        """Return whether micro-batches run forward twice."""
        return self.request.trace.has_first_pass(config.num_micro_batches)

    def modes(self, cost: LayerCost) -> Mapping[str, Mode]:
        """Return the modes of a unit that the constraints and the device allow."""
        return modes_of(cost, self.request.constraints.recompute, has_host=not self.is_on_cpu)

    def stored(self, config: ParallelConfig, stage_mesh: StageMesh) -> dict[str, StoredCost]:
        """Return the parameters of every unit on a stage mesh."""
        solved_layer = self.solved_layer(config, stage_mesh)
        key = stage_mesh, solved_layer.storage, config.zero, config.offload, self._summing(config)
        if key not in self.cached.stored:
            parameters = self._parameters(solved_layer, config.zero)
            few = replace(config, num_micro_batches=min(config.num_micro_batches, 2))
            self.cached.stored[key] = stored_costs(self.graph, self._pricer(few, stage_mesh), parameters)
        return self.cached.stored[key]

    def _summing(self, config: ParallelConfig) -> tuple[bool, bool]:
        """Return the facts about micro-batches that prices of parameters depend on.

        Gradients summed over micro-batches need a separate buffer, whatever their number. The second and all later
        micro-batches take equally long, so two are enough. A first pass gathers parameters once more.
        """
        return config.num_micro_batches > 1, self.has_first_pass(config)

    def _parameters(self, solved_layer: SolvedLayer, zero: int) -> StoredParameters:
        """Return the parameters as a solved layer stores them, on meshes of its axes."""
        key = solved_layer.storage, solved_layer.mesh.axes, zero
        if key not in self.cached.parameters:
            parameters = StoredParameters.of(
                solved_layer.parameters(zero), self.homes, self.scopes, solved_layer.mesh.axes
            )
            self.cached.parameters[key] = parameters
        return self.cached.parameters[key]

    def stored_bytes(self, config: ParallelConfig, stage_mesh: StageMesh) -> dict[str, float]:
        """Return the bytes of every unit that stay from step to step."""
        return {name: sum(cost.fixed.values()) for name, cost in self.stored(config, stage_mesh).items()}

    def chain_costs(self, config: ParallelConfig, stage_mesh: StageMesh) -> ChainCosts:
        """Return every unit on a stage mesh, with its parameters and the bytes across the boundary before it."""
        key = stage_mesh, replace(config, pipeline_ranks=(), schedule="", chunks=1)
        if key not in self.cached.chains:
            self.cached.chains[key] = self._chain_costs(config, stage_mesh)
        return self.cached.chains[key]

    def _chain_costs(self, config: ParallelConfig, stage_mesh: StageMesh) -> ChainCosts:
        solved_layer = self.solved_layer(config, stage_mesh)
        pricer = self._pricer(config, stage_mesh)
        return ChainCosts(
            graph=self.graph,
            pricer=pricer,
            parameters=solved_layer.parameters(config.zero),
            costs=combined(solved_layer.costs, self.stored(config, stage_mesh), pricer.rates.num_forwards),
            boundary_bytes=solved_layer.call_costs.boundary_bytes,
            group=stage_mesh.group,
        )

    def _pricer(self, config: ParallelConfig, stage_mesh: StageMesh) -> Pricer:
        """Return the prices of stored tensors on a stage mesh."""
        group = self.groups[stage_mesh.group]
        count, has_first_pass = config.num_micro_batches, self.has_first_pass(config)
        return pricer_for(group, stage_mesh.mesh, count, config.offload, has_first_pass)
