"""Check the typed program, edge by edge: each value is read as it was produced, each call reads what its option says.

Three independent sources are compared: the program (`codegen.Program`, after all passes), the options that the plan
chose (`Assignment`), and the types that stages and layers pass to one another.

    defined once    no name holds two values at once, and none is read before it is assigned
    reads           a variable is read with the type with which it was last assigned
    calls           inputs and results have the placements of the call's option (a fused call: of each member)
    reshards        one step of the table of methods, arguments, collectives and bytes (`codegen/check_program.py`)
    layers          values that enter and leave a loop match the inputs and outputs of the layer class
    stages          what a stage sends has the shape, dtype and placements that the other stage receives
    loss            is whole on every rank
    gradients       where a value needs one, its conjugate placements agree at both ends. This follows from the above
                    and from each reshard's backward (`certify/reshards.py`); these edges are counted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.certify.certificate import Findings
from autopar.certify.reshards import bodies
from autopar.ir.graph import Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.lowering.scope_lowering import placement_pairs
from autopar.sharding.assignment import Candidate
from autopar.sharding.call_options import Operator, Option
from codegen.check_program import check_types
from codegen.program import (
    Call,
    LayerLoop,
    PipelineProgram,
    Program,
    Raw,
    Reshard,
    Statement,
    TensorType,
    Var,
    assigns,
    reads,
)
from codegen.schemas import EmissionError

MOST_SHOWN = 20


def check_edges(program: Program | PipelineProgram, best: Candidate) -> Findings:
    """Check every edge of every stage's program against the plan's decisions."""
    edges = _Edges(best)
    for number, stage_program in enumerate(program.programs):
        where = f"stage {number}, " if len(program.programs) > 1 else ""
        try:
            check_types(stage_program)
        except EmissionError as error:
            edges.failures.append(f"{where}{error}")
        edges.program(stage_program, where)
    if isinstance(program, PipelineProgram):
        edges.boundaries(program)
    kinds = ("reads", "calls", "axes", "reshards", "layers", "stages", "gradients")
    names = {
        "reads": "values read as they were made",
        "calls": "inputs and results of calls with the placements of their option",
        "axes": "calls that communicate, over the axes of their option",
        "reshards": "reshards that are one step between their neighbors' placements",
        "layers": "values that enter or leave a run of layers",
        "stages": "tensors that cross between stages",
        "gradients": "edges that carry a gradient back, in conjugate placements",
    }
    left = sum(edges.unmatched.values())
    targets = ", ".join(f"{target} ({count})" for target, count in edges.unmatched.most_common(8))
    return Findings(
        subject="edges",
        counts={"edges": sum(edges.counts[k] for k in kinds[:-1])} | {names[k]: edges.counts[k] for k in kinds},
        failures=tuple(dict.fromkeys(edges.failures))[:MOST_SHOWN],
        not_proven=(
            f"{left} arguments that the run time creates for calls have no placement in the plan to compare with: "
            f"{targets}",
        )
        if left
        else (),
    )


@dataclass
class _Edges:
    """The state of the check. best: the plan's decisions. unmatched: call arguments without a tensor of the graph."""

    best: Candidate
    counts: Counter[str] = field(default_factory=Counter)
    unmatched: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def program(self, program: Program, where: str) -> None:
        scopes = {name: name for name in self.best_scopes()}
        mesh = Mesh(program.axes, program.axis_sizes)
        for name, body in bodies(program):
            scope = scopes.get(name, "")
            entering = next((c.inputs for c in (*program.layers, program.root) if c.name == name), program.root.inputs)
            types = {variable.name: variable.type for variable in entering}
            for statement in body:
                self.statement(statement, types, mesh, scope, f"{where}{name}")
            outputs = next((c.outputs for c in (*program.layers, program.root) if c.name == name), ())
            for variable in outputs:
                self.read(variable, types, f"{where}{name}, results")
            if name == program.root.name and not program.sends:
                self.loss(outputs, f"{where}{name}")

    def best_scopes(self) -> set[str]:
        return {scope for scope, _ in self.best.operators}

    def loss(self, outputs: tuple[Var, ...], where: str) -> None:
        """Check that the loss is whole on every rank; otherwise ranks would train different models."""
        for variable in outputs:
            if variable.type.shape != () or variable.type.placements:
                self.failures.append(
                    f"{where}: the loss {variable.name} is {_places(variable.type)}, not whole on every rank"
                )

    def statement(self, statement: Statement, types: dict[str, TensorType], mesh: Mesh, scope: str, where: str) -> None:
        at = f"{where}, {_text(statement)}"
        for variable in reads(statement):
            self.read(variable, types, at)
        if isinstance(statement, Reshard):
            self.counts["reshards"] += 1
        elif isinstance(statement, LayerLoop):
            self.counts["layers"] += len(statement.args) + len(assigns(statement))
        else:
            self.call(statement, mesh, scope, at)
        results = assigns(statement)
        for variable in results:
            if sum(variable == other for other in results) > 1:
                self.failures.append(f"{at}: {variable.name} is assigned twice")
            types[variable.name] = variable.type

    def read(self, variable: Var, types: Mapping[str, TensorType], at: str) -> None:
        """Check that a variable exists, with the type of its last assignment. `codegen/check_program.py` checks stored
        values and values from the step against their class."""
        assigned = types.get(variable.name)
        if assigned is None and not variable.name.isidentifier():
            assigned = variable.type
        if assigned is None:
            self.failures.append(f"{at}: {variable.name} is read before it is defined")
        elif assigned != variable.type:
            self.failures.append(
                f"{at}: {variable.name} is read as {_described(variable.type)}, but holds {_described(assigned)}"
            )
        else:
            self.counts["reads"] += 1
            self.counts["gradients"] += variable.type.requires_grad

    def call(self, call: Call, mesh: Mesh, scope: str, at: str) -> None:
        """Check inputs and results of a call, or of the calls it replaces, against the plan's options."""
        for original in call.original:
            operator, option = self._operator_of(original, scope)
            self.axes_of(original, option, mesh, scope, at)
            if operator is None or option is None:
                self.unmatched[original.target] += len(reads(original))
                continue
            expected = dict(_wanted(operator, option))
            for variable in (*reads(original), *assigns(original)):
                ref = Ref(*variable.type.tensor)
                places = expected.get(ref)
                # A loss that ranks sum: each row's own loss is assigned under its name first.
                is_part = (
                    ref.node == operator.node.name and variable.type.shape != operator.node.outputs[ref.index].shape
                )
                if places is None or is_part:
                    self.unmatched[original.target] += 1
                    continue
                pairs = {placement_pairs(p, mesh) for p in places}
                self.counts["calls"] += 1
                if tuple(variable.type.placements) not in pairs:
                    self.failures.append(
                        f"{at}: {operator.node.op} ({scope + '.' if scope else ''}{operator.node.name}) takes or makes "
                        f"{variable.name} as {' or '.join(map(_pairs_text, pairs))}, the program has it as "
                        f"{_places(variable.type)}"
                    )

    def axes_of(self, call: Call, option: Option | None, mesh: Mesh, scope: str, at: str) -> None:
        """Check that a call communicates only over axes that its option needs, and experts' rows over all of them."""
        named = set(_axes_in((call.args, tuple(value for _, value in call.kwargs)), mesh.axes))
        if call.target.endswith("Routes"):
            options = (other for (owner, _), other in self.best.assignment.operators.items() if owner == scope)
            routed = [axes for other in options if (axes := _lowered(other, mesh, {"routed"}))]
            is_right = named in routed if routed else not named
            expected = " or ".join(sorted({"x".join(sorted(axes)) for axes in routed})) or "no axis"
        elif option is not None and named:
            option_axes = _lowered(option, mesh, None)
            is_right, expected = named <= option_axes, "x".join(sorted(option_axes)) or "no axis"
        else:
            return
        self.counts["axes"] += 1
        if not is_right:
            self.failures.append(
                f"{at}: goes over {'x'.join(sorted(named)) or 'no axis'}, but its option over {expected}"
            )

    def _operator_of(self, call: Call, scope: str) -> tuple[Operator | None, Option | None]:
        """Return the graph's call that a statement implements, found by its results."""
        for variable in assigns(call):
            key = scope, variable.type.tensor[0]
            if key in self.best.operators and key in self.best.assignment.operators:
                return self.best.operators[key], self.best.assignment.operators[key]
        return None, None

    def boundaries(self, program: PipelineProgram) -> None:
        """Check that both stages agree on a tensor; stages on unlike meshes may shard it differently."""
        for number, stage in enumerate(program.stages):
            for name, received in stage.program.receives.items():
                source = next((n for n in reversed(range(number)) if name in program.stages[n].program.sends), None)
                if source is None:
                    self.failures.append(f"stage {number} receives {name}, which no earlier stage sends")
                    continue
                sent, got = program.stages[source].program.sends[name].spec, received.spec
                are_alike = program.meshes[program.stages[source].pipeline_rank] == program.meshes[stage.pipeline_rank]
                if (sent.shape, sent.dtype) != (got.shape, got.dtype) or (
                    are_alike and dict(sent.placements) != dict(got.placements)
                ):
                    self.failures.append(f"stage {source} sends {name} as {sent}, stage {number} takes it as {got}")
                self.counts["stages"] += 1
                self.counts["gradients"] += got.requires_grad


