"""Assignments shared by all pipeline ranks with unlike stage meshes.

They are solved once, for the largest tensor-parallel degree among the stage meshes: a dim cut evenly in eight is cut
evenly in four. On a mesh without an axis, its decisions are dropped.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.ir.mesh import Mesh
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.call_costs import CallCosts
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, divisors, pricer_for
from autopar.planning.shared_costs import KnownCosts
from autopar.planning.solved_layers import MULTIPLIERS, Key, SolvedLayer, SolvedLayers, named_mesh
from autopar.sharding.assignment import Assignment, on_axes
from autopar.sharding.batch_rescaling import rescaled
from cost_models.machine import Cluster

TYPICAL_ROWS = 2
"""Rows of one data-parallel rank for which decisions are solved."""


@dataclass
class SharedAssignments:
    """Assignments by tensor-parallel degree, rows of a micro-batch, and multiplier (see solved_layers.py), solved on
    demand.

    solved_layers: by number of the group of nodes that they are for. known_costs: cached costs of searches that
    share these assignments.
    """

    request: Request
    solved_layers: dict[int, SolvedLayers] = field(default_factory=dict)
    _layer_of: dict[tuple[StageMesh, int, int, float], SolvedLayer | None] = field(default_factory=dict)
    _call_costs: dict[tuple[int, Mesh, int, int, float], CallCosts] = field(default_factory=dict)
    known_costs: list[KnownCosts] = field(default_factory=list)

    def of(self, config: ParallelConfig, stage_mesh: StageMesh) -> SolvedLayer | None:
        """Return a config's solved layer on one of its stage meshes; None if the constraints leave nothing.

        Forward and backward depend on the rows of a rank, not on how many such ranks there are: they are priced on
        at most two data-parallel ranks.
        """
        key = (stage_mesh, config.rows, config.tp, config.multiplier)
        if key not in self._layer_of:
            self._layer_of[key] = self._make(*key)
        return self._layer_of[key]

    def _make(self, stage_mesh: StageMesh, rows: int, tp: int, multiplier: float) -> SolvedLayer | None:
        mesh, solved_key = stage_mesh.mesh, self._solved_key(tp, rows, multiplier)
        solved_layers = self._solved_layers(tp)
        assignment = solved_layers.assignment(solved_key)
        if assignment is None:
            return None
        axes, solved_rows = solved_key.mesh.axes, solved_key.whole_rows
        operators = solved_layers.operators(solved_rows)
        costed = named_mesh(min(mesh.num_data_ranks, 2), mesh.size("tp"))
        whole = rows // mesh.num_data_ranks * costed.num_data_ranks
        if not self.request.trace.can_estimate(whole):  # the model runs only at the batch's rows
            costed, whole = named_mesh(mesh.num_data_ranks, mesh.size("tp")), rows
        key = (stage_mesh.group, costed, whole, tp, multiplier)
        if key not in self._call_costs:
            graph, calls = self.request.trace.estimate(whole), solved_layers.operators(whole)
            pricer = pricer_for(self.request.of_group(stage_mesh.group), costed, num_micro_batches=1)
            here = on_axes(rescaled(assignment, operators, solved_rows, whole), axes, costed.axes)
            self._call_costs[key] = CallCosts(graph, calls, pricer, here)
        storage: Hashable = (self._main(tp), solved_layers.storage_of(assignment, axes))
        return SolvedLayer(
            mesh=mesh,
            call_costs=self._call_costs[key],
            costed=costed,
            solved=assignment,
            solved_axes=axes,
            solved_rows=solved_rows,
            operators=operators,
            multiplier=multiplier,
            storage=storage,
        )

    def assignment(self, tp: int, rows: int, multiplier: float) -> Assignment | None:
        """Return the assignment; None if the constraints leave nothing."""
        return self._solved_layers(tp).assignment(self._solved_key(tp, rows, multiplier))

    def multipliers(self, tp: int, rows: int) -> list[float]:
        """Return the multipliers at which decisions differ."""
        multipliers: list[float] = []
        for multiplier in MULTIPLIERS:
            if all(self.assignment(tp, rows, multiplier) != self.assignment(tp, rows, other) for other in multipliers):
                multipliers.append(multiplier)
        return multipliers

    def has_data(self, tp: int, rows: int) -> bool:
        """Return whether they have a data axis: one row is not shared."""
        return rows > 1 and 2 * tp <= self.request.whole.groups[self._main(tp)].num_devices

    def priced_for(self, request: Request) -> SharedAssignments:
        """Return the same assignments on other devices or links."""
        return SharedAssignments(
            request,
            {n: solved_layers.priced_for(request.of_group(n)) for n, solved_layers in self.solved_layers.items()},
        )

    def decided_for(self, request: Request) -> SharedAssignments:
        """Return assignments to be solved for another request about the same model on the same devices."""
        return SharedAssignments(
            request,
            {n: solved_layers.decided_for(request.of_group(n)) for n, solved_layers in self.solved_layers.items()},
        )

    def _solved_layers(self, tp: int) -> SolvedLayers:
        number = self._main(tp)
        if number not in self.solved_layers:
            self.solved_layers[number] = SolvedLayers(self.request.of_group(number), TYPICAL_ROWS)
        return self.solved_layers[number]

    def _solved_key(self, tp: int, rows: int, multiplier: float) -> Key:
        has_data, typical = self.has_data(tp, rows), min(rows, TYPICAL_ROWS)
        key = Key(tp=tp, cp=1, ep=1, num_data=1 + has_data, rows=typical, multiplier=multiplier)
        if self.request.trace.can_estimate(key.whole_rows):
            return key
        num_data = divisors(rows)[1] if has_data else 1
        return key._replace(num_data=num_data, rows=rows // num_data)

    def _main(self, tp: int) -> int:
        """Return the number of the group of nodes to solve decisions for. Groups with room for two data-parallel ranks
        come first, then the highest rate of all devices together."""
        groups = self.request.whole.groups
        fits = [n for n, group in enumerate(groups) if tp <= group.num_devices]
        has_room = [n for n in fits if 2 * tp <= groups[n].num_devices] or fits
        return max(has_room, key=lambda n: _rate(groups[n]))


def _rate(group: Cluster) -> float:
    """Return the rate of all devices together."""
    return group.num_devices * max(group.device.peak_flops_per_second.values())
