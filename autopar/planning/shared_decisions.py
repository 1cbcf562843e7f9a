"""The decisions that all pipeline ranks with unlike stage meshes share.

They are made once, for the largest tensor-parallel degree among the stage meshes: what is cut evenly in eight is in
four, and on a mesh without an axis its decisions fall away.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.ir.mesh import Mesh
from autopar.ir.seats import Seat
from autopar.options.carried import carried
from autopar.options.choices import Choices, on_axes
from autopar.planning.bases import PRICES, Activity, Base, Bases, Key, decided_on, named_mesh
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, pricer_for
from cost_models.machine import Cluster

TYPICAL_ROWS = 2
"""Rows of one data-parallel rank for which decisions are made."""


@dataclass
class SharedDecisions:
    """Decisions by tensor-parallel degree, rows of a micro-batch, and price of a byte (see bases.py), made on demand.

    bases: by number of the group of nodes that they are made for.
    """

    request: Request
    bases: dict[int, Bases] = field(default_factory=dict)
    _made: dict[tuple[Seat, int, int, float], Base | None] = field(default_factory=dict)
    _activity: dict[tuple[int, Mesh, int, int, float], Activity] = field(default_factory=dict)

    def base_of(self, config: ParallelConfig, stage_mesh: Seat) -> Base | None:
        """A config's decisions on one of its stage meshes; None where the constraints leave nothing.

        Forward and backward depend on the rows of a rank, not on how many such ranks there are: they are priced on at
        most two data-parallel ranks.
        """
        key = (stage_mesh, config.rows, config.tp, config.price)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, stage_mesh: Seat, rows: int, tp: int, price: float) -> Base | None:
        mesh, decided = stage_mesh.mesh, self._decided(tp, rows, price)
        bases = self._bases(tp)
        choices = bases.choices(*decided)
        if choices is None:
            return None
        axes, solved_rows = decided_on(decided)
        operators = bases.operators(solved_rows)
        costed = named_mesh(min(mesh.num_data_ranks, 2), mesh.size("tp"))
        whole = rows // mesh.num_data_ranks * costed.num_data_ranks
        key = (stage_mesh.group, costed, whole, tp, price)
        if key not in self._activity:
            graph, calls = self.request.trace.estimate(whole), bases.operators(whole)
            pricer = pricer_for(self.request.of_group(stage_mesh.group), costed, num_micro_batches=1)
            here = on_axes(carried(choices, operators, solved_rows, whole), axes, costed.axes)
            self._activity[key] = Activity(graph, calls, pricer, here)
        storage: Hashable = (self._main(tp), bases.storage_of(decided, axes))
        return Base(
            mesh=mesh,
            activity=self._activity[key],
            costed=costed,
            solved=choices,
            solved_axes=axes,
            solved_rows=solved_rows,
            operators=operators,
            price=price,
            storage=storage,
        )

    def choices(self, tp: int, rows: int, price: float) -> Choices | None:
        """None where the constraints leave nothing."""
        return self._bases(tp).choices(*self._decided(tp, rows, price))

    def prices(self, tp: int, rows: int) -> list[float]:
        """Those at which decisions differ."""
        found: list[float] = []
        for price in PRICES:
            if all(self.choices(tp, rows, price) != self.choices(tp, rows, other) for other in found):
                found.append(price)
        return found

    def has_data(self, tp: int, rows: int) -> bool:
        """Whether they are made with a data axis: one row is not shared."""
        return rows > 1 and 2 * tp <= self.request.whole.groups[self._main(tp)].num_devices

    def priced_for(self, request: Request) -> SharedDecisions:
        """The same decisions on other devices or links."""
        return SharedDecisions(request, {n: bases.priced_for(request.of_group(n)) for n, bases in self.bases.items()})

    def _bases(self, tp: int) -> Bases:
        number = self._main(tp)
        if number not in self.bases:
            self.bases[number] = Bases(self.request.of_group(number), TYPICAL_ROWS)
        return self.bases[number]

    def _decided(self, tp: int, rows: int, price: float) -> Key:
        return tp, self.has_data(tp, rows), min(rows, TYPICAL_ROWS), price

    def _main(self, tp: int) -> int:
        """The number of the group that decisions are made for: with room for two data-parallel ranks if there is one,
        and of these the one with the highest rate of all devices together."""
        groups = self.request.whole.groups
        fits = [n for n, group in enumerate(groups) if tp <= group.num_devices]
        has_room = [n for n in fits if 2 * tp <= groups[n].num_devices] or fits
        return max(has_room, key=lambda n: _rate(groups[n]))


def _rate(group: Cluster) -> float:
    """Of all devices together."""
    return group.num_devices * max(group.device.peak_flops_per_second.values())
