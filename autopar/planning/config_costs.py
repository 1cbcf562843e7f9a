"""What every block of the model costs on a rank of each stage mesh, under a parallel config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from autopar.costs.block_costs import BlockCost, Mode, chain, exposed, homes_of
from autopar.costs.borders import shared_parameters
from autopar.costs.cost_table import combined
from autopar.costs.pipeline_costs import ChainCosts
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stored_costs import StoredCost, stored_costs
from autopar.planning.bases import Base, Bases
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, pricer_for, usable_bytes
from autopar.planning.shared_decisions import SharedDecisions
from autopar.planning.stage_points import modes_of
from autopar.seats import Seat
from autopar.sharding.strategies import scopes_of

Solved = Bases | SharedDecisions
"""Decisions, by themselves for equal stage meshes and shared by unlike ones; those of another request may serve, if it
differs only in what they do not depend on (see bases.py)."""

ClassSeconds = tuple[float, float, float]
"""Of one block: busy per micro-batch, of this weight gradients, and once per step."""


class ConfigCosts:
    """Prices of the blocks of one request's model, each found when it is asked for."""

    def __init__(self, request: Request, solved: Solved) -> None:
        self.request, self.solved = request, solved
        self.graph = request.trace(request.global_batch_size)
        self.blocks = chain(self.graph)
        self.counts = Counter(self.blocks)
        self.homes, self.scopes = homes_of(self.graph), scopes_of(self.graph)
        self.shared = shared_parameters(self.graph)
        self.groups = [request.of_group(number) for number in range(len(request.whole.groups))]
        self.usable_bytes = [usable_bytes(group) for group in self.groups]
        self.is_on_cpu = is_cpu(request.whole.groups[0])
        self._stored: dict[Hashable, dict[str, StoredCost]] = {}
        self._synchronised: dict[Hashable, dict[str, tuple[float, float]]] = {}

    def base(self, config: ParallelConfig, stage_mesh: Seat) -> Base:
        """The decisions on a stage mesh, which there must be."""
        found = self.solved.base_of(config, stage_mesh)
        assert found is not None
        return found

    def seconds(self, config: ParallelConfig, stage_mesh: Seat) -> list[ClassSeconds]:
        """Of every class of blocks on a stage mesh, in the order of `counts`."""
        key = self._stored_key(config, stage_mesh)
        if key not in self._synchronised:
            stored = self.stored(config, stage_mesh)
            self._synchronised[key] = {n: (exposed(s.per_micro), exposed(s.per_step)) for n, s in stored.items()}
        return self._seconds(config, stage_mesh, self._synchronised[key])

    def seconds_without_parameters(self, config: ParallelConfig, stage_mesh: Seat) -> list[ClassSeconds]:
        """The same, whatever becomes of the parameters."""
        return self._seconds(config, stage_mesh, {})

    def _seconds(
        self, config: ParallelConfig, stage_mesh: Seat, stored: Mapping[str, tuple[float, float]]
    ) -> list[ClassSeconds]:
        busy, found = self.base(config, stage_mesh).activity.seconds, list[ClassSeconds]()
        for name in self.counts:
            per_micro, per_step = stored.get(name, (0.0, 0.0))
            found.append((busy[name].under(config.schedule) + per_micro, busy[name].weight, per_step))
        return found

    def modes(self, cost: BlockCost) -> Mapping[str, Mode]:
        """The modes of a block that the constraints and the device leave."""
        return modes_of(cost, self.request.constraints.recompute, has_host=not self.is_on_cpu)

    def stored(self, config: ParallelConfig, stage_mesh: Seat) -> dict[str, StoredCost]:
        """The parameters of every block on a stage mesh."""
        key = self._stored_key(config, stage_mesh)
        if key not in self._stored:
            parameters = self.base(config, stage_mesh).parameters(config.zero)
            pricer = self._pricer(config, stage_mesh)
            self._stored[key] = stored_costs(self.graph, pricer, parameters, self.homes, self.scopes)
        return self._stored[key]

    def stored_bytes(self, config: ParallelConfig, stage_mesh: Seat) -> dict[str, float]:
        """Of every block, what stays from step to step."""
        return {name: sum(cost.fixed.values()) for name, cost in self.stored(config, stage_mesh).items()}

    def chain_costs(self, config: ParallelConfig, stage_mesh: Seat) -> ChainCosts:
        """Every block on a stage mesh, with its parameters and what crosses the border before it."""
        base = self.base(config, stage_mesh)
        return ChainCosts(
            graph=self.graph,
            pricer=self._pricer(config, stage_mesh),
            parameters=base.parameters(config.zero),
            costs=combined(base.costs, self.stored(config, stage_mesh)),
            border_bytes=base.activity.border_bytes,
            group=stage_mesh.group,
        )

    def _stored_key(self, config: ParallelConfig, stage_mesh: Seat) -> Hashable:
        # Gradients that are summed over micro-batches take room of their own, however many there are.
        several, storage = config.num_micro_batches > 1, self.base(config, stage_mesh).storage
        return stage_mesh, storage, config.zero, config.offload, several

    def _pricer(self, config: ParallelConfig, stage_mesh: Seat) -> Pricer:
        """Prices of what is stored on a stage mesh."""
        group = self.groups[stage_mesh.group]
        return pricer_for(group, stage_mesh.mesh, config.num_micro_batches, config.offload)
