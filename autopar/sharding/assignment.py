"""A full assignment, and the short form in a plan file, which omits what can be derived.

`compress` writes the calls and tensors that differ from their defaults. `expand` derives the others, walking the graph
in execution order, and checks values that a person may have edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import PlanError
from autopar.ir.graph import Graph, LayerRun, Ref
from autopar.ir.mesh import DATA_AXES, Mesh, zero_axes
from autopar.ir.placement import Placements, Stored
from autopar.ir.plan_data import ScopePlan, labels_text
from autopar.plan import Plan
from autopar.sharding.call_options import Operator, Option, options_of, routed_axes
from autopar.sharding.expert_routes import keeps_rows
from autopar.sharding.legal_placements import LegalPlacements
from autopar.sharding.reshard import steps
from autopar.sharding.scopes import Scope, scopes_of
from autopar.sharding.validate_plan import check_scopes, ref_name
from search.problem import Solution


@dataclass(frozen=True, slots=True)
class Assignment:
    """One option for every variable: the input of lowering and pricing."""

    operators: Mapping[tuple[str, str], Option]
    tensors: Mapping[tuple[str, Ref], Placements]
    parameters: Mapping[tuple[str, str], Stored]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plan and everything needed to lower it; hand-written plans have no solution."""

    plan: Plan
    graph: Graph
    operators: Mapping[tuple[str, str], Operator]
    assignment: Assignment
    solution: Solution | None

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Return the axes that shard no call: their ranks repeat the same work."""
        options = self.assignment.operators.values()
        return tuple(
            axis
            for i, axis in enumerate(self.plan.mesh.axes)
            if not any(p[i].is_shard for o in options for p in (*o.inputs, *o.outputs))
        )

    @property
    def repeated_work(self) -> str:
        """Return a note about a plan that splits nothing; "" for other plans.

        Such a plan is legal on any number of devices: no mesh divides the model's work, or dividing it costs more than
        it saves.
        """
        plan = self.plan
        is_split = not plan.mesh.axes or len(self.idle_axes) < len(plan.mesh.axes)
        if is_split or plan.pipeline.num_pipeline_ranks > 1:
            return ""
        rows, ranks = plan.global_batch_size, plan.mesh.num_ranks
        divisors = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
        return (
            f"every rank repeats all of the work: the plan splits nothing over {ranks} devices, so one is as fast. "
            f"The batch of {rows} divides over {divisors} devices"
        )


def default_option(
    options: tuple[Option, ...], sources: tuple[Placements, ...], sizes: tuple[int, ...], weights: tuple[float, ...]
) -> int:
    """Return the option that moves the fewest bytes from the inputs' placements; ties: fewest steps, then the first."""

    def effort(index: int) -> tuple[float, int, int]:
        moved, count = 0.0, 0
        for source, target, weight in zip(sources, options[index].inputs, weights, strict=True):
            path = steps(source, target, sizes)
            if path is None:
                return float("inf"), 0, index
            moved += sum(step.fraction * weight for step in path if step.forward or step.backward)
            count += len(path)
        return moved, count, index

    return min(range(len(options)), key=effort)


class Deriver:
    """Walks a graph in execution order and tracks every tensor's placements under the decisions so far."""

    def __init__(self, graph: Graph, operators: Mapping[tuple[str, str], Operator], mesh: Mesh) -> None:
        self.graph, self.operators, self.mesh = graph, operators, mesh
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.options = {key: options_of(operator, mesh) for key, operator in operators.items()}
        self.placements: dict[tuple[str, Ref], Placements] = {}

    def order(self) -> list[Scope]:
        """Return layer classes first: the top level needs the placements of their outputs."""
        return [s for s in self.scopes.values() if s.name] + [self.scopes[""]]

    def place_inputs(self, scope: Scope, plan: ScopePlan) -> None:
        for name, stored in plan.parameters.items():
            self.placements[scope.name, Ref(name)] = stored.placements
        for name, placements in plan.inputs.items():
            self.placements[scope.name, Ref(name)] = placements

    def place_run(self, run: LayerRun) -> None:
        """Place the outputs of a run: carried ones as the input they feed, others as the last layer leaves them."""
        carried = {output: position for position, output in run.carried}
        for index, ref in enumerate(run.layer.outputs):
            inner = Ref(run.layer.inputs[carried[index]][0]) if index in carried else ref
            self.placements["", Ref(run.name, index)] = self.placements[run.layer.name, inner]

    def default(self, scope: Scope, name: str) -> int:
        operator = self.operators[scope.name, name]
        sources = tuple(self.placements[scope.name, ref] for ref in operator.node.inputs)
        weights = tuple(float(meta.num_bytes) for meta in operator.inputs)
        return default_option(self.options[scope.name, name], sources, self.mesh.sizes, weights)

    def check_route(self, scope: Scope, name: str, chosen: Mapping[tuple[str, str], Option], plan: Plan) -> None:
        """Raise PlanError if a call moves rows that are sorted by expert, or routes rows over other axes than the first
        expert layer with the same rows."""
        operator, option = self.operators[scope.name, name], chosen[scope.name, name]
        reads = zip(operator.node.inputs, option.inputs, strict=True)
        ways = [(ref, self.placements[scope.name, ref], wanted) for ref, wanted in reads]
        results = [Ref(name, index) for index in range(len(option.outputs))]
        ways += [(ref, option.outputs[ref.index], self.placements[scope.name, ref]) for ref in results]
        moved = [
            ref.node
            for ref, source, target in ways
            if (maker := self.operators.get((scope.name, ref.node))) is not None
            and not maker.route.returns
            and not keeps_rows(source, target)
        ]
        first = operator.route.like or name
        if moved or routed_axes(option.axes) != routed_axes(chosen[scope.name, first].axes):
            raise PlanError(
                f"{plan.place(scope.name, 'calls', name)} moves or reroutes rows that are sorted by expert",
                values=labels_text(option.labels, plan.mesh),
                alternatives=f"the option that shards rows as {moved[0] if moved else first} does",
            )

    def pieces(self, scope: Scope) -> list[Any]:
        return list(scope.nodes) if scope.name else list(self.graph.body)