def _wanted(operator: Operator, option: Option) -> Iterator[tuple[Ref, set[Placements]]]:
    """Yield the allowed placements of each tensor that a call reads or returns; one read twice may have either."""
    placements_of: dict[Ref, set[Placements]] = {}
    for ref, places in zip(operator.node.inputs, option.inputs, strict=True):
        placements_of.setdefault(ref, set()).add(places)
    for index, places in enumerate(option.outputs):
        placements_of.setdefault(Ref(operator.node.name, index), set()).add(places)
    yield from placements_of.items()


def _axes_in(value: Any, axes: tuple[str, ...]) -> Iterator[str]:
    """Yield the mesh axes with several ranks that a call's arguments name."""
    if isinstance(value, Raw):
        yield from value.joint or ((value.text,) if value.text in axes else ())
    elif isinstance(value, tuple):
        for item in value:
            yield from _axes_in(item, axes)


def _lowered(option: Option, mesh: Mesh, names: set[str] | None) -> set[str]:
    """Return the axes on which an option gives the call a lowering: any, or one of these names."""
    pairs = zip(mesh.axes, option.axes, strict=False)
    return {axis for axis, choice in pairs if choice.lowering and (names is None or choice.lowering in names)}


def _text(statement: Statement) -> str:
    results = ", ".join(result.name for result in assigns(statement)) or "_"
    if isinstance(statement, Reshard):
        return f"{results} = {statement.axis}.{statement.method}({statement.source.name})"
    return f"{results} = {statement.target if isinstance(statement, Call) else statement.layer}"


def _described(tensor_type: TensorType) -> str:
    return f"{tensor_type.dtype} {list(tensor_type.shape)} {_places(tensor_type)}"


def _places(tensor_type: TensorType) -> str:
    return _pairs_text(tensor_type.placements)


def _pairs_text(pairs: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"{axis} {text}" for axis, text in pairs) or "whole"
