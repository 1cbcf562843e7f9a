"""What every block of the model costs on a rank of each shape of submesh, under given terms.

Forward and backward depend on the rows of a rank, not on how many such ranks there are: they are priced on at most two
data-parallel ranks, and parameters on the submesh as it is (see bases.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.chain import chain, homes_of
from autopar.costs.block_costs import BlockCost, exposed
from autopar.costs.borders import border_bytes, second_copies, shared_parameters, tie_costs
from autopar.costs.cost_table import combined
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.stage_costs import Copy
from autopar.costs.stored_costs import StoredCost, stored_costs
from autopar.mesh import Mesh
from autopar.placement import Stored
from autopar.planning.bases import Activity, named_mesh, stored_parameters
from autopar.planning.request import Request, pricer_for
from autopar.planning.unequal.decisions import Decisions
from autopar.planning.unequal.terms import Terms, position_counts
from autopar.seats import Seat
from autopar.sharding.choices import Choices, on_axes
from autopar.sharding.strategies import scopes_of

ActivityKey = tuple[int, Mesh, int, int, float]
"""(group, mesh that is priced, rows of a rank, tensor-parallel degree of the decisions, price)"""

StoredKey = tuple[Seat, int, float, int, str, bool, bool]
"""(seat, degree, price, ZeRO stage, offload, whether there are several micro-batches, whether they have one row)"""

TotalsKey = tuple[Seat, int, float, int, int, str, str]
"""(seat, degree, price, number of micro-batches, ZeRO stage, offload, schedule)"""

ClassSeconds = tuple[float, float, float]
"""Of one block: busy per micro-batch, of this weight gradients, and once per step."""


@dataclass
class SeatCosts:
    """Prices of the blocks of one request's model, each found when it is asked for."""

    decisions: Decisions
    _activity: dict[ActivityKey, Activity] = field(default_factory=dict)
    _stored: dict[StoredKey, dict[str, StoredCost]] = field(default_factory=dict)
    _borders: dict[ActivityKey, tuple[float, ...]] = field(default_factory=dict)
    _totals: dict[TotalsKey, list[ClassSeconds]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request = self.decisions.request
        self.graph = self.request.trace(self.request.global_batch_size)
        self.blocks = chain(self.graph)
        self.counts = Counter(self.blocks)
        self.homes, self.scopes = homes_of(self.graph), scopes_of(self.graph)
        self.shared = shared_parameters(self.graph)
        self.groups = self.request.whole.groups
        self.is_on_cpu = is_cpu(self.groups[0])

    def asked(self, request: Request) -> SeatCosts:
        """Of a request with other constraints or another batch, with the same decisions and prices."""
        return SeatCosts(Decisions(request, self.decisions.bases), self._activity, self._stored, self._borders)

    def positions(self, seats: tuple[Seat, ...]) -> set[int]:
        """How many positions of these shapes take all devices."""
        return position_counts(self.request, len(self.blocks), seats)

    def choices(self, terms: Terms) -> tuple[Choices, tuple[str, ...]]:
        """The decisions, and the axes that they are on."""
        choices = self.decisions.choices(terms.tp, terms.rows, terms.price)
        assert choices is not None
        return choices, self.decisions.axes(terms.tp, terms.rows)

    def choices_at(self, terms: Terms, graph_rows: int) -> Choices:
        """The decisions, for a graph of `graph_rows` rows over all ranks."""
        choices = self.decisions.choices_at(terms.tp, terms.rows, terms.price, graph_rows)
        assert choices is not None
        return choices

    def costs(self, seat: Seat, terms: Terms) -> dict[str, BlockCost]:
        """Every block on a seat."""
        return combined(self.activity(seat, terms).costs, self._stored_of(seat, terms))

    def seconds(self, seat: Seat, terms: Terms) -> list[ClassSeconds]:
        """Of every class of blocks on a seat, in the order of `counts`."""
        key = (seat, terms.tp, terms.price, terms.num_micro_batches, terms.zero, terms.offload, terms.schedule)
        if key not in self._totals:
            activity, stored = self.activity(seat, terms).seconds, self._stored_of(seat, terms)
            found = []
            for name in self.counts:
                busy, own = activity[name], stored.get(name, StoredCost())
                micro = busy.under(terms.schedule) + exposed(own.per_micro)
                found.append((micro, busy.weight, exposed(own.per_step)))
            self._totals[key] = found
        return self._totals[key]

    def activity(self, seat: Seat, terms: Terms) -> Activity:
        """What one rank of a seat does per micro-batch."""
        key = self._activity_key(seat, terms)
        if key not in self._activity:
            _, costed, rows, _, _ = key
            axes, whole = self.decisions.axes(terms.tp, terms.rows), rows * costed.num_data_ranks
            graph, operators = self.request.trace.estimate(whole), self.decisions.operators(whole)
            pricer = pricer_for(self.request.of_group(seat.group), costed, num_micro_batches=1)
            choices = self.choices_at(terms, whole)
            self._activity[key] = Activity(graph, operators, pricer, on_axes(choices, axes, costed.axes))
        return self._activity[key]

    def borders(self, seat: Seat, terms: Terms) -> tuple[float, ...]:
        """Bytes per micro-batch and rank of a seat at every border."""
        key = self._activity_key(seat, terms)
        if key not in self._borders:
            activity = self.activity(seat, terms)
            self._borders[key] = border_bytes(activity.graph, activity.pricer.mesh, activity.choices)
        return self._borders[key]

    def copies(self, seat: Seat, terms: Terms) -> tuple[Copy, ...]:
        """The buffers of parameters that two blocks read, in the stage of the second."""
        return second_copies(self.graph, self._pricer(seat, terms), self._parameters(seat, terms))

    def ties(self, seat: Seat, terms: Terms) -> Mapping[str, tuple[tuple[float, float, float], float]]:
        """Of every such parameter, bytes of the second copy and seconds to sum both gradients."""
        return tie_costs(self.graph, self._pricer(seat, terms), self._parameters(seat, terms), num_positions=2)

    def _activity_key(self, seat: Seat, terms: Terms) -> ActivityKey:
        rows = terms.rows // seat.mesh.num_data_ranks
        costed = named_mesh(min(seat.mesh.num_data_ranks, 2), seat.mesh.size("tp"))
        return seat.group, costed, rows, terms.tp, terms.price

    def _stored_of(self, seat: Seat, terms: Terms) -> dict[str, StoredCost]:
        several = terms.num_micro_batches > 1
        key = (seat, terms.tp, terms.price, terms.zero, terms.offload, several, terms.rows == 1)
        if key not in self._stored:
            pricer, parameters = self._pricer(seat, terms), self._parameters(seat, terms)
            self._stored[key] = stored_costs(self.graph, pricer, parameters, self.homes, self.scopes)
        return self._stored[key]

    def _parameters(self, seat: Seat, terms: Terms) -> Mapping[tuple[str, str], Stored]:
        """As they are stored on a seat."""
        choices, axes = self.choices(terms)
        return stored_parameters(choices, axes, seat.mesh.axes, terms.zero)

    def _pricer(self, seat: Seat, terms: Terms) -> Pricer:
        """Prices of what is stored on a seat."""
        return pricer_for(self.request.of_group(seat.group), seat.mesh, terms.num_micro_batches, terms.offload)
