"""Forward and backward costs of a program for every unit of the model's chain, without parameters.

A unit's seconds are the sum over its calls and the steps of its reshards, both read off the program (events.py).
Layers of one class may be in several runs and are one unit. stored_costs.py counts the costs of parameters once per
step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from autopar.costs.emitted import Emitted, Known, classes, emitted, priced
from autopar.costs.events import Moved, Ran, Reader, Unit
from autopar.costs.host_calls import host_calls
from autopar.costs.layer_costs import HIDDEN, ComputeSeconds, LayerCost, exposed
from autopar.costs.liveness import Walk
from autopar.costs.overlap import Overlaps
from autopar.costs.price import Pricer
from autopar.costs.rates import is_cpu
from autopar.costs.recompute_modes import recompute_modes
from autopar.costs.saved import saved_tensors
from autopar.ir.chain import chain, segments
from autopar.ir.graph import Graph, Node, Ref
from autopar.ir.placement import Placements
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, Option
from autopar.sharding.scopes import Scope, scopes_of
from codegen.program import ModuleClass, Statement


def layer_costs(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    assignment: Assignment,
    cache: Known | None = None,
) -> dict[str, LayerCost]:
    """Price forward and backward without parameters.

    Depends on the micro-batch shape of one data-parallel rank, not on the number of such ranks. known: cached
    programs of the model.
    """
    program = emitted(graph, operators, pricer, assignment, {} if cache is None else cache)
    return _Evaluation(program, graph, operators, pricer, assignment).costs()


def layer_seconds(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    assignment: Assignment,
    cache: Known | None = None,
    decisions: Hashable = None,
) -> dict[str, ComputeSeconds]:
    """Return the seconds of every unit, as `layer_costs` does, without counting bytes. decisions: see `emitted`."""
    program = emitted(graph, operators, pricer, assignment, {} if cache is None else cache, decisions)
    costs = _Evaluation(program, graph, operators, pricer, assignment).costs(with_bytes=False)
    return {
        name: ComputeSeconds(
            forward=cost.forward_seconds,
            backward=cost.backward_seconds,
            weight=cost.weight_seconds,
            overlapped=cost.overlapped_seconds,
            host=cost.host,
        )
        for name, cost in costs.items()
    }


Sent = tuple[Mapping[str, float], Mapping[str, float]]
"""Seconds by kind of the exchanges inside a call, of its forward and backward."""


@dataclass(frozen=True, slots=True)
class StatementCost:
    """A program statement with its seconds on one rank per micro-batch. hidden: of a sum in backward that overlaps
    weight gradients; `backward` leaves it out."""

    statement: Statement
    forward: float
    backward: float
    hidden: float


def statement_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, assignment: Assignment
) -> dict[str, tuple[StatementCost, ...]]:
    """Return by scope the seconds of every statement that `layer_costs` adds up."""
    program = emitted(graph, operators, pricer, assignment, {})
    evaluation = _Evaluation(program, graph, operators, pricer, assignment)
    return {scope.name: tuple(evaluation.statements(scope)) for scope in scopes_of(graph)}


class _Evaluation:
    """One walk over a program. graph: of any number of rows, with the calls that the program stands for."""

    def __init__(
        self,
        program: Emitted,
        graph: Graph,
        operators: Mapping[tuple[str, str], Operator],
        pricer: Pricer,
        assignment: Assignment,
    ) -> None:
        self.emitted, self.graph, self.operators, self.assignment = program, graph, operators, assignment
        self.pricer = priced(program.program, graph, operators, pricer)
        self.overlaps = Overlaps(graph, operators, pricer)
        self.unit_costs: dict[str, LayerCost] = {name: LayerCost() for name in chain(graph)}

    def costs(self, with_bytes: bool = True) -> dict[str, LayerCost]:
        """Return the costs of all units; without bytes there are only seconds, and no modes."""
        for scope in scopes_of(self.graph):
            units = self._units(scope, anew=with_bytes)
            for name, unit in units.items():
                self._seconds(scope, unit, self.unit_costs[name])
                self.unit_costs[name].host = self._issued(scope, name, unit)
            if with_bytes:
                self._bytes(scope, units)
            if scope.layer and with_bytes:
                cost = self.unit_costs[scope.name]
                cost.modes = recompute_modes(self.graph, self.operators, self.pricer, self.assignment, scope, cost)
        return self.unit_costs

    def _units(self, scope: Scope, anew: bool) -> Mapping[str, Unit]:
        """Return the events in the units of a scope. anew: with the calls of this graph, because bytes need the
        sizes."""
        key = scope.name, self.pricer.mesh
        if anew or key not in self.emitted.units:
            self.emitted.units[key] = self._reader(scope).units(*self._body(scope))
        units: Mapping[str, Unit] = self.emitted.units[key]
        return units

    def _reader(self, scope: Scope) -> Reader:
        fusions = self.pricer.kernels.fusions if self.pricer.kernels is not None else None
        tables = self.operators, self.assignment, fusions or {}, segments(self.graph)
        return Reader(scope, self.pricer.mesh, *tables)

    def _body(self, scope: Scope) -> tuple[ModuleClass, tuple[Statement, ...]]:
        """Return a scope's class, and the statements that run ahead of its body."""
        before = () if scope.layer else self.emitted.program.whole_sums
        return dict(classes(self.emitted.program))[scope.name], before

    def statements(self, scope: Scope) -> Iterator[StatementCost]:
        """Yield every statement of a scope with its seconds."""
        for statement, unit in self._reader(scope).each(*self._body(scope)):
            cost = LayerCost()
            self._seconds(scope, unit, cost)
            yield StatementCost(statement, cost.forward_seconds, cost.backward_seconds, cost.overlapped_seconds)

    # --- seconds ------------------------------------------------------------------------------------------------------

    def _seconds(self, scope: Scope, unit: Unit, cost: LayerCost) -> None:
        hidden_shares: dict[str, float] = {}
        for key in unit.calls:
            operator, option = self.operators[key], self.assignment.operators[key]
            load, seconds_of = self._load(operator), self.pricer.operator_seconds(operator, option)
            forward, backward = load * seconds_of[0], load * seconds_of[1]
            kinds = self.pricer.compute_kinds(operator)
            sent, hidden_share = self._exchanged(operator, option)
            cost.forward[kinds[0]] += forward - exposed(sent[0])
            cost.backward[kinds[1]] += backward - exposed(sent[1])
            for table, part in zip((cost.forward, cost.backward), sent, strict=True):
                for kind, seconds in part.items():
                    table[kind] += seconds
                    if hidden_share:
                        hidden_shares[kind] = hidden_share
            cost.weight_seconds += load * self.pricer.weight_seconds(operator, option, sum(seconds_of))
            cost.deferring_seconds += self.pricer.deferring_seconds(operator)
        for event in unit.events:
            if isinstance(event, Moved):
                self._move(scope, event, cost)
        _hide(cost, hidden_shares)

    def _load(self, operator: Operator) -> float:
        """Return the rows that the fullest rank has of a call between two expert layers, relative to the mean; 1 for
        other calls. Layers themselves are priced so (contractions.py)."""
        if not operator.route.layer:
            return 1.0
        layer = operator.scope, operator.route.layer
        return self.pricer.contractions.rows.load(self.operators[layer], self.assignment.operators[layer])

    def _exchanged(self, operator: Operator, option: Option) -> tuple[Sent, float]:
        """Return the seconds in which ranks exchange keys and values, or rows of experts, by kind and direction.

        The second value is the share that other computation of the unit can hide. Seconds that attention's kernels hide
        are a separate kind.
        """
        axes = self.pricer.mesh.axes
        if operator.node.op == EXPERT_LINEAR:
            rows = self.pricer.contractions.rows.exchange(operator, option)
            if not rows.kind:
                return ({}, {}), 0.0
            kind = f"{rows.kind} {' x '.join(axes[axis] for axis in rows.axes)}"
            has_backward = any(meta.requires_grad for meta in operator.inputs[:2])
            return ({kind: rows.forward}, {kind: rows.backward} if has_backward else {}), rows.hidden
        call = self.pricer.contractions.context_call(operator, option)
        directions = self.pricer.contractions.context_directions(operator, option)
        if call is None or directions is None:
            return ({}, {}), 0.0
        forward, backward = (
            {f"{kind} {axes[call.axis]}": seconds for kind, seconds in direction.sent.items()}
            | ({HIDDEN: direction.hidden} if direction.hidden else {})
            for direction in directions
        )
        return (forward, backward), 0.0

    def _issued(self, scope: Scope, name: str, unit: Unit) -> tuple[float, float]:
        """Return the host seconds to issue the calls of a unit."""
        one, calls = self.pricer.rates.host_call_seconds, self.emitted.calls
        if not one:
            return 0.0, 0.0
        if name not in calls:
            calls[name] = host_calls(unit.statements, bool(scope.layer), self.pricer.rates.is_compiled)
        return one * calls[name][0], one * calls[name][1]

    def _move(self, scope: Scope, move: Moved, cost: LayerCost) -> None:
        meta, axes = scope.metas[move.ref], self.pricer.mesh.axes
        readers = [self.operators[scope.name, name] for name in move.overlapped]
        hidden = self.overlaps.hidden(meta, move.target, move.path[-1], readers) if readers else 0.0
        for index, step in enumerate(move.path):
            forward, backward = self.pricer.rates.step_seconds(step, meta)
            kind = f"{step.backward} {axes[step.axis]}" if step.backward else "local resharding"
            if hidden and index == len(move.path) - 1:
                cost.overlapped[kind] += hidden
                backward -= hidden
            cost.forward[f"{step.forward} {axes[step.axis]}" if step.forward else "local resharding"] += forward
            cost.backward[kind] += backward

    # --- bytes --------------------------------------------------------------------------------------------------------

    def _bytes(self, scope: Scope, units: Mapping[str, Unit]) -> None:
        """Count the bytes that the calls of a scope keep, and those alive while they run."""
        names = (p.name for p in (scope.layer.parameters if scope.layer else ()))
        parameters = frozenset(p.name for p in self.graph.parameters) | frozenset(names)
        events = [event for unit in units.values() for event in unit.events]
        ran = {event.name: event for event in events if isinstance(event, Ran)}
        copies = {(event.ref, event.target) for event in events if isinstance(event, Moved) and not event.is_free}
        nodes = tuple(event.operator.node for event in ran.values())
        on_cpu = is_cpu(self.pricer.cluster)
        kept = saved_tensors(nodes, scope.metas, parameters, partial(_copied, ran, copies), on_cpu)
        for name, unit in units.items():
            self.unit_costs[name].live = Walk(scope, unit, self.pricer, kept, parameters).measure()


def _copied(ran: Mapping[str, Ran], copies: set[tuple[Ref, Placements]], node: Node, ref: Ref) -> Placements | None:
    """Return the placement of an input that is resharded for a call by a copy."""
    placements = ran[node.name].option.inputs[node.inputs.index(ref)]
    return placements if (ref, placements) in copies else None


def _hide(cost: LayerCost, shares: Mapping[str, float]) -> None:
    """Hide these shares of a unit's exchanges behind its computation, at most as many seconds as it computes.

    An exchange overlaps another micro-batch's computation, which is equal to this one's. All exchanges share it.
    """
    tables = cost.forward, cost.backward
    sent = {kind: sum(table[kind] for table in tables) for kind in shares}
    wanted = sum(share * sent[kind] for kind, share in shares.items())
    computed = cost.forward_seconds + cost.backward_seconds - sum(sent.values())
    possible = min(1.0, computed / wanted) if wanted else 0.0
    for kind, share in shares.items():
        hidden = share * possible
        for table in tables:
            table[HIDDEN] += hidden * table[kind]
            table[kind] *= 1 - hidden
