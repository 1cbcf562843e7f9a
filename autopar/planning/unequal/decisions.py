"""The decisions that all positions of a pipeline share.

They are made once, for the largest tensor-parallel degree among the positions: what is cut evenly in eight is in four,
and on a submesh without an axis its decisions fall away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.planning.bases import PRICES, Bases, Key, decided_on, named_mesh
from autopar.planning.request import Request
from autopar.sharding.carried import carried
from autopar.sharding.choices import Choices
from autopar.sharding.strategies import Operator
from cost_models.machine import Cluster

TYPICAL_ROWS = 2
"""Of one data-parallel rank, for which decisions are made."""


@dataclass
class Decisions:
    """Decisions by tensor-parallel degree, rows of a micro-batch, and price of a byte (see bases.py), made on demand.

    bases: by number of the group of nodes that they are made for.
    """

    request: Request
    bases: dict[int, Bases] = field(default_factory=dict)

    def choices(self, tp: int, rows: int, price: float) -> Choices | None:
        """On `axes`; None where the constraints leave nothing."""
        return self._bases(tp).choices(*self._decided(tp, rows, price))

    def choices_at(self, tp: int, rows: int, price: float, graph_rows: int) -> Choices | None:
        """The same decisions for a graph of `graph_rows` rows over all ranks."""
        choices, (_, solved_rows) = self.choices(tp, rows, price), decided_on(self._decided(tp, rows, price))
        if choices is None:
            return None
        return carried(choices, self._bases(tp).operators(solved_rows), solved_rows, graph_rows)

    def prices(self, tp: int, rows: int) -> list[float]:
        """Those that make a difference."""
        found: list[float] = []
        for price in PRICES:
            if all(self.choices(tp, rows, price) != self.choices(tp, rows, other) for other in found):
                found.append(price)
        return found

    def axes(self, tp: int, rows: int) -> tuple[str, ...]:
        """Of the mesh that they are made on."""
        return named_mesh(2 if self.has_data(tp, rows) else 1, tp).axes

    def has_data(self, tp: int, rows: int) -> bool:
        """Whether they are made with a data axis: one row is not shared."""
        return rows > 1 and 2 * tp <= self._main(tp).num_devices

    def operators(self, rows: int) -> Mapping[tuple[str, str], Operator]:
        """The calls of the graph at `rows` rows over all ranks; once decisions are made."""
        return next(iter(self.bases.values())).operators(rows)

    def priced_for(self, request: Request) -> Decisions:
        """The same on other devices or links."""
        return Decisions(request, {n: bases.priced_for(request.of_group(n)) for n, bases in self.bases.items()})

    def _bases(self, tp: int) -> Bases:
        number = self.request.whole.groups.index(self._main(tp))
        if number not in self.bases:
            self.bases[number] = Bases(self.request.of_group(number), TYPICAL_ROWS)
        return self.bases[number]

    def _decided(self, tp: int, rows: int, price: float) -> Key:
        return tp, self.has_data(tp, rows), min(rows, TYPICAL_ROWS), price

    def _main(self, tp: int) -> Cluster:
        """The group that decisions are made for: with room for two data-parallel ranks if there is one, and of these
        the one with the highest rate of all devices together."""
        fits = [g for g in self.request.whole.groups if tp <= g.num_devices]
        has_room = [g for g in fits if 2 * tp <= g.num_devices] or fits
        return max(has_room, key=lambda g: g.num_devices * max(g.device.peak_flops_per_second.values()))
