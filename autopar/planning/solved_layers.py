"""Solutions of the inner problem for pipelines, each solved once for all meshes that share it.

Forward and backward costs on one rank depend on the degrees of tensor, context and expert parallelism and on the rows
of one data-parallel rank. They do not depend on the number of such ranks: `dp` shards the batch and nothing else, and
every option on dp2 x tpN is one on dp64 x tpN. So one solution on two data-parallel ranks serves all; only its
parameters are priced again.

A solved layer minimizes seconds + price * bytes, for a few multipliers (Lagrangian points of the time-memory
frontier). The multipliers do not depend on the budget, so that a smaller budget has no candidates that a larger one
lacks. If devices wait for their hosts, the fastest solution has alternatives (host_bound.py), and each mesh takes the
best of these.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from autopar.costs.emitted import Known
from autopar.costs.layer_costs import LayerCost
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.ir.graph import Graph
from autopar.ir.mesh import ZERO_AXES, Mesh, zero_axes
from autopar.ir.placement import Stored
from autopar.ir.stage_mesh import StageMesh
from autopar.planning.call_costs import CallCosts
from autopar.planning.host_bound import Stretch, with_host
from autopar.planning.parallel_config import ParallelConfig
from autopar.planning.request import Request, decode, divisors, pricer_for
from autopar.planning.search_space import SearchSpace, build_search_space
from autopar.planning.shared_costs import KnownCosts
from autopar.settings.constraints import Constraints
from autopar.sharding.assignment import Assignment, axis_sources, on_axes
from autopar.sharding.batch_rescaling import covers, rescaled
from autopar.sharding.call_options import Operator, num_experts, operators_of
from codegen.axis_records import AXES
from search.intra_op import solve
from search.problem import InfeasibleError, Problem, Solution

MULTIPLIERS = (0.0, 0.1, 1.0)
"""Multipliers of the bytes of one device's memory, relative to the step's compute: 0 minimizes time alone."""

GRID_ROWS = 2
"""Rows of a data-parallel rank for which layers on two axes of tensor parallelism are solved. A call has as many
options as the axes have pairs of them, and is solved as seldom as in a large request."""

TYPICAL_MICRO_BATCHES = 4
"""The number of micro-batches with which a solved layer weighs costs per micro-batch against costs per step."""


@dataclass(frozen=True, slots=True)
class SolvedLayer:
    """An assignment for a mesh, and its costs per micro-batch without parameters.

    costed: a mesh with ranks like those of `mesh`, with the assignment and rows for all its ranks. solved: the
    solver's assignment, on the axes `solved_axes` for a graph of `solved_rows` rows with the calls `operators`.
    multiplier: of the solution. storage: equal for solved layers that store all parameters alike.
    """

    mesh: Mesh
    call_costs: CallCosts
    costed: Mesh
    solved: Assignment
    solved_axes: tuple[str, ...]
    solved_rows: int
    operators: Mapping[tuple[str, str], Operator]
    multiplier: float
    storage: Hashable

    @property
    def costs(self) -> Mapping[str, LayerCost]:
        """Return the cost of every unit, without its parameters."""
        return self.call_costs.costs

    def assignment(self, zero: int, rows: int) -> Assignment:
        """Return the assignment on the mesh for a graph of `rows` rows over all ranks. The ZeRO stage applies to every
        parameter that can have one."""
        here = rescaled(self.solved, self.operators, self.solved_rows, rows)
        placed = on_axes(here, self.solved_axes, self.mesh.axes)
        return Assignment(placed.operators, placed.tensors, self.parameters(zero))

    def parameters(self, zero: int) -> dict[tuple[str, str], Stored]:
        """Return the stored parameters. The ZeRO stage applies to every parameter that can have one."""
        return stored_parameters(self.solved, self.solved_axes, self.mesh.axes, zero)


def stored_parameters(
    assignment: Assignment, axes: tuple[str, ...], wanted: tuple[str, ...], zero: int
) -> dict[tuple[str, str], Stored]:
    """Return the parameters of an assignment on `axes` as a mesh with `wanted` axes stores them. The ZeRO stage applies
    to every parameter that can have one."""
    source = axis_sources(axes, wanted)
    parameters = {}
    for key, stored in assignment.parameters.items():
        placements = tuple(stored.placements[i] for i in source)
        parameters[key] = Stored(placements, zero if zero_axes(wanted, placements) else 0)
    return parameters


class Key(NamedTuple):
    """The key of a solved layer: degrees of tensor, context and expert parallelism, rows per data-parallel rank, and
    the multiplier.

    num_data: groups of data-parallel ranks: 1, or 2 for every larger number, unless the model runs only at the
    batch's number of rows. ttp: the other side of a grid of tensor parallelism.
    """

    tp: int
    cp: int
    ep: int
    num_data: int
    rows: int
    multiplier: float = 0.0
    ttp: int = 1

    @property
    def mesh(self) -> Mesh:
        """Return the mesh on which it is solved."""
        return named_mesh(self.num_data, self.tp, ep=self.ep, cp=self.cp, ttp=self.ttp)

    @property
    def whole_rows(self) -> int:
        """Return the rows of the graph, over all ranks of the mesh."""
        return self.rows * self.mesh.num_data_ranks


@dataclass
class SolvedLayers:
    """Layers solved on demand.

    Large requests, and grids of tensor parallelism (see GRID_ROWS), reuse assignments: those for `typical_rows` at
    other numbers of rows, and those with a data axis on meshes without one. If all ranks of a group of `ep` may have
    experts, they reuse those for the fewest of them. known_costs: cached costs of searches that share these layers.
    prices_all_ranks: whether layers are priced on all data-parallel ranks, not on two of them.
    """

    request: Request
    typical_rows: int | None = None
    _assignments: dict[Key, Assignment | None] = field(default_factory=dict)
    _alternatives: dict[Key, tuple[Assignment, ...]] = field(default_factory=dict)
    _solved_layers: dict[tuple[Mesh, int, float], SolvedLayer | None] = field(default_factory=dict)
    _call_costs: dict[tuple[Mesh, int, int], CallCosts] = field(default_factory=dict)
    _covered: dict[tuple[int, int], bool] = field(default_factory=dict)
    _storage: dict[tuple[tuple[str, ...], frozenset[tuple[tuple[str, str], Stored]]], int] = field(default_factory=dict)
    _stored_as: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    _search_spaces: dict[Key, SearchSpace] = field(default_factory=dict)
    _fastest: dict[Key, Solution] = field(default_factory=dict)
    _operators: dict[int, dict[tuple[str, str], Operator]] = field(default_factory=dict)
    _emitted_programs: Known = field(default_factory=dict)
    _numbered: list[Assignment] = field(default_factory=list)
    known_costs: list[KnownCosts] = field(default_factory=list)
    prices_all_ranks: bool = False
    _deferring: SolvedLayers | None = None

    def solved_layer(self, mesh: Mesh, rows: int, multiplier: float) -> SolvedLayer | None:
        """Return the solved layer of a mesh. The tp ranks share `rows` rows of a micro-batch. Return None if the
        constraints leave nothing."""
        key = (mesh, rows, multiplier)
        if key not in self._solved_layers:
            self._solved_layers[key] = self._make(*key)
        return self._solved_layers[key]

    def of(self, config: ParallelConfig, stage_mesh: StageMesh) -> SolvedLayer | None:
        """Return a config's solved layer on its only stage mesh."""
        return self.solved_layer(stage_mesh.mesh, config.rows_on(stage_mesh), config.multiplier)

    def repeats(self, config: ParallelConfig) -> bool:
        """Return whether free memory leads to the same assignment, or the constraints leave nothing."""
        (stage_mesh,) = config.stage_meshes
        priced = self.of(config, stage_mesh)
        if priced is None or not config.multiplier:
            return priced is None
        free = self.solved_layer(stage_mesh.mesh, config.rows_on(stage_mesh), 0.0)
        return free is not None and free.solved is priced.solved

    def _make(self, mesh: Mesh, rows: int, multiplier: float) -> SolvedLayer | None:
        tp, ttp, cp, ep = (mesh.size(axis) for axis in ("tp", "ttp", "cp", "ep"))
        has_data = mesh.num_data_ranks > ep
        fits_dp = 2 * tp * ttp * cp * ep <= self.request.cluster.num_devices
        typical_rows = self.typical_rows or (min(GRID_ROWS, self.request.global_batch_size) if ttp > 1 else None)
        solved_with_data = has_data or (typical_rows is not None and fits_dp)
        # If tp and ttp join neighbors, their costs do not depend on the number of their groups.
        costed = (
            mesh
            if self.prices_all_ranks or (mesh.axes and AXES[mesh.axes[0]].cuts_features and tp * ttp < mesh.num_ranks)
            else Key(tp=tp, ttp=ttp, cp=cp, ep=ep, num_data=1 + has_data, rows=rows).mesh
        )
        num_data, can_estimate = 1 + solved_with_data, self.request.trace.can_estimate
        whole = rows * costed.num_data_ranks
        if not can_estimate(whole) or not can_estimate((typical_rows or rows) * num_data * ep):
            # The model runs only at the batch's number of rows.
            costed, typical_rows, num_data = mesh, None, mesh.num_data_ranks // ep
            whole = rows * costed.num_data_ranks
        shares_out = num_experts(self.request.trace.estimate(whole)) % (ep * cp * ttp * tp) == 0  # for any decisions
        solved_ep = ep if typical_rows is None or ep == 1 or not shares_out else divisors(ep)[1]
        solved_key = Key(
            tp=tp,
            ttp=ttp,
            cp=cp,
            ep=solved_ep,
            num_data=num_data,
            rows=typical_rows or rows,
            multiplier=multiplier,
        )
        assignment = self.assignment(solved_key)
        if assignment is not None and not self._covers(assignment, whole):  # a model that differs at few rows
            solved_key = solved_key._replace(ep=ep, num_data=1 + has_data, rows=rows)
            assignment = self.assignment(solved_key)
        if assignment is None:
            return None
        if alternatives := self._alternatives_of(solved_key):
            priced = (self._costs_of(choice, solved_key, costed, rows) for choice in (assignment, *alternatives))
            best = min(priced, key=lambda pair: pair[1].chosen_seconds)
        else:
            best = self._costs_of(assignment, solved_key, costed, rows)
        assignment, call_costs = best
        axes, solved_rows = solved_key.mesh.axes, solved_key.whole_rows
        return SolvedLayer(
            mesh=mesh,
            call_costs=call_costs,
            costed=costed,
            solved=assignment,
            solved_axes=axes,
            solved_rows=solved_rows,
            operators=self.operators(solved_rows),
            multiplier=multiplier,
            storage=self.storage_of(assignment, axes),
        )

    def _costs_of(
        self, assignment: Assignment, solved_key: Key, costed: Mesh, rows: int
    ) -> tuple[Assignment, CallCosts]:
        """Return an assignment with its costs on a mesh with `rows` rows of a data-parallel rank."""
        key, whole = (costed, rows, self._number_of(assignment)), rows * costed.num_data_ranks
        # Programs that differ in sizes alone may differ in views, which only CPUs count.
        calls = tuple((operator.node.op, operator.route) for operator in self.operators(whole).values())
        decisions = None if is_cpu(self.request.cluster) else (key[2], calls)
        if key not in self._call_costs:
            solved_rows = solved_key.whole_rows
            here = rescaled(assignment, self.operators(solved_rows), solved_rows, whole)
            self._call_costs[key] = CallCosts(
                graph=self.request.trace.estimate(whole),
                operators=self.operators(whole),
                pricer=self.pricer(costed),
                assignment=on_axes(here, solved_key.mesh.axes, costed.axes),
                emitted_programs=self._emitted_programs,
                decisions=decisions,
            )
        return assignment, self._call_costs[key]

    def _alternatives_of(self, key: Key) -> tuple[Assignment, ...]:
        """Return alternatives to the assignment that is fastest on the device alone. There are none unless devices wait
        for their hosts."""
        if key not in self._alternatives:
            solutions, assignments = list[Solution](), dict[tuple[int, ...], Assignment]()
            fastest_assignment = self._assignments.get(key)
            if (
                fastest_assignment is not None
                and key in self._search_spaces
                and self.pricer(key.mesh).rates.host_call_seconds
            ):
                search_space, fastest = self._search_spaces[key], self._fastest[key]
                assignments[fastest.assignment] = fastest_assignment

                def measure(solution: Solution) -> tuple[Stretch, ...]:
                    chosen = solution.assignment
                    assignments[chosen] = assignments.get(chosen) or decode(search_space, chosen)
                    return self._costs_of(assignments[chosen], key, key.mesh, key.rows)[1].stretches

                solutions = with_host(search_space, self.pricer(key.mesh), fastest, measure)
            self._alternatives[key] = tuple(assignments[alternative.assignment] for alternative in solutions)
        return self._alternatives[key]

    def storage_of(self, assignment: Assignment, axes: tuple[str, ...]) -> int:
        """Return a number for how an assignment stores the parameters: equal if that is."""
        key = self._number_of(assignment), axes
        if key not in self._stored_as:
            kind = axes, frozenset(assignment.parameters.items())
            self._stored_as[key] = self._storage.setdefault(kind, len(self._storage))
        return self._stored_as[key]

    def _number_of(self, assignment: Assignment) -> int:
        """Return a number of the solver's assignment. All requests that share the programs of its decisions share the
        number."""
        for number, numbered in enumerate(self._numbered):
            if numbered is assignment:
                return number
        self._numbered.append(assignment)
        return len(self._numbered) - 1

    def _covers(self, assignment: Assignment, rows: int) -> bool:
        """Return whether the graph of so many rows has the calls that the assignment decides on."""
        key = self._number_of(assignment), rows
        if key not in self._covered:
            self._covered[key] = covers(assignment, self.request.trace.estimate(rows))
        return self._covered[key]

    def priced_for(self, request: Request) -> SolvedLayers:
        """Return the same assignments for another cluster, with only their costs computed again."""
        return SolvedLayers(
            request,
            self.typical_rows,
            dict(self._assignments),
            dict(self._alternatives),
            _operators=self._operators,
            _covered=self._covered,
            _emitted_programs=self._emitted_programs,
            _numbered=self._numbered,
        )

    def decided_for(self, request: Request) -> SolvedLayers:
        """Return layers to be solved for another request about the same model on the same devices, with another
        objective. Its calls and lowered programs are the same."""
        return SolvedLayers(
            request,
            self.typical_rows,
            _operators=self._operators,
            _covered=self._covered,
            _emitted_programs=self._emitted_programs,
            _numbered=self._numbered,
        )

    def deferring(self, request: Request) -> SolvedLayers:
        """Return layers for the same request under a schedule that defers weight gradients."""
        if self._deferring is None:
            self._deferring = self.decided_for(request)
        return self._deferring

    def operators(self, rows: int) -> dict[tuple[str, str], Operator]:
        """Return the calls of the graph at `rows` rows over all ranks."""
        if rows not in self._operators:
            self._operators[rows] = operators_of(self.request.trace.estimate(rows))
        return self._operators[rows]

    def pricer(self, mesh: Mesh) -> Pricer:
        """Return the prices on a solved layer's mesh."""
        return pricer_for(self.request, mesh, TYPICAL_MICRO_BATCHES)

    def assignment(self, key: Key) -> Assignment | None:
        """Return the assignment that minimizes seconds plus multiplier times bytes; if that also minimizes seconds,
        the same object."""
        if key not in self._assignments:
            try:
                assignment = self._solve(key)
                fastest = self.assignment(key._replace(multiplier=0.0)) if key.multiplier else None
                self._assignments[key] = fastest if fastest == assignment else assignment
            except InfeasibleError:
                self._assignments[key] = None
        return self._assignments[key]

    def _solve(self, wanted: Key) -> Assignment:
        key, mesh = wanted._replace(multiplier=0.0), wanted.mesh
        if key not in self._search_spaces:
            limits, whole = without_zero(self.request.constraints, mesh), key.whole_rows
            graph = self.request.trace.estimate(whole)
            search_space = build_search_space(graph, self.operators(whole), self.pricer(mesh), limits)
            self._fastest[key] = solve(search_space.problem)
            self._search_spaces[key] = search_space
        return _at_multiplier(self._search_spaces[key], self._fastest[key], wanted.multiplier, self.request)


