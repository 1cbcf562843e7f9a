"""One layer as a diagram: its operators in order, the placements of their results, and the communication between
them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from autopar.costs.evaluate import StatementCost, statement_costs
from autopar.ir.graph import base_name
from autopar.ir.placement import Placement
from autopar.operators.traits import VIEWS
from autopar.page.markup import Markup, element, section
from autopar.planning.predict import priced_decisions
from autopar.program import GeneratedProgram
from autopar.report.dims import DimNames, name_dims
from autopar.report.facts import modules_of
from autopar.report.sharding import relative, stored_words
from autopar.report.traffic import dim_word, reshard_words
from autopar.sharding.scopes import Scope, scopes_of
from autopar.units import bytes_text, seconds_text
from codegen.program import Call, Reshard, TensorType, Var, assigns, reads

MOST_AXIS_RANKS = 8
"""The most shards in the drawing of a placement."""


@dataclass(slots=True)
class Operation:
    """Consecutive calls of one module whose results have equal placements. result: the last result."""

    module: str
    calls: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    result: Var | None = None
    forward: float = 0.0
    backward: float = 0.0


def layer_section(compiled: GeneratedProgram) -> Markup | None:
    """Draw the class with most layers; None for a model without layers or a program without its request."""
    scopes = [scope for scope in scopes_of(compiled.best.graph) if scope.layer]
    if not scopes or compiled.request is None:
        return None
    scope = max(scopes, key=lambda candidate: candidate.count)
    names = name_dims(compiled.best.graph, compiled.best.operators)
    costs = costs_of_scope(compiled, scope)
    assert scope.layer is not None
    diagram = _Diagram(compiled, scope, names)
    module = modules_of(compiled.program, scope)[0]
    entering = [
        element("div", element("b", "input"), diagram.result_chips(variable), class_="card")
        for variable in module.inputs
        if variable.type.requires_grad
    ]
    steps = element("ol", list(diagram.steps(costs)), class_="flow")
    total = sum(cost.forward + cost.backward for cost in costs)
    words = (
        f"{scope.name}, one of {scope.count}: compute, placements and communication of a rank for one micro-batch. "
        f"In all {seconds_text(total)}, forward and backward, without recomputation."
    )
    return section("One layer", element("div", entering, class_="entering"), steps, intro=words)


def costs_of_scope(compiled: GeneratedProgram, scope: Scope) -> tuple[StatementCost, ...]:
    """Return the seconds of every statement of a layer class, on the mesh of the first pipeline rank."""
    assert compiled.request is not None
    best = compiled.best
    pricer, assignment = priced_decisions(compiled.request, best, best.plan.stage_meshes[0])
    return statement_costs(best.graph, best.operators, pricer, assignment)[scope.name]


@dataclass(frozen=True, slots=True)
class _Diagram:
    compiled: GeneratedProgram
    scope: Scope
    names: DimNames

    def steps(self, costs: Sequence[StatementCost]) -> Iterator[Markup]:
        """Yield operations and transfers in the order of the program."""
        open_operation: Operation | None = None
        for cost in costs:
            statement = cost.statement
            if open_operation is None and _is_free_view(cost):
                continue
            if isinstance(statement, Call):
                module = relative(self.scope, statement.section) if statement.section else ""
                result = next(iter(assigns(statement)), None)
                if open_operation is not None and not self._continues(open_operation, module, statement, result):
                    if _is_free_view(cost):
                        continue
                    yield self.card(open_operation)
                    open_operation = None
                if open_operation is None:
                    open_operation = Operation(module)
                self._add(open_operation, statement, module, result, cost)
            elif isinstance(statement, Reshard):
                if open_operation is not None:
                    yield self.card(open_operation)
                    open_operation = None
                yield self.sent(statement, cost)
        if open_operation is not None:
            yield self.card(open_operation)

    def _continues(self, operation: Operation, module: str, call: Call, result: Var | None) -> bool:
        """Return whether a call continues an operation: it has the same module, or it is a view of a submodule's
        result, and its result has the same placement."""
        is_view = base_name(call.target) in VIEWS and operation.module.startswith(f"{module}.")
        is_same = module in ("", operation.module) or is_view
        before = operation.result
        return is_same and (result is None or before is None or self._words(result) == self._words(before))

    def _words(self, result: Var) -> list[str]:
        """Return a result's placement in words, an entry per axis."""
        return [words for words, _, _ in self._placements(result)]

    def _add(self, operation: Operation, call: Call, module: str, result: Var | None, cost: StatementCost) -> None:
        operation.module = operation.module or module
        operation.calls.append(_operator_word(call))
        operation.result = result or operation.result
        operation.forward += cost.forward
        operation.backward += cost.backward
        for variable in reads(call):
            name = variable.name.removeprefix("self.")
            key = self.scope.name, name
            stored = self.compiled.best.assignment.parameters.get(key)
            if variable.is_stored and stored is not None and name not in operation.weights:
                words = stored_words(self.scope, name, stored, self.compiled.plan.mesh, self.names)
                operation.weights.append(f"{name}: {words}")

    def card(self, operation: Operation) -> Markup:
        """Draw one operation: its module and calls, parameters, result and seconds."""
        counts = {word: operation.calls.count(word) for word in dict.fromkeys(operation.calls)}
        calls = ", ".join(f"{word} x {count}" if count > 1 else word for word, count in counts.items())
        seconds = f"{seconds_text(operation.forward)} forward, {seconds_text(operation.backward)} backward"
        result = operation.result
        return element(
            "li",
            element("div", element("b", operation.module or "(itself)"), element("span", seconds), class_="card-head"),
            element("code", calls),
            [element("p", words, class_="weight") for words in operation.weights],
            self.result_chips(result) if result is not None else None,
            class_="card",
        )

    def result_chips(self, result: Var) -> Markup:
        chips = [
            element("span", _picture(placement, size), words, class_="chip")
            for words, placement, size in self._placements(result)
        ]
        name = element("span", f"{result.name} {_shape(result.type)}", class_="variable")
        return element("p", name, element("span", chips or "on one rank", class_="chips"))

    def _placements(self, result: Var) -> list[tuple[str, Placement, int]]:
        """Return for every axis a variable's placement in words, the placement itself, and the number of ranks."""
        placements, mesh = [], self.compiled.plan.mesh
        for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
            placement = Placement.parse(result.type.placement(axis))
            words = f"replicated over {axis}"
            if placement.is_shard:
                words = f"{dim_word(self.scope, result.type, axis, self.names)} over {axis}"
            elif placement.kind == "P":
                words = f"partial sums over {axis}"
            placements.append((words, placement, size))
        return placements

    def sent(self, statement: Reshard, cost: StatementCost) -> Markup:
        """Draw a reshard: in words, with its bytes and seconds in each direction."""
        size = bytes_text(statement.num_bytes)
        directions = [
            _direction("forward", statement.forward, size, cost.forward, 0.0),
            _direction("backward", statement.backward, size, cost.backward, cost.hidden),
        ]
        is_sent = bool(statement.forward or statement.backward)
        words = reshard_words(self.scope, statement, self.names)
        return element("li", element("b", words), directions, class_="sent" if is_sent else "sent local")


