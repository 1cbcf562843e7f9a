"""Solutions of the inner problem that pipelines are made of, each solved once for all meshes that share it.

What forward and backward cost on one rank depends on the tensor-parallel degree and on the rows of one data-parallel
rank, not on how many such ranks there are: `dp` shards the batch and nothing else, and every option on dp2 x tpN is one
on dp64 x tpN. So one solution on two data-parallel ranks serves all; only what its parameters cost is priced anew.

A base minimises seconds + price * bytes, for a few prices of a byte (Lagrangian points of the time-memory frontier);
the prices do not depend on the budget, so that a smaller budget has no candidates that a larger one lacks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from autopar.costs.block_costs import BlockCost, BusySeconds
from autopar.costs.borders import border_bytes
from autopar.costs.emitted import Known
from autopar.costs.evaluate import layer_costs, layer_seconds
from autopar.costs.price import Pricer
from autopar.ir.graph import Graph
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Rp, Stored
from autopar.ir.seats import Seat
from autopar.options.carried import carried, covers
from autopar.options.choices import Choices, axis_sources, on_axes
from autopar.options.strategies import Operator, operators_of
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, decode, pricer_for
from autopar.planning.space import Space, build_space
from search.intra_op import solve
from search.problem import InfeasibleError, Problem, Solution

PRICES = (0.0, 0.1, 1.0)
"""Prices of the bytes of one device's memory, in times of the step's compute: 0 asks for speed alone."""

TYPICAL_MICRO_BATCHES = 4
"""Micro-batches by which a base weighs what is done per micro-batch against what is done per step."""


@dataclass
class Activity:
    """What decisions do on a mesh per micro-batch, parameters left out; found when it is asked for.

    known: programs of the model that were lowered already. Bounds ask for seconds only, and most configs get no further
    than their bound.
    """

    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    pricer: Pricer
    choices: Choices
    known: Known = field(default_factory=dict)

    @cached_property
    def seconds(self) -> Mapping[str, BusySeconds]:
        """Block -> seconds of forward and backward, and of weight gradients that can be put off."""
        return layer_seconds(self.graph, self.operators, self.pricer, self.choices, self.known)

    @cached_property
    def border_bytes(self) -> tuple[float, ...]:
        """Of one rank per micro-batch, at the border before each block."""
        return border_bytes(self.graph, self.pricer.mesh, self.choices)

    @cached_property
    def costs(self) -> Mapping[str, BlockCost]:
        """Block -> seconds by kind and bytes."""
        return layer_costs(self.graph, self.operators, self.pricer, self.choices, self.known)


@dataclass(frozen=True, slots=True)
class Base:
    """Decisions for a mesh, and what they cost per micro-batch without parameters.

    costed: a mesh of which one rank does the same as one of `mesh`, with decisions and rows for all its ranks.
    solved: the decisions as they were made, on the axes `solved_axes` for a graph of `solved_rows` rows with the calls
    `operators`. price: of a byte, as they were made. storage: equal for bases that store all parameters alike.
    """

    mesh: Mesh
    activity: Activity
    costed: Mesh
    solved: Choices
    solved_axes: tuple[str, ...]
    solved_rows: int
    operators: Mapping[tuple[str, str], Operator]
    price: float
    storage: Hashable

    @property
    def costs(self) -> Mapping[str, BlockCost]:
        """The cost of every block, without its parameters."""
        return self.activity.costs

    def choices(self, zero: int, rows: int) -> Choices:
        """All decisions on the mesh for a graph of `rows` rows over all ranks, with a ZeRO stage wherever one is
        possible."""
        here = carried(self.solved, self.operators, self.solved_rows, rows)
        placed = on_axes(here, self.solved_axes, self.mesh.axes)
        return Choices(placed.operators, placed.tensors, self.parameters(zero))

    def parameters(self, zero: int) -> dict[tuple[str, str], Stored]:
        """The stored parameters with a ZeRO stage wherever one is possible."""
        return stored_parameters(self.solved, self.solved_axes, self.mesh.axes, zero)


def stored_parameters(
    choices: Choices, axes: tuple[str, ...], wanted: tuple[str, ...], zero: int
) -> dict[tuple[str, str], Stored]:
    """The parameters of decisions on `axes` as they are stored on a mesh with `wanted` axes, with a ZeRO stage wherever
    one is possible: where every rank of `dp` reads all of a parameter, and has a partial sum of its gradient."""
    source = axis_sources(axes, wanted)
    on_dp = wanted.index("dp") if "dp" in wanted else None
    found = {}
    for key, stored in choices.parameters.items():
        placements = tuple(stored.placements[i] for i in source)
        can = on_dp is not None and placements[on_dp] == Rp
        found[key] = Stored(placements, zero if can else 0)
    return found


Key = tuple[int, bool, int, float]
"""(tensor-parallel degree, whether there is a data axis, rows per data-parallel rank, price)"""


@dataclass
class Bases:
    """Solves bases on demand. Large requests reuse the decisions made for `typical_rows` at other numbers of rows, and
    those made with a data axis where there is none."""

    request: Request
    typical_rows: int | None = None
    _choices: dict[Key, Choices | None] = field(default_factory=dict)
    _bases: dict[tuple[Mesh, int, float], Base | None] = field(default_factory=dict)
    _activity: dict[tuple[Mesh, int, float], Activity] = field(default_factory=dict)
    _storage: dict[tuple[tuple[str, ...], frozenset[tuple[tuple[str, str], Stored]]], int] = field(default_factory=dict)
    _stored_as: dict[tuple[Key, tuple[str, ...]], int] = field(default_factory=dict)
    _spaces: dict[tuple[int, bool, int], Space] = field(default_factory=dict)
    _fastest: dict[tuple[int, bool, int], Solution] = field(default_factory=dict)
    _operators: dict[int, dict[tuple[str, str], Operator]] = field(default_factory=dict)
    _known: Known = field(default_factory=dict)

    def base(self, mesh: Mesh, rows: int, price: float) -> Base | None:
        """The base of a mesh whose tp ranks share `rows` rows of a micro-batch; None where the constraints leave
        nothing."""
        key = (mesh, rows, price)
        if key not in self._bases:
            self._bases[key] = self._make(*key)
        return self._bases[key]

    def base_of(self, config: ParallelConfig, stage_mesh: Seat) -> Base | None:
        """A config's decisions on its only stage mesh."""
        return self.base(stage_mesh.mesh, config.rows_on(stage_mesh), config.price)

    def repeats(self, config: ParallelConfig) -> bool:
        """Whether bytes that cost nothing lead to the same decisions, or the constraints leave nothing."""
        (stage_mesh,) = config.stage_meshes
        priced = self.base_of(config, stage_mesh)
        if priced is None or not config.price:
            return priced is None
        free = self.base(stage_mesh.mesh, config.rows_on(stage_mesh), 0.0)
        return free is not None and free.solved is priced.solved

    def _make(self, mesh: Mesh, rows: int, price: float) -> Base | None:
        tp, has_data = mesh.size("tp"), mesh.num_data_ranks > 1
        fits_dp = 2 * tp <= self.request.cluster.num_devices
        solved_with_data = has_data or (self.typical_rows is not None and fits_dp)
        # Where tp joins neighbours, its costs do not depend on how many groups of it there are.
        costed = mesh if mesh.axes[-1:] != ("tp",) and tp > 1 else named_mesh(2 if has_data else 1, tp)
        whole = rows * costed.num_data_ranks
        graph = self.request.trace.estimate(whole)
        decided = (tp, solved_with_data, self.typical_rows or rows, price)
        choices = self.choices(*decided)
        if choices is not None and not covers(choices, graph):  # a model that is another one with few rows
            decided = (tp, has_data, rows, price)
            choices = self.choices(*decided)
        if choices is None:
            return None
        axes, solved_rows = decided_on(decided)
        key = (costed, rows, price)
        if key not in self._activity:
            here = carried(choices, self.operators(solved_rows), solved_rows, whole)
            placed = on_axes(here, axes, costed.axes)
            self._activity[key] = Activity(
                graph=graph,
                operators=self.operators(whole),
                pricer=self.pricer(costed),
                choices=placed,
                known=self._known,
            )
        calls, storage = self.operators(solved_rows), self.storage_of(decided, axes)
        return Base(
            mesh=mesh,
            activity=self._activity[key],
            costed=costed,
            solved=choices,
            solved_axes=axes,
            solved_rows=solved_rows,
            operators=calls,
            price=price,
            storage=storage,
        )

    def storage_of(self, decided: Key, axes: tuple[str, ...]) -> int:
        """A number for how the decisions store the parameters: equal where that is."""
        if (decided, axes) not in self._stored_as:
            choices = self.choices(*decided)
            assert choices is not None
            kind = axes, frozenset(choices.parameters.items())
            self._stored_as[decided, axes] = self._storage.setdefault(kind, len(self._storage))
        return self._stored_as[decided, axes]

    def priced_for(self, request: Request) -> Bases:
        """The same decisions for another cluster: only what they cost is found anew."""
        return Bases(request, self.typical_rows, dict(self._choices), _operators=dict(self._operators))

    def operators(self, rows: int) -> dict[tuple[str, str], Operator]:
        """The calls of the graph at `rows` rows over all ranks."""
        if rows not in self._operators:
            self._operators[rows] = operators_of(self.request.trace.estimate(rows))
        return self._operators[rows]

    def pricer(self, mesh: Mesh) -> Pricer:
        """The prices on a base's mesh."""
        return pricer_for(self.request, mesh, TYPICAL_MICRO_BATCHES)

    def choices(self, tp: int, has_dp: bool, rows: int, price: float) -> Choices | None:
        """The decisions that minimise seconds plus the price of their bytes; where those are the ones that minimise
        seconds, the same object."""
        key = (tp, has_dp, rows, price)
        if key not in self._choices:
            try:
                found = self._solve(*key)
                fastest = self.choices(tp, has_dp, rows, 0.0) if price else None
                self._choices[key] = fastest if fastest == found else found
            except InfeasibleError:
                self._choices[key] = None
        return self._choices[key]

    def _solve(self, tp: int, has_dp: bool, rows: int, price: float) -> Choices:
        key = (tp, has_dp, rows)
        if key not in self._spaces:
            mesh = named_mesh(2 if has_dp else 1, tp)
            whole = rows * mesh.num_data_ranks
            limits = replace(self.request.constraints, zero=0 if has_dp else None)
            graph = self.request.trace.estimate(whole)
            self._spaces[key] = build_space(graph, self.operators(whole), self.pricer(mesh), limits, None)
            self._fastest[key] = solve(self._spaces[key].problem)
        return _at_price(self._spaces[key], self._fastest[key], price, self.request)


