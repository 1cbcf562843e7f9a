"""Events of a program's statements on one rank: calls of the graph, and reshards.

A statement stands for the graph's calls in `Call.original`: a run-time function runs them one after the other, a
kernel all at once. Consecutive steps of one reshard, each reading only its predecessor's result, are one event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from autopar.costs.emitted import names_of
from autopar.ir.graph import Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Placements
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, Option
from autopar.sharding.fusible_runs import Fusion
from autopar.sharding.reshard import Step, steps
from autopar.sharding.scopes import Scope
from codegen.fusion.match import Flow
from codegen.program import Call, LayerLoop, ModuleClass, Reshard, Statement, TensorType, Var, assigns

OVERLAPPED = {"overlapped.linear": 0, "overlapped.linears": 0, "overlapped.addmm": 1}
"""Calls that sum their input gradient while they compute weight gradients, with the position of that input."""

Key = tuple[Ref, Placements]
"""A tensor of the graph with its placement."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A call of the graph, or a fused kernel as one call.

    is_passing: its results have no variable; a run-time function computes them and frees them when it returns.
    names: assigned variables -> their new content.
    """

    operator: Operator
    option: Option
    is_passing: bool = False
    names: tuple[tuple[str, Key], ...] = ()

    @property
    def name(self) -> str:
        """Return the call's name in the graph."""
        return self.operator.node.name


@dataclass(frozen=True, slots=True)
class Moved:
    """A reshard of `ref` by these steps.

    name: of the assigned variable. overlapped: the linear layers, by their names in the graph, whose weight
    gradients overlap the sum of its backward.
    """

    ref: Ref
    source: Placements
    target: Placements
    path: tuple[Step, ...]
    name: str
    overlapped: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[tuple[str, Key], ...]:
        """Return the assigned variable -> its new content."""
        return ((self.name, (self.ref, self.target)),)

    @property
    def is_free(self) -> bool:
        """Return whether it copies nothing forward."""
        return all({step.source.kind, step.target.kind} == {"R", "Rp"} for step in self.path)


Event = Ran | Moved


@dataclass(slots=True)
class Unit:
    """The events of one unit of the chain.

    calls: of the graph, each call of a fused kernel. ends: results read outside of the unit, with their placement at
    its end. rebound: variables reassigned outside of it. statements: of the unit.
    """

    events: list[Event] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    ends: list[Key] = field(default_factory=list)
    rebound: set[str] = field(default_factory=set)
    statements: list[Statement] = field(default_factory=list)


