"""The typed program, edge by edge: every value is read as it was made, and every call reads what its option says.

Three things are compared that were made apart: the program (`codegen.Program`, whatever passes made of it), the options
that the plan chose (`Assignment`), and the types that stages and layers hand to one another.

    defined once    no name holds two values at once, and none is read before it is there
    reads           the variable's type, where it is read, is the one with which it was last assigned
    calls           inputs and results lie on every axis as the call's option says (a fused call: each of its members)
    reshards        one step of the table of methods, by its arguments, collectives and bytes (`codegen/verify.py`)
    layers          what enters and leaves a loop is what the layer class takes and gives
    stages          what a stage sends has the shape, dtype and placements of what the other receives
    loss            lies whole on every rank
    gradients       where a value needs one, its conjugate placements agree at both ends, which follows from the above
                    and from each reshard's backward (`certify/reshards.py`): these edges are counted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.certify.findings import Findings
from autopar.certify.reshards import bodies
from autopar.ir.graph import Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placements
from autopar.lowering.scope_lowering import placement_pairs
from autopar.options.assignment import Candidate
from autopar.options.strategies import Operator, Option
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
from codegen.verify import check_types

MOST_SHOWN = 20


def check_edges(program: Program | PipelineProgram, best: Candidate) -> Findings:
    """Checks every edge of every stage's program against the plan's decisions."""
    found = _Edges(best)
    for number, each in enumerate(program.programs):
        where = f"stage {number}, " if len(program.programs) > 1 else ""
        try:
            check_types(each)
        except EmissionError as error:
            found.failures.append(f"{where}{error}")
        found.program(each, where)
    if isinstance(program, PipelineProgram):
        found.boundaries(program)
    kinds = ("reads", "calls", "axes", "reshards", "layers", "stages", "gradients")
    names = {
        "reads": "values read as they were made",
        "calls": "inputs and results of calls that lie as their option says",
        "axes": "calls that communicate, over the axes of their option",
        "reshards": "reshards that are one step between their neighbors' placements",
        "layers": "values that enter or leave a run of layers",
        "stages": "tensors that cross between stages",
        "gradients": "edges that carry a gradient back, in conjugate placements",
    }
    left = sum(found.unmatched.values())
    targets = ", ".join(f"{target} ({count})" for target, count in found.unmatched.most_common(8))
    return Findings(
        subject="edges",
        counts={"edges": sum(found.counts[k] for k in kinds[:-1])} | {names[k]: found.counts[k] for k in kinds},
        failures=tuple(dict.fromkeys(found.failures))[:MOST_SHOWN],
        not_proven=(
            f"{left} arguments of calls that are parts or products of the run time's own, read as they were made, have "
            f"no placement in the plan to compare with: {targets}",
        )
        if left
        else (),
    )


@dataclass
class _Edges:
    """best: the plan's decisions. unmatched: arguments of calls that stand for no tensor of the graph."""

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
            known = {variable.name: variable.type for variable in entering}
            for statement in body:
                self.statement(statement, known, mesh, scope, f"{where}{name}")
            outputs = next((c.outputs for c in (*program.layers, program.root) if c.name == name), ())
            for variable in outputs:
                self.read(variable, known, f"{where}{name}, results")
            if name == program.root.name and not program.sends:
                self.loss(outputs, f"{where}{name}")

    def best_scopes(self) -> set[str]:
        return {scope for scope, _ in self.best.operators}

    def loss(self, outputs: tuple[Var, ...], where: str) -> None:
        """The loss is whole on every rank, or ranks would train different models."""
        for variable in outputs:
            if variable.type.shape != () or variable.type.placements:
                self.failures.append(f"{where}: the loss {variable.name} lies {_places(variable.type)}, not whole")

    def statement(self, statement: Statement, known: dict[str, TensorType], mesh: Mesh, scope: str, where: str) -> None:
        at = f"{where}, {_text(statement)}"
        for variable in reads(statement):
            self.read(variable, known, at)
        if isinstance(statement, Reshard):
            self.counts["reshards"] += 1
        elif isinstance(statement, LayerLoop):
            self.counts["layers"] += len(statement.args) + len(assigns(statement))
        else:
            self.call(statement, mesh, scope, at)
        made = assigns(statement)
        for variable in made:
            if sum(variable == other for other in made) > 1:
                self.failures.append(f"{at}: {variable.name} is assigned twice")
            known[variable.name] = variable.type

    def read(self, variable: Var, known: Mapping[str, TensorType], at: str) -> None:
        """A variable is there, as it was last assigned. What is stored, or given by the step, `codegen/verify.py` holds
        to what the class says of it."""
        held = known.get(variable.name)
        if held is None and not variable.name.isidentifier():
            held = variable.type
        if held is None:
            self.failures.append(f"{at}: {variable.name} is read before it is defined")
        elif held != variable.type:
            self.failures.append(
                f"{at}: {variable.name} is read as {_described(variable.type)}, but holds {_described(held)}"
            )
        else:
            self.counts["reads"] += 1
            self.counts["gradients"] += variable.type.requires_grad

    def call(self, call: Call, mesh: Mesh, scope: str, at: str) -> None:
        """Inputs and results of a call, or of the calls that it stands for, lie as the plan's options say."""
        for each in call.original:
            operator, option = self._operator_of(each, scope)
            self.axes_of(each, option, mesh, scope, at)
            if operator is None or option is None:
                self.unmatched[each.target] += len(reads(each))
                continue
            wanted = dict(_wanted(operator, option))
            for variable in (*reads(each), *assigns(each)):
                ref = Ref(*variable.type.tensor)
                places = wanted.get(ref)
                # Of a loss that ranks add up, what each row has is made under its name first.
                is_part = (
                    ref.node == operator.node.name and variable.type.shape != operator.node.outputs[ref.index].shape
                )
                if places is None or is_part:
                    self.unmatched[each.target] += 1
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
        """A call communicates over those axes alone on which the option has it do so, and experts' rows over all of
        these."""
        named = set(_axes_in((call.args, tuple(value for _, value in call.kwargs)), mesh.axes))
        if call.target.endswith("Routes"):
            options = (other for (owner, _), other in self.best.assignment.operators.items() if owner == scope)
            routed = [axes for other in options if (axes := _lowered(other, mesh, {"routed"}))]
            is_right = named in routed if routed else not named
            wanted = " or ".join(sorted({"x".join(sorted(axes)) for axes in routed})) or "no axis"
        elif option is not None and named:
            own = _lowered(option, mesh, None)
            is_right, wanted = named <= own, "x".join(sorted(own)) or "no axis"
        else:
            return
        self.counts["axes"] += 1
        if not is_right:
            self.failures.append(f"{at}: goes over {'x'.join(sorted(named)) or 'no axis'}, its option over {wanted}")

    def _operator_of(self, call: Call, scope: str) -> tuple[Operator | None, Option | None]:
        """The graph's call that a statement is of: what made its results."""
        for variable in assigns(call):
            key = scope, variable.type.tensor[0]
            if key in self.best.operators and key in self.best.assignment.operators:
                return self.best.operators[key], self.best.assignment.operators[key]
        return None, None

    def boundaries(self, program: PipelineProgram) -> None:
        """What crosses between stages is one thing at both ends; stages on unlike meshes may hold it in other parts."""
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
    """How each tensor that a call reads or makes may lie: a tensor that it reads twice, in either way."""
    found: dict[Ref, set[Placements]] = {}
    for ref, places in zip(operator.node.inputs, option.inputs, strict=True):
        found.setdefault(ref, set()).add(places)
    for index, places in enumerate(option.outputs):
        found.setdefault(Ref(operator.node.name, index), set()).add(places)
    yield from found.items()


def _axes_in(value: Any, axes: tuple[str, ...]) -> Iterator[str]:
    """The mesh's axes of several ranks that a call's arguments name."""
    if isinstance(value, Raw):
        yield from value.joint or ((value.text,) if value.text in axes else ())
    elif isinstance(value, tuple):
        for item in value:
            yield from _axes_in(item, axes)


def _lowered(option: Option, mesh: Mesh, names: set[str] | None) -> set[str]:
    """Axes on which an option has the call do something of its own: any, or one of these."""
    pairs = zip(mesh.axes, option.axes, strict=False)
    return {axis for axis, each in pairs if each.lowering and (names is None or each.lowering in names)}


def _text(statement: Statement) -> str:
    results = ", ".join(result.name for result in assigns(statement)) or "_"
    if isinstance(statement, Reshard):
        return f"{results} = {statement.axis}.{statement.method}({statement.source.name})"
    return f"{results} = {statement.target if isinstance(statement, Call) else statement.layer}"


def _described(held: TensorType) -> str:
    return f"{held.dtype} {list(held.shape)} {_places(held)}"


def _places(held: TensorType) -> str:
    return _pairs_text(held.placements)


def _pairs_text(pairs: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"{axis} {text}" for axis, text in pairs) or "whole"
