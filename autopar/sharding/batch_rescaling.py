"""Convert decisions from one number of rows to another: an option's meaning does not depend on the batch.

An option names the factors that each mesh axis shards (`rules/rule.py`), and these names do not depend on sizes. Only
section counts that contain the batch do. If a dim is k_b sections of the batch B with more inside it, as a view to
[B * S, V] makes it with k_b = 1, then sharding inside the batch is S(d/k) with k = k_b * B * k'. With b rows instead of
B it is S(d / (k_b * b * k')). Section counts that do not contain the batch stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.ir.graph import Graph, Ref
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Placements, S
from autopar.rules.rule import AxisOption, find_factor, label_of
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, Option, options_of
from autopar.sharding.scopes import scopes_of

Operators = Mapping[tuple[str, str], Operator]


def rescaled(assignment: Assignment, operators: Operators, source_rows: int, rows: int) -> Assignment:
    """Convert decisions for a graph of `source_rows` rows to one of `rows` rows, over all ranks.

    operators: of the source graph. If that graph has one row, its batch cannot be identified and the decisions stay.
    """
    if source_rows in (rows, 1):
        return assignment
    return _Rescaling(operators, source_rows, rows).apply(assignment)


@dataclass(frozen=True, slots=True)
class _Rescaling:
    operators: Operators
    source_rows: int
    rows: int

    def apply(self, assignment: Assignment) -> Assignment:
        marks = self._marks()
        return Assignment(
            {key: self._option(key, option, marks) for key, option in assignment.operators.items()},
            {key: self._all(placements, marks.get(key)) for key, placements in assignment.tensors.items()},
            assignment.parameters,
        )

    def _marks(self) -> dict[tuple[str, Ref], Placement]:
        """Return the shard that each tensor's batch is."""
        marks: dict[tuple[str, Ref], Placement] = {}
        for (scope, name), operator in self.operators.items():
            if operator.batch is None:
                continue
            refs = (*operator.node.inputs, *(Ref(name, i) for i in range(len(operator.node.outputs))))
            for ref, dims in zip(refs, (*operator.rule.inputs, *operator.rule.outputs), strict=True):
                mark = find_factor(operator.rule, dims, *operator.batch)
                if mark is not None:
                    marks[scope, ref] = mark
        return marks

    def _option(self, key: tuple[str, str], option: Option, marks: Mapping[tuple[str, Ref], Placement]) -> Option:
        operator = self.operators[key]
        if operator.batch is None or not _has_sections(option):
            return option
        inputs = [marks.get((key[0], ref)) for ref in operator.node.inputs]
        outputs = [marks.get((key[0], Ref(key[1], i))) for i in range(len(option.outputs))]
        scaled = Option(
            tuple(self._axis(operator, axis, inputs, outputs) for axis in option.axes),
            tuple(self._all(p, mark) for p, mark in zip(option.inputs, inputs, strict=True)),
            tuple(self._all(p, mark) for p, mark in zip(option.outputs, outputs, strict=True)),
        )
        return option if scaled == option else scaled

    def _axis(
        self, operator: Operator, axis: AxisOption, inputs: list[Placement | None], outputs: list[Placement | None]
    ) -> AxisOption:
        assert operator.batch is not None
        name, _, sections = axis.label.rpartition("/")
        joint = operator.rule.joint(name) if name else None
        label = axis.label
        if sections.isdigit() and (name if joint is None else joint.output) == operator.batch[0]:
            label = label_of(name, self._sections(int(sections), operator.batch[1]))
        return replace(
            axis,
            label=label,
            inputs=tuple(self._one(p, mark) for p, mark in zip(axis.inputs, inputs, strict=True)),
            outputs=tuple(self._one(p, mark) for p, mark in zip(axis.outputs, outputs, strict=True)),
        )

    def _all(self, placements: Placements, mark: Placement | None) -> Placements:
        return tuple(self._one(placement, mark) for placement in placements)

    def _one(self, placement: Placement, mark: Placement | None) -> Placement:
        if mark is None or placement.kind != "S" or placement.dim != mark.dim:
            return placement
        return S(placement.dim, self._sections(placement.sections, mark.sections))

    def _sections(self, count: int, of_batch: int) -> int:
        inside, rest = divmod(count, of_batch * self.source_rows)
        return count if rest else of_batch * self.rows * inside


def _has_sections(option: Option) -> bool:
    """Whether the option shards a tensor in sections on some axis."""
    return any(p.sections > 1 for placements in (*option.inputs, *option.outputs) for p in placements)


def covers(assignment: Assignment, graph: Graph) -> bool:
    """Whether every call, parameter and layer input of the graph has a decision."""
    for scope in scopes_of(graph):
        if any((scope.name, node.name) not in assignment.operators for node in scope.nodes):
            return False
        used = {ref.node for node in scope.nodes for ref in node.inputs}
        stored = scope.layer.parameters if scope.layer else graph.parameters
        if any(p.name in used and (scope.name, p.name) not in assignment.parameters for p in stored):
            return False
        if scope.layer and any((scope.name, Ref(name)) not in assignment.tensors for name, _ in scope.layer.inputs):
            return False
    return True


def suits(assignment: Assignment, graph: Graph, operators: Operators, mesh: Mesh) -> bool:
    """Whether the assignment covers this graph, and its calls have these options on the mesh."""
    if not covers(assignment, graph):
        return False
    return all(assignment.operators[key] in options_of(operator, mesh) for key, operator in operators.items())
