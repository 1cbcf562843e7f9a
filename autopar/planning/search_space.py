"""The search space: every variable of a graph on one mesh, and the Problem that prices them together.

The variables of the Problem are of four kinds:

    operator   an Option of a call
    tensor     the placements in which a batch input, a layer's input, or a tensor with several uses is kept;
               each use reshards from there, so a reshard that several uses share is paid for once
    parameter  a Stored: placements as used, and a ZeRO stage
    zero       the ZeRO stage of a scope (the top level or a layer class), shared by all parameters that can have one

Edges have resharding times (forward plus conjugate backward, less the share that overlaps weight gradients). Layers of
one class are one set of decisions whose costs count as often as there are layers. A layer's carried output is resharded
to its input's placements, so the class decides its boundary.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autopar.costs.layer_costs import WAITED
from autopar.costs.overlap import Overlaps
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.saved import saved_tensors
from autopar.costs.stored_costs import sharding_axes
from autopar.ir.graph import UPDATE_BUFFER, Graph, LayerRun, Ref, TensorMeta
from autopar.ir.mesh import ZERO_AXES, Mesh
from autopar.ir.placement import Placements, R, Stored
from autopar.settings.constraints import Constraints
from autopar.sharding.call_options import Operator, Option, options_of, routed_axes
from autopar.sharding.expert_routes import keeps_rows
from autopar.sharding.legal_placements import LegalPlacements
from autopar.sharding.reshard import steps
from autopar.sharding.scopes import Scope
from codegen.evaluation import NORMS, STATISTICS
from search.problem import Edge, Problem, Variable

Key = tuple[str, str, str, int]
"""Name of a variable: (kind, scope, name, output index)."""


@dataclass(frozen=True, slots=True)
class SearchVariable:
    """One variable. `placements[i]` has the placements of each output under option i (one entry for tensors and
    parameters)."""

    key: Key
    options: tuple[Any, ...]
    outputs: tuple[tuple[Placements, ...], ...]


@dataclass(frozen=True, slots=True)
class Reshards:
    """Reshards of a tensor between two variables' placements, or to the loss's placement (source is target).

    made, wanted: placements by option. count: how often in a step. is_joined: with the result's readers, where its
    gradient is summed (overlap.py).
    """

    source: int
    target: int
    produced: tuple[Placements, ...]
    wanted: tuple[Placements, ...]
    has_gradient: bool
    count: float
    is_joined: bool


@dataclass
class SearchSpace:
    """The variables of one graph on one mesh, in order, and their problem.

    reshards: all possible ones. gathers: number of a "zero" variable -> how often a step gathers its scope under
    stage 3.
    """

    graph: Graph
    mesh: Mesh
    variables: list[SearchVariable]
    problem: Problem
    reshards: list[Reshards]
    gathers: dict[int, float]

    def index(self) -> Mapping[Key, int]:
        return {variable.key: i for i, variable in enumerate(self.variables)}


def build_search_space(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    constraints: Constraints,
    memory_limit: float = float("inf"),
    is_bound: bool = False,
) -> SearchSpace:
    """Build all variables and prices.

    memory_limit: bytes per rank for the variables. is_bound: prices add up to no more than a plan's prediction.
    Otherwise a reshard counts once for every call that reads its result, and gradients as if they were never sent
    while the device waits for its host.
    """
    builder = _Builder(graph=graph, operators=operators, pricer=pricer, constraints=constraints, is_bound=is_bound)
    builder.add_variables()
    builder.add_edges()
    variables = tuple(
        Variable(":".join(map(str, d.key)), costs, usage)
        for d, costs, usage in zip(builder.variables, builder.costs, builder.usage, strict=True)
    )
    edges = tuple(Edge(a, b, costs) for (a, b), costs in builder.edges.items())
    problem = Problem(variables, edges, memory_limit)
    return SearchSpace(
        graph=graph,
        mesh=pricer.mesh,
        variables=builder.variables,
        problem=problem,
        reshards=builder.reshards,
        gathers=builder.gathers,
    )


@dataclass
class _Builder:
    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    pricer: Pricer
    constraints: Constraints
    is_bound: bool = False
    variables: list[SearchVariable] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    usage: list[np.ndarray] = field(default_factory=list)
    edges: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    index: dict[Key, int] = field(default_factory=dict)
    reshards: list[Reshards] = field(default_factory=list)
    gathers: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mesh = self.pricer.mesh
        self.options = {k: self.constraints.offered(op, options_of(op, mesh), mesh) for k, op in self.operators.items()}
        self.offers = LegalPlacements(self.graph, self.options, mesh)
        self.scopes, self.runs, self.uses = self.offers.scopes, self.offers.runs, self.offers.uses
        self.overlaps = Overlaps(self.graph, self.operators, self.pricer)
        self.stored_names = frozenset(p.name for p in self.graph.parameters)

    # --- variables --------------------------------------------------------------------------------------------

    def add_variables(self) -> None:
        """Add parameters, inputs and operators of the top level, then of each layer class."""
        for item in self.graph.inputs:
            if Ref(item.name) in self.uses[""]:
                self._add_tensor(
                    "", Ref(item.name), item.meta, self.offers.batch_input(item.name, item.meta, item.batch_dim)
                )
        for scope in self.scopes.values():
            if scope.layer:
                for formal, meta in scope.layer.inputs:
                    self._add_tensor(scope.name, Ref(formal), meta, self.offers.tensor(scope, Ref(formal)))
            names = {p.name: p.meta for p in (scope.layer.parameters if scope.layer else self.graph.parameters)}
            used = [(name, meta) for name, meta in names.items() if Ref(name) in self.uses[scope.name]]
            placements = {name: self.offers.parameter(scope, Ref(name), meta) for name, meta in used}
            buffer_bytes = self._buffer_bytes(used, placements)
            stages = self._stages()
            none = np.zeros(len(stages))
            self.gathers[len(self.variables)] = scope.count * self.pricer.training.num_micro_batches
            self._add(SearchVariable(("zero", scope.name, "", 0), stages, tuple(() for _ in stages)), none, none)
            for name, meta in used:
                self._add_parameter(scope, name, meta, placements[name], buffer_bytes)
            self._add_operators(scope)

    def _buffer_bytes(
        self, parameters: Sequence[tuple[str, TensorMeta]], placements: Mapping[str, tuple[Placements, ...]]
    ) -> dict[tuple[int, ...], int]:
        """Return the bytes of the trained parameters that may share buffers, by the axes that shard them
        (stored_costs.py)."""
        sizes: dict[tuple[int, ...], int] = defaultdict(int)
        for name, meta in parameters:
            if meta.requires_grad:
                for axes in {sharding_axes(self.pricer.mesh.axes, choice) for choice in placements[name]}:
                    sizes[axes] += meta.num_bytes
        return sizes

    def _add(self, variable: SearchVariable, costs: np.ndarray, usage: np.ndarray) -> None:
        self.index[variable.key] = len(self.variables)
        self.variables.append(variable)
        self.costs.append(costs)
        self.usage.append(usage)

    def _add_operators(self, scope: Scope) -> None:
        parameters = self.stored_names | frozenset(p.name for p in (scope.layer.parameters if scope.layer else ()))
        kept = saved_tensors(scope.nodes, scope.metas, parameters, on_cpu=is_cpu(self.pricer.cluster))
        micro = self.pricer.training.num_micro_batches
        for node in scope.nodes:
            operator = self.operators[scope.name, node.name]
            options = self.constraints.allowed_options(
                scope, operator, self.options[scope.name, node.name], self.pricer.mesh
            )
            seconds = [
                forward * self.pricer.rates.num_forwards + backward + self._loss_seconds(scope, node.name, o)
                for o in options
                for forward, backward in (self.pricer.operator_seconds(operator, o),)
            ]
            usage = [self.pricer.saved_bytes(operator, o, kept.get(node.name, ())) for o in options]
            variable = SearchVariable(
                ("operator", scope.name, node.name, 0), options, tuple(o.outputs for o in options)
            )
            self._add(variable, np.array(seconds) * scope.count * micro, np.array(usage) * scope.count)
            if not scope.name and self.graph.loss.node == node.name:
                loss_index, results = self.index[variable.key], tuple(o.outputs[self.graph.loss.index] for o in options)
                self._reshards(loss_index, loss_index, results, (self._whole,), scope.metas[self.graph.loss], micro)
            for position, meta in enumerate(node.outputs):
                ref = Ref(node.name, position)
                if len(self.uses[scope.name].get(ref, ())) > 1:
                    produced = tuple(o.outputs[position] for o in options)
                    self._add_tensor(scope.name, ref, meta, self.offers.tensor(scope, ref, produced))

    def _loss_seconds(self, scope: Scope, name: str, option: Option) -> float:
        """Price replicating the loss at the end."""
        if scope.name or self.graph.loss.node != name:
            return 0.0
        meta = scope.metas[self.graph.loss]
        return self.pricer.rates.reshard_seconds(option.outputs[self.graph.loss.index], self._whole, meta)

    @property
    def _whole(self) -> Placements:
        return (R,) * len(self.pricer.mesh.axes)

    def _reshards(
        self,
        source: int,
        target: int,
        produced: tuple[Placements, ...],
        wanted: tuple[Placements, ...],
        meta: TensorMeta,
        count: float,
        is_joined: bool = False,
    ) -> None:
        self.reshards.append(
            Reshards(
                source=source,
                target=target,
                produced=produced,
                wanted=wanted,
                has_gradient=meta.requires_grad,
                count=count,
                is_joined=is_joined,
            )
        )

    def _add_tensor(self, scope: str, ref: Ref, meta: TensorMeta, assignment: tuple[Placements, ...]) -> None:
        variable = SearchVariable(("tensor", scope, ref.node, ref.index), assignment, tuple((c,) for c in assignment))
        self._add(variable, np.zeros(len(assignment)), np.zeros(len(assignment)))

    def _add_parameter(
        self,
        scope: Scope,
        name: str,
        meta: TensorMeta,
        placements: tuple[Placements, ...],
        buffer_bytes: Mapping[tuple[int, ...], int],
    ) -> None:
        pricer, options = self.pricer, []
        for choice in placements:
            for zero in self._zero_stages(meta, choice):
                options.append(Stored(choice, zero))
        options = list(self.constraints.allowed_stored(scope, name, tuple(options), pricer.mesh))
        priced = [(o, buffer_bytes.get(sharding_axes(pricer.mesh.axes, o.placements), 0)) for o in options]
        seconds = [pricer.parameters.stored_seconds(meta, o, size) for o, size in priced]
        if self.is_bound and pricer.rates.host_call_seconds:
            sent = [pricer.parameters.sync_parts(meta, o, size)[1] for o, size in priced]
            seconds = [whole - (1.0 - WAITED) * zero_stages for whole, zero_stages in zip(seconds, sent, strict=True)]
        usage = [sum(pricer.parameters.parameter_bytes(meta, o)) for o in options]
        variable = SearchVariable(
            ("parameter", scope.name, name, 0), tuple(options), tuple((o.placements,) for o in options)
        )
        self._add(variable, np.array(seconds) * scope.count, np.array(usage) * scope.count)
        if len(self._stages()) > 1 and meta.requires_grad:
            zero_stages = [self._zero_stages(meta, o.placements) for o in options]
            bar = [
                [0.0 if len(can) == 1 or o.zero == z else np.inf for o, can in zip(options, zero_stages, strict=True)]
                for z in self._stages()
            ]
            self._add_matrix(self.index["zero", scope.name, "", 0], self.index[variable.key], np.array(bar))

    def _zero_stages(self, meta: TensorMeta, placements: Placements) -> tuple[int, ...]:
        """Return the ZeRO stages open to one parameter: its gradient must be partial over dp."""
        return self._stages() if self.offers.can_shard(meta, placements) else (0,)

    def _stages(self) -> tuple[int, ...]:
        """Return the ZeRO stages open to a scope. With one micro-batch stage 1 is never better than 2, which costs
        the same."""
        if not set(ZERO_AXES) & set(self.pricer.mesh.axes):
            return (0,)
        if self.constraints.zero is not None:
            return (self.constraints.zero,)
        return (0, 2, 3) if self.pricer.training.num_micro_batches == 1 else (0, 1, 2, 3)

    # --- edges ------------------------------------------------------------------------------------------------

    def add_edges(self) -> None:
        """Add the edges from each producer to its kept tensor, and from there to each use."""
        micro = self.pricer.training.num_micro_batches
        for scope in self.scopes.values():
            weight = scope.count * micro
            for node in scope.nodes:
                target = self.index["operator", scope.name, node.name, 0]
                options = self.variables[target].options
                for position, ref in enumerate(node.inputs):
                    wanted = tuple(option.inputs[position] for option in options)
                    is_written = node.op in NORMS and ref in [node.args[index] for index in STATISTICS]
                    is_written |= node.op == UPDATE_BUFFER and position == 0
                    self._edge(scope, ref, target, wanted, weight, is_written)
                for position in range(len(node.outputs)):
                    kept = self.index.get(("tensor", scope.name, node.name, position))
                    if kept is not None:
                        produced = tuple(option.outputs[position] for option in options)
                        site = scope.name, Ref(node.name, position)
                        wanted = self.variables[kept].options
                        matrix = self.overlaps.reshard_matrix(site, produced, wanted, is_kept=True)
                        matrix = self._bar_moves(scope, site[1], produced, wanted, matrix)
                        self._add_matrix(target, kept, matrix * weight)
                        is_joined = self.overlaps.is_joined(site, is_kept=True)
                        self._reshards(target, kept, produced, wanted, node.outputs[position], weight, is_joined)
                self._add_route_bar(scope, node.name)
                self._add_load(scope, node.name)
        for run in self.runs:
            self._run_edges(run, micro)

    def _add_route_bar(self, scope: Scope, name: str) -> None:
        """Add inf if an expert layer routes its rows over other axes than the first one with the same rows."""
        first = self.operators[scope.name, name].route.like
        if first in ("", name):
            return
        here, there = (self.index["operator", scope.name, name_of_call, 0] for name_of_call in (name, first))
        here_axes, others = ([routed_axes(o.axes) for o in self.variables[index].options] for index in (here, there))
        if len({*here_axes, *others}) > 1:
            self._add_matrix(there, here, np.array([[0.0 if a == b else np.inf for b in here_axes] for a in others]))

    def _add_load(self, scope: Scope, name: str) -> None:
        """Add the seconds in which the fullest rank has more rows of a call between two expert layers than the mean.

        The option of the layer before it says over which ranks rows travel.
        """
        layer = self.operators[scope.name, name].route.layer
        if not layer:
            return
        here, there = (self.index["operator", scope.name, name_of_call, 0] for name_of_call in (name, layer))
        operator, rows = self.operators[scope.name, layer], self.pricer.contractions.rows
        loads = np.array([rows.load(operator, option) for option in self.variables[there].options])
        if (loads > 1.0).any():
            self._add_matrix(there, here, np.outer(loads - 1.0, self.costs[here]))

    def _bar_moves(
        self, scope: Scope, ref: Ref, produced: Sequence[Placements], wanted: Sequence[Placements], matrix: np.ndarray
    ) -> np.ndarray:
        """Return the matrix with inf where a reshard would move rows that are sorted by expert."""
        operator = self.operators.get((scope.name, ref.node))
        if operator is None or operator.route.returns:
            return matrix
        moves = np.array([[not keeps_rows(a, b) for b in wanted] for a in produced])
        return np.where(moves, np.inf, matrix)

    def _run_edges(self, run: LayerRun, micro: int) -> None:
        layer = self.scopes[run.layer.name]
        for position, ref in enumerate(run.args):
            target = self.index["tensor", layer.name, run.layer.inputs[position][0], 0]
            self._edge(self.scopes[""], ref, target, self.variables[target].options, micro)
        for position, output in run.carried:
            target = self.index["tensor", layer.name, run.layer.inputs[position][0], 0]
            self._edge(
                layer, run.layer.outputs[output], target, self.variables[target].options, len(run.instances) * micro
            )

    def source(self, scope: Scope, ref: Ref) -> tuple[int, int]:
        """Return the (variable, output index) that decides the placements of `ref` at its use."""
        for kind in ("tensor", "parameter"):
            variable_index = self.index.get((kind, scope.name, ref.node, ref.index))
            if variable_index is not None:
                return variable_index, 0
        if ("operator", scope.name, ref.node, 0) in self.index:
            return self.index["operator", scope.name, ref.node, 0], ref.index
        run = next(r for r in self.runs if r.name == ref.node)
        inner = run.layer.outputs[ref.index]
        for position, output in run.carried:
            if output == ref.index:
                return self.index["tensor", run.layer.name, run.layer.inputs[position][0], 0], 0
        return self.source(self.scopes[run.layer.name], inner)

    def _edge(
        self,
        scope: Scope,
        ref: Ref,
        target: int,
        wanted: tuple[Placements, ...],
        weight: float,
        is_written: bool = False,
    ) -> None:
        origin, output = self.source(scope, ref)
        variable = self.variables[origin]
        produced = tuple(outputs[output] for outputs in variable.outputs)
        matrix = self._bar_moves(
            scope, ref, produced, wanted, self.overlaps.reshard_matrix((scope.name, ref), produced, wanted)
        )
        if variable.key[0] == "parameter":
            is_single = len(self.uses[scope.name][ref]) == 1
            matrix = matrix + self._parameter_bar(produced, wanted, is_single, is_written)
        readers = max(len(self.uses[scope.name].get(ref, ())), 1) if self.is_bound else 1
        self._add_matrix(origin, target, matrix * (weight / readers))
        is_joined = self.overlaps.is_joined((scope.name, ref))
        self._reshards(origin, target, produced, wanted, scope.metas[ref], weight, is_joined)

    def _parameter_bar(
        self, produced: tuple[Placements, ...], wanted: tuple[Placements, ...], is_single: bool, is_written: bool
    ) -> np.ndarray:
        """Return inf for a parameter with one use that would be gathered in every micro-batch, or cut although it may
        be stored cut. Neither is ever better. Also return inf if a call that writes to a buffer would write to a moved
        copy."""
        sizes = self.pricer.mesh.sizes
        bar: dict[tuple[Placements, Placements], float] = {}
        for pair in {(m, w) for m in produced for w in wanted}:
            path = steps(*pair, sizes)
            moves = path is None or any(step.forward or step.backward for step in path)
            gathers = any(m.is_shard and m != w for m, w in zip(*pair, strict=True))
            bar[pair] = (
                float("inf") if moves and (is_written or (is_single and (pair[1] in produced or gathers))) else 0.0
            )
        return np.array([[bar[m, w] for w in wanted] for m in produced])

    def _add_matrix(self, a: int, b: int, matrix: np.ndarray) -> None:
        self.edges[a, b] = self.edges[a, b] + matrix if (a, b) in self.edges else matrix