def compress(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], mesh: Mesh, assignment: Assignment
) -> dict[str, ScopePlan]:
    """Turn an assignment into the contents of a plan file."""
    deriver, plans = Deriver(graph, operators, mesh), {}
    for scope in deriver.order():
        names = [n for n, _ in scope.layer.inputs] if scope.layer else [i.name for i in graph.inputs]
        parameters = {n: s for (owner, n), s in assignment.parameters.items() if owner == scope.name}
        inputs = {
            n: assignment.tensors[scope.name, Ref(n)] for n in names if (scope.name, Ref(n)) in assignment.tensors
        }
        calls: dict[str, tuple[str, ...]] = {}
        tensors: dict[str, Placements] = {}
        deriver.place_inputs(scope, ScopePlan(parameters, inputs, {}, {}))
        for piece in deriver.pieces(scope):
            if isinstance(piece, LayerRun):
                deriver.place_run(piece)
                continue
            option, options = assignment.operators[scope.name, piece.name], deriver.options[scope.name, piece.name]
            if option != options[deriver.default(scope, piece.name)]:
                calls[piece.name] = labels_of(options, options.index(option))
            for index, placements in enumerate(option.outputs):
                ref = Ref(piece.name, index)
                kept = assignment.tensors.get((scope.name, ref), placements)
                if kept != placements:
                    tensors[ref_name(ref)] = kept
                deriver.placements[scope.name, ref] = kept
        plans[scope.name] = ScopePlan(parameters, inputs, calls, tensors)
    return {name: plans[name] for name in deriver.scopes}


def expand(graph: Graph, operators: Mapping[tuple[str, str], Operator], plan: Plan) -> Assignment:
    """Return a plan's assignment, validated against the graph. Raises PlanError."""
    deriver = Deriver(graph, operators, plan.mesh)
    offers = LegalPlacements(graph, deriver.options, plan.mesh)
    check_scopes(graph, offers, plan)
    chosen: dict[tuple[str, str], Option] = {}
    tensors: dict[tuple[str, Ref], Placements] = {}
    parameters: dict[tuple[str, str], Stored] = {}
    for scope in deriver.order():
        decided = plan.scopes[scope.name]
        deriver.place_inputs(scope, decided)
        parameters |= {(scope.name, n): s for n, s in decided.parameters.items()}
        tensors |= {(scope.name, Ref(n)): p for n, p in decided.inputs.items()}
        for piece in deriver.pieces(scope):
            if isinstance(piece, LayerRun):
                deriver.place_run(piece)
                continue
            options = deriver.options[scope.name, piece.name]
            labels = decided.calls.get(piece.name)
            index = (
                deriver.default(scope, piece.name)
                if labels is None
                else _find(options, labels, scope, piece.name, plan)
            )
            chosen[scope.name, piece.name] = options[index]
            for position, placements in enumerate(options[index].outputs):
                ref = Ref(piece.name, position)
                kept = decided.tensors.get(ref_name(ref), placements)
                deriver.placements[scope.name, ref] = kept
                if len(offers.uses[scope.name].get(ref, ())) > 1:
                    tensors[scope.name, ref] = kept
            deriver.check_route(scope, piece.name, chosen, plan)
    return Assignment(chosen, tensors, parameters)


def labels_of(options: tuple[Option, ...], index: int) -> tuple[str, ...]:
    """Return an option's axis labels as in a plan file: the second option with equal labels ends in `#2`.

    (An operator that is linear in two inputs separately has two options `P`.)
    """
    labels = options[index].labels
    number = sum(option.labels == labels for option in options[: index + 1])
    return labels if number == 1 else (*labels[:-1], f"{labels[-1]}#{number}")


def _find(options: tuple[Option, ...], labels: tuple[str, ...], scope: Scope, name: str, plan: Plan) -> int:
    legal = [labels_of(options, index) for index in range(len(options))]
    if labels in legal:
        return legal.index(labels)
    raise PlanError(
        f"{plan.place(scope.name, 'calls', name)} has no such option on {plan.mesh}",
        values=labels_text(labels, plan.mesh),
        alternatives=[labels_text(choice, plan.mesh) for choice in legal],
    )


def on_axes(assignment: Assignment, axes: tuple[str, ...], wanted: tuple[str, ...]) -> Assignment:
    """Convert an assignment from a mesh with `axes` to one with `wanted` axes. All data axes take the decisions of one;
    an omitted axis has one rank."""
    if axes == wanted:
        return assignment
    source = axis_sources(axes, wanted)

    def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[i] for i in source)

    def stored(before: Stored) -> Stored:
        placements = pick(before.placements)
        return Stored(placements, before.zero if zero_axes(wanted, placements) else 0)

    return Assignment(
        {
            key: Option(pick(o.axes), tuple(pick(p) for p in o.inputs), tuple(pick(p) for p in o.outputs))
            for key, o in assignment.operators.items()
        },
        {key: pick(placements) for key, placements in assignment.tensors.items()},
        {key: stored(decided) for key, decided in assignment.parameters.items()},
    )


def axis_sources(axes: tuple[str, ...], wanted: tuple[str, ...]) -> list[int]:
    """Return, for each wanted axis, the index in `axes` of the axis whose decisions it takes."""
    return [axes.index(axis if axis in axes else "dp" if axis in DATA_AXES else axis) for axis in wanted]