def decided_anew(
    request: Request, graph: Graph, operators: Mapping[tuple[str, str], Operator], mesh: Mesh, price: float
) -> Choices:
    """A base's decisions on a graph whose calls are not those that bases are made for. Raises InfeasibleError."""
    limits = replace(request.constraints, zero=0 if mesh.num_data_ranks > 1 else None)
    space = build_space(graph, operators, pricer_for(request, mesh, TYPICAL_MICRO_BATCHES), limits, None)
    return _at_price(space, solve(space.problem), price, request)


def decided_on(decided: Key) -> tuple[tuple[str, ...], int]:
    """The axes of the mesh that decisions are made on, and the rows of the graph over all its ranks."""
    tp, has_data, rows, _ = decided
    mesh = named_mesh(2 if has_data else 1, tp)
    return mesh.axes, rows * mesh.num_data_ranks


def _at_price(space: Space, fastest: Solution, price: float, request: Request) -> Choices:
    """The decisions that minimise seconds plus the price of their bytes."""
    if not price:
        return decode(space, fastest.choices)
    seconds_per_byte = price * fastest.objective / request.cluster.device.memory_bytes
    return decode(space, solve(_charged(space.problem, seconds_per_byte)).choices)


def _charged(problem: Problem, seconds_per_byte: float) -> Problem:
    """The problem with a price on every byte."""
    variables = tuple(replace(v, costs=v.costs + seconds_per_byte * v.usage[0]) for v in problem.variables)
    return replace(problem, variables=variables)


@cache
def named_mesh(dp: int, tp: int, ddp: int = 1, tp_first: bool = False) -> Mesh:
    """ddp x dp x tp without axes of one rank; tp_first: neighbours differ in dp, and tp joins distant ranks."""
    data = [("ddp", ddp), ("dp", dp)]
    named = [(a, n) for a, n in ([("tp", tp), *data] if tp_first else [*data, ("tp", tp)]) if n > 1]
    return Mesh(tuple(a for a, _ in named), tuple(n for _, n in named))