class Reader:
    """Reader of one class of a program. segments: top-level call -> its unit."""

    def __init__(
        self,
        scope: Scope,
        mesh: Mesh,
        operators: Mapping[tuple[str, str], Operator],
        assignment: Assignment,
        fusions: Mapping[tuple[str, str], Fusion],
        segments: Mapping[str, str],
    ) -> None:
        self.scope, self.mesh, self.segments = scope, mesh, segments
        self.operators, self.assignment, self.fusions = operators, assignment, fusions
        self.stand_in: dict[str, Key] = {}
        self.done: set[str] = set()

    def units(self, cls: ModuleClass, before: tuple[Statement, ...] = ()) -> dict[str, Unit]:
        """Return the units of the class by name. before: statements that run ahead of its body."""
        body = (*before, *cls.body)
        flow = Flow.of(body, cls.outputs)
        overlapped = _overlapped(body, flow)
        units: dict[str, Unit] = {}
        homes = self._homes(body)
        previous: tuple[str, int] = "", -1
        for index, (statement, home) in enumerate(zip(body, homes, strict=True)):
            unit = units.setdefault(home, Unit())
            unit.statements.append(statement)
            if isinstance(statement, Call):
                self._call(statement, unit)
            elif isinstance(statement, Reshard):
                joins = previous == (statement.source.name, index - 1) and self._is_only_for(index, flow)
                self._reshard(statement, unit, joins, overlapped.get(index, ()))
                previous = statement.result.name, index
        self._end(units, body, homes, cls.outputs, flow)
        return units

    def each(self, cls: ModuleClass, before: tuple[Statement, ...] = ()) -> Iterator[tuple[Statement, Unit]]:
        """Yield every statement of the class with its events; steps of one reshard are several events here."""
        body = (*before, *cls.body)
        overlapped = _overlapped(body, Flow.of(body, cls.outputs))
        for index, statement in enumerate(body):
            unit = Unit()
            if isinstance(statement, Call):
                self._call(statement, unit)
            elif isinstance(statement, Reshard):
                self._reshard(statement, unit, False, overlapped.get(index, ()))
            yield statement, unit

    def _homes(self, body: tuple[Statement, ...]) -> list[str]:
        """Return the unit of every statement: that of its calls, else of the next calls before a layer, else of the
        last."""
        if self.scope.layer is not None:
            return [self.scope.name] * len(body)
        nearest = next(iter(self.segments.values()), "")
        homes, waiting = list[str](), 0
        for statement in (*body, None):
            names = names_of(statement) if isinstance(statement, Call) else ()
            home = next((self.segments[name] for name in names if name in self.segments), "")
            waiting += statement is not None
            if home or statement is None or isinstance(statement, LayerLoop):
                nearest = home or nearest
                homes, waiting = homes + [nearest] * waiting, 0
        return homes

    # --- statements ---------------------------------------------------------------------------------------------------

    def _call(self, call: Call, unit: Unit) -> None:
        fusion = next((f for name in names_of(call) if (f := self.fusions.get((self.scope.name, name)))), None)
        if fusion is not None:
            if call.target == fusion.node.op:
                unit.events += self._fused(fusion, call)
                unit.calls += [(self.scope.name, member.name) for member in fusion.members]
            return
        for original in call.original:
            names = [name for name in names_of(original) if (self.scope.name, name) in self.operators]
            if not names:
                self._stands_in(original)
            for name in names:
                if name not in self.done:
                    self.done.add(name)
                    key = self.scope.name, name
                    produced = self._names(call, name)
                    unit.events.append(Ran(self.operators[key], self.assignment.operators[key], not produced, produced))
                    unit.calls.append(key)

    def _names(self, call: Call, tensor_name: str) -> tuple[tuple[str, Key], ...]:
        """Return the variables that refer to results of the graph's call `made`."""
        results = (result for result in assigns(call) if result.type.tensor[0] == tensor_name)
        return tuple((result.name, key) for result in results if (key := self.key(result)) is not None)

    def _stands_in(self, call: Call) -> None:
        """Let a result outside the graph stand for its source."""
        source = next((key for arg in call.args if isinstance(arg, Var) and (key := self.key(arg))), None)
        if source is not None:
            self.stand_in |= {result.name: source for result in assigns(call)}

    def _fused(self, fusion: Fusion, call: Call) -> Iterator[Ran]:
        """Yield a kernel's results, each with the placements of its sources."""
        scope, options = self.scope.name, self.assignment.operators
        placements_of = {Ref(node.name): options[scope, node.name].outputs[0] for node in fusion.nodes}
        members = {member.name: member for member in fusion.members}
        for ref, name in fusion.readers.items():
            placements_of[ref] = options[scope, name].inputs[members[name].inputs.index(ref)]
        for node in fusion.nodes:
            metas = tuple(self.scope.metas[ref] for ref in node.inputs)
            operator = replace(self.operators[scope, node.name], node=node, inputs=metas, runs=None)
            inputs = tuple(placements_of[ref] for ref in node.inputs)
            option = replace(options[scope, node.name], inputs=inputs)
            yield Ran(operator, option, names=self._names(call, node.name))

    def _reshard(self, statement: Reshard, unit: Unit, joins: bool, overlapped: tuple[str, ...]) -> None:
        source, target = self.key(statement.source), self.key(statement.result)
        if source is None or target is None or source[0] != target[0] or source == target:
            return
        path = steps(source[1], target[1], self.mesh.sizes) or ()
        last = unit.events[-1] if unit.events and joins else None
        if isinstance(last, Moved) and (last.ref, last.target) == source:
            path, source = (*last.path, *path), (last.ref, last.source)
            unit.events.pop()
        ref, placements = source
        unit.events.append(
            Moved(
                ref=ref,
                source=placements,
                target=target[1],
                path=path,
                name=statement.result.name,
                overlapped=overlapped,
            )
        )

    @staticmethod
    def _is_only_for(index: int, flow: Flow) -> bool:
        """Return whether nothing else reads the input of a reshard."""
        statement = flow.body[index]
        assert isinstance(statement, Reshard)
        return flow.readers[index - 1, statement.source.name] == {index}

    def _end(
        self,
        units: Mapping[str, Unit],
        body: tuple[Statement, ...],
        homes: list[str],
        outputs: tuple[Var, ...],
        flow: Flow,
    ) -> None:
        if self.scope.layer is not None:
            keys = [self.key(output) for output in outputs]
            units[self.scope.name].ends += [key for key in keys if key is not None]
            return
        for name, unit in units.items():
            others = (s for s, home in zip(body, homes, strict=True) if home != name or _is_loop(s))
            unit.rebound |= {variable.name for statement in others for variable in assigns(statement)}
        for index, statement in enumerate(body):
            for variable in () if isinstance(statement, LayerLoop) else assigns(statement):
                readers = flow.readers.get((index, variable.name), frozenset())
                leaves = any(r == len(body) or homes[r] != homes[index] or _is_loop(body[r]) for r in readers)
                key = self.key(variable) if leaves else None
                if key is not None and key not in units[homes[index]].ends:
                    units[homes[index]].ends.append(key)

    def key(self, variable: Var) -> Key | None:
        """Return the graph's tensor that a variable refers to or stands for; None for counts and the like."""
        name, index = variable.type.tensor
        return (Ref(name, index), placements_of(variable.type, self.mesh)) if name else self.stand_in.get(variable.name)


def _overlapped(body: tuple[Statement, ...], flow: Flow) -> dict[int, tuple[str, ...]]:
    """Return for a reshard, by number, the linear layers with weight gradients that overlap its backward's sum."""
    return {
        flow.origins[index][call.args[OVERLAPPED[call.target]].name]: names_of(call)
        for index, call in enumerate(body)
        if isinstance(call, Call) and call.target in OVERLAPPED
    }


def _is_loop(statement: Statement) -> bool:
    return isinstance(statement, LayerLoop)


def placements_of(tensor_type: TensorType, mesh: Mesh) -> Placements:
    """Return a variable's placements, one per mesh axis."""
    return _parsed(tensor_type.placements, mesh.axes)


@cache
def _parsed(pairs: tuple[tuple[str, str], ...], axes: tuple[str, ...]) -> Placements:
    placement_texts = dict(pairs)
    return tuple(Placement.parse(placement_texts.get(axis, "R")) for axis in axes)