def without_zero(limits: Constraints, mesh: Mesh) -> Constraints:
    """Return the constraints for decisions that precede the ZeRO stage's."""
    return replace(limits, zero=0 if set(ZERO_AXES) & set(mesh.axes) else None)


def solved_anew(
    request: Request, graph: Graph, operators: Mapping[tuple[str, str], Operator], mesh: Mesh, multiplier: float
) -> Assignment:
    """Return an assignment on a graph with other calls than the solved layers have, solved in the same way. Raises
    InfeasibleError."""
    limits = without_zero(request.constraints, mesh)
    search_space = build_search_space(graph, operators, pricer_for(request, mesh, TYPICAL_MICRO_BATCHES), limits)
    return _at_multiplier(search_space, solve(search_space.problem), multiplier, request)


def _at_multiplier(search_space: SearchSpace, fastest: Solution, multiplier: float, request: Request) -> Assignment:
    """Return the assignment that minimizes seconds plus multiplier times bytes."""
    if not multiplier:
        return decode(search_space, fastest.assignment)
    seconds_per_byte = multiplier * fastest.objective / request.cluster.device.memory_bytes
    return decode(search_space, solve(_charged(search_space.problem, seconds_per_byte)).assignment)


def _charged(problem: Problem, seconds_per_byte: float) -> Problem:
    """Return the problem with the multiplier on every byte."""
    variables = tuple(replace(v, costs=v.costs + seconds_per_byte * v.usage) for v in problem.variables)
    return replace(problem, variables=variables)


@cache
def named_mesh(dp: int, tp: int, ddp: int = 1, ep: int = 1, cp: int = 1, ttp: int = 1, tp_first: bool = False) -> Mesh:
    """Return ddp x dp x cp x ep x ttp x tp without axes of one rank. tp_first: neighbors differ in data, and ttp x tp
    joins distant ranks."""
    data = [("ddp", ddp), ("dp", dp), ("cp", cp), ("ep", ep)]
    tensor = [("ttp", ttp), ("tp", tp)]
    named = [(a, n) for a, n in ([*tensor, *data] if tp_first else [*data, *tensor]) if n > 1]
    return Mesh(tuple(a for a, _ in named), tuple(n for _, n in named))