def _direction(name: str, collective: str, size: str, exposed: float, hidden: float) -> Markup:
    if not collective:
        more = f", {seconds_text(exposed)}" if exposed else ""
        return element("span", f"{name}: no communication{more}", class_="way")
    parts = [f"{seconds_text(exposed)} exposed"] if exposed or not hidden else []
    parts += [f"{seconds_text(hidden)} hidden"] if hidden else []
    return element("span", f"{name}: {collective} {size}, {', '.join(parts)}", class_="way")


def _is_free_view(cost: StatementCost) -> bool:
    """Return whether a statement is a view that takes no time."""
    call = cost.statement
    is_view = isinstance(call, Call) and base_name(call.target) in VIEWS
    return is_view and not (cost.forward or cost.backward)


def _operator_word(call: Call) -> str:
    """Return `aten.linear.default` as `linear`, `kernels.swiglu` as `swiglu`."""
    parts = call.target.split(".")
    return base_name(call.target) if parts[0] == "aten" else parts[-1] if len(parts) < 3 else parts[1]


def _shape(tensor_type: TensorType) -> str:
    return f"[{', '.join(map(str, tensor_type.shape))}]"


def _picture(placement: Placement, size: int) -> Markup:
    """Draw the first rank's share along an axis: one shard, the whole tensor, or a partial sum."""
    parts = min(size, MOST_AXIS_RANKS)
    width = 24 / parts
    first_rank = {"P": "partial"}.get(placement.kind, "held")
    shapes = [
        element(
            "rect",
            x=index * width,
            y=0.0,
            width=width,
            height=10.0,
            class_=first_rank if index == 0 or not placement.is_shard else "other",
        )
        for index in range(parts)
    ]
    return element("svg", shapes, viewBox="0 0 24 10", width="24", height="10", aria_hidden="true")
