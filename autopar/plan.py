"""The Plan: everything that was decided, as a file that a person can read, edit and give back.

Written are the mesh, the placements of parameters and inputs, the calls that do something other than follow their
inputs, and the prediction. A call's default is the option that needs the least communication given where its inputs
lie; a tensor's default is where its producer left it. `choices` derives the rest and validates what was edited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import PlanError
from autopar.graph import Graph, LayerRun, Ref
from autopar.mesh import Mesh
from autopar.placement import Placement, Placements, R, divides
from autopar.price import Stored
from autopar.reshard import steps
from autopar.strategies import Operator, Option, Scope, options_of, scopes_of

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of one optimiser step by kind, and bytes on the fullest rank by kind."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    num_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        return sum(value for kind, value in self.seconds.items() if kind != "hidden communication")

    @property
    def peak_bytes(self) -> float:
        return sum(self.num_bytes.values())


@dataclass(frozen=True, slots=True)
class ScopePlan:
    """Decisions of the top level ("") or of one layer class.

    parameters: all of them. inputs: batch inputs, or what enters a layer. calls: axis labels of calls that differ
    from their default. tensors: kept placements ("name" or "name[i]") that differ from their producer's.
    """

    parameters: Mapping[str, Stored]
    inputs: Mapping[str, Placements]
    calls: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, Placements]


@dataclass(frozen=True, slots=True)
class Plan:
    """See the module's docstring. `scopes` maps "" and layer class names to their decisions."""

    model: str
    cluster: str
    mesh: Mesh
    global_batch_size: int
    num_micro_batches: int
    precision: str
    scopes: Mapping[str, ScopePlan]
    prediction: Prediction = Prediction()
    runner_ups: tuple[tuple[str, float, str], ...] = ()

    def to_yaml(self) -> str:
        """The file's text; `Plan.from_yaml` reads it back to an equal plan."""
        return yaml.safe_dump(_to_data(self), sort_keys=False, width=120, default_flow_style=False)

    @classmethod
    def from_yaml(cls, text: str, source: str = "plan.yaml") -> Plan:
        """Raises PlanError naming the file, line and key of what cannot be read."""
        return _Reader(text, source).read()

    @classmethod
    def from_file(cls, path: str | Path) -> Plan:
        """`from_yaml` of a file. Raises PlanError, also where it cannot be read."""
        try:
            return cls.from_yaml(Path(path).read_text(encoding="utf-8"), str(path))
        except OSError as error:
            raise PlanError(f"cannot read the plan {path}", values=str(error)) from None


@dataclass(frozen=True, slots=True)
class Choices:
    """Every decision of a plan in full: what lowering and pricing work on."""

    operators: Mapping[tuple[str, str], Option]
    tensors: Mapping[tuple[str, Ref], Placements]
    parameters: Mapping[tuple[str, str], Stored]


def default_option(
    options: tuple[Option, ...], sources: tuple[Placements, ...], sizes: tuple[int, ...], weights: tuple[float, ...]
) -> int:
    """Index of the option that moves the least bytes from where the inputs lie; ties: fewest steps, then the first."""

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


def multi_use_refs(graph: Graph, scope: Scope) -> set[Ref]:
    """Refs of a scope that are used more than once, and so may be kept in placements of their own."""
    counts: dict[Ref, int] = {}
    used = [ref for node in scope.nodes for ref in node.inputs]
    if scope.layer:
        used += scope.layer.outputs
    else:
        used += [ref for piece in graph.body if isinstance(piece, LayerRun) for ref in piece.args]
        used.append(graph.loss)
    for ref in used:
        counts[ref] = counts.get(ref, 0) + 1
    return {ref for ref, count in counts.items() if count > 1}


class Deriver:
    """Walks a graph in execution order and knows where every tensor lies under the decisions so far."""

    def __init__(self, graph: Graph, operators: Mapping[tuple[str, str], Operator], mesh: Mesh) -> None:
        self.graph, self.operators, self.mesh = graph, operators, mesh
        self.scopes = {scope.name: scope for scope in scopes_of(graph)}
        self.options = {key: options_of(operator, mesh) for key, operator in operators.items()}
        self.shared = {name: multi_use_refs(graph, scope) for name, scope in self.scopes.items()}
        self.lies: dict[tuple[str, Ref], Placements] = {}

    def order(self) -> list[Scope]:
        """Layer classes first: the top level needs to know where their outputs lie."""
        return [s for s in self.scopes.values() if s.name] + [self.scopes[""]]

    def place_inputs(self, scope: Scope, plan: ScopePlan) -> None:
        for name, stored in plan.parameters.items():
            self.lies[scope.name, Ref(name)] = stored.placements
        for name, placements in plan.inputs.items():
            self.lies[scope.name, Ref(name)] = placements

    def place_run(self, run: LayerRun) -> None:
        """Outputs of a run: carried ones lie like the input they feed, others where the last layer left them."""
        carried = {output: position for position, output in run.carried}
        for index, ref in enumerate(run.layer.outputs):
            inner = Ref(run.layer.inputs[carried[index]][0]) if index in carried else ref
            self.lies["", Ref(run.name, index)] = self.lies[run.layer.name, inner]

    def default(self, scope: Scope, name: str) -> int:
        operator = self.operators[scope.name, name]
        sources = tuple(self.lies[scope.name, ref] for ref in operator.node.inputs)
        weights = tuple(float(meta.num_bytes) for meta in operator.inputs)
        return default_option(self.options[scope.name, name], sources, self.mesh.sizes, weights)

    def pieces(self, scope: Scope) -> list[Any]:
        return list(scope.nodes) if scope.name else list(self.graph.body)


def compress(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], mesh: Mesh, choices: Choices
) -> dict[str, ScopePlan]:
    """Choices -> what a plan file writes."""
    deriver, found = Deriver(graph, operators, mesh), {}
    for scope in deriver.order():
        names = [n for n, _ in scope.layer.inputs] if scope.layer else [i.name for i in graph.inputs]
        parameters = {n: s for (owner, n), s in choices.parameters.items() if owner == scope.name}
        inputs = {n: choices.tensors[scope.name, Ref(n)] for n in names if (scope.name, Ref(n)) in choices.tensors}
        calls: dict[str, tuple[str, ...]] = {}
        tensors: dict[str, Placements] = {}
        deriver.place_inputs(scope, ScopePlan(parameters, inputs, {}, {}))
        for piece in deriver.pieces(scope):
            if isinstance(piece, LayerRun):
                deriver.place_run(piece)
                continue
            option, options = choices.operators[scope.name, piece.name], deriver.options[scope.name, piece.name]
            if option != options[deriver.default(scope, piece.name)]:
                calls[piece.name] = labels_of(options, options.index(option))
            for index, placements in enumerate(option.outputs):
                ref = Ref(piece.name, index)
                kept = choices.tensors.get((scope.name, ref), placements)
                if kept != placements:
                    tensors[_ref_name(ref)] = kept
                deriver.lies[scope.name, ref] = kept
        found[scope.name] = ScopePlan(parameters, inputs, calls, tensors)
    return {name: found[name] for name in deriver.scopes}


def expand(graph: Graph, operators: Mapping[tuple[str, str], Operator], plan: Plan) -> Choices:
    """A plan's decisions in full, validated against the graph. Raises PlanError."""
    deriver = Deriver(graph, operators, plan.mesh)
    chosen: dict[tuple[str, str], Option] = {}
    tensors: dict[tuple[str, Ref], Placements] = {}
    parameters: dict[tuple[str, str], Stored] = {}
    for scope in deriver.order():
        if scope.name not in plan.scopes:
            raise PlanError(
                f"the plan has no decisions for layer class {scope.name!r}", values=", ".join(plan.scopes) or "none"
            )
        decided = plan.scopes[scope.name]
        _check_names(graph, scope, decided)
        _check_shapes(scope, decided, plan.mesh)
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
                kept = decided.tensors.get(_ref_name(ref), placements)
                deriver.lies[scope.name, ref] = kept
                if ref in deriver.shared[scope.name]:
                    tensors[scope.name, ref] = kept
    return Choices(chosen, tensors, parameters)


def labels_of(options: tuple[Option, ...], index: int) -> tuple[str, ...]:
    """An option's axis labels as a plan file writes them: the second option with equal labels ends in `#2`.

    (An operator that is linear in one input or in the other has two options `P`.)
    """
    labels = options[index].labels
    number = sum(option.labels == labels for option in options[: index + 1])
    return labels if number == 1 else (*labels[:-1], f"{labels[-1]}#{number}")


def _find(options: tuple[Option, ...], labels: tuple[str, ...], scope: Scope, name: str, plan: Plan) -> int:
    known = [labels_of(options, index) for index in range(len(options))]
    if labels in known:
        return known.index(labels)
    raise PlanError(
        f"{scope.name or 'top'}.calls.{name} has no such option on {plan.mesh}",
        values=_labels_text(labels, plan.mesh),
        alternatives=[_labels_text(each, plan.mesh) for each in known],
    )


def _check_names(graph: Graph, scope: Scope, decided: ScopePlan) -> None:
    known = {node.name for node in scope.nodes}
    for name in (*decided.calls, *(n.partition("[")[0] for n in decided.tensors)):
        if name not in known:
            raise PlanError(f"{scope.name or 'top'} has no call named {name!r}", alternatives=", ".join(sorted(known)))
    used = {ref.node for node in scope.nodes for ref in node.inputs}
    used |= (
        {ref.node for piece in graph.body if isinstance(piece, LayerRun) for ref in piece.args}
        if not scope.layer
        else set()
    )
    stored = scope.layer.parameters if scope.layer else graph.parameters
    missing = [p.name for p in stored if p.name in used and p.name not in decided.parameters]
    missing += [name for name, _ in (scope.layer.inputs if scope.layer else ()) if name not in decided.inputs]
    if missing:
        raise PlanError(f"{scope.name or 'top'} leaves out {', '.join(missing)}")


def _check_shapes(scope: Scope, decided: ScopePlan, mesh: Mesh) -> None:
    entries = [(f"parameters.{n}", n, s.placements) for n, s in decided.parameters.items()]
    entries += [(f"inputs.{n}", n, p) for n, p in decided.inputs.items()]
    for label, name, placements in entries:
        meta = scope.metas.get(Ref(name))
        if meta is None:
            raise PlanError(f"{scope.name or 'top'}.{label} is not in the model")
        if any(p.is_shard and p.dim >= len(meta.shape) for p in placements) or not divides(
            meta.shape, placements, mesh.sizes
        ):
            raise PlanError(
                f"{scope.name or 'top'}.{label} cannot be cut into equal parts",
                values={"placements": placements_text(placements, mesh), "shape": meta.shape, "mesh": str(mesh)},
            )
    for name, stored in decided.parameters.items():
        on_dp = stored.placements[mesh.axes.index("dp")] if "dp" in mesh.axes else R
        if stored.zero and on_dp.kind != "Rp":
            raise PlanError(
                f"{scope.name or 'top'}.parameters.{name} has zero={stored.zero} but is not Rp on dp",
                values=placements_text(stored.placements, mesh),
                alternatives="zero=0, or dp=Rp",
            )


# --- text forms ------------------------------------------------------------------------------------------------


def placements_text(placements: Placements, mesh: Mesh) -> str:
    """`dp=S(0) tp=R`."""
    return " ".join(f"{axis}={p}" for axis, p in zip(mesh.axes, placements, strict=True))


def _labels_text(labels: tuple[str, ...], mesh: Mesh) -> str:
    return " ".join(f"{axis}={label}" for axis, label in zip(mesh.axes, labels, strict=True))


def _stored_text(stored: Stored, mesh: Mesh) -> str:
    zero = f" zero={stored.zero}" if stored.zero else ""
    return placements_text(stored.placements, mesh) + zero


def _ref_name(ref: Ref) -> str:
    return ref.node if ref.index == 0 else f"{ref.node}[{ref.index}]"


def _to_data(plan: Plan) -> dict[str, Any]:
    def scope_data(scope: ScopePlan) -> dict[str, Any]:
        return {
            "inputs": {n: placements_text(p, plan.mesh) for n, p in scope.inputs.items()},
            "parameters": {n: _stored_text(s, plan.mesh) for n, s in scope.parameters.items()},
            "calls": {n: _labels_text(labels, plan.mesh) for n, labels in scope.calls.items()},
            "tensors": {n: placements_text(p, plan.mesh) for n, p in scope.tensors.items()},
        }

    return {
        "autopar_plan": FORMAT,
        "model": plan.model,
        "cluster": plan.cluster,
        "mesh": str(plan.mesh),
        "global_batch_size": plan.global_batch_size,
        "micro_batches": plan.num_micro_batches,
        "precision": plan.precision,
        "top": scope_data(plan.scopes[""]),
        "layers": {name: scope_data(scope) for name, scope in plan.scopes.items() if name},
        "predicted_seconds": {k: float(v) for k, v in plan.prediction.seconds.items()},
        "predicted_bytes": {k: float(v) for k, v in plan.prediction.num_bytes.items()},
        "runner_ups": [{"plan": n, "seconds": float(s), "why": w} for n, s, w in plan.runner_ups],
    }


class _Reader:
    """YAML -> Plan, remembering the line of every key for error messages."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        self.lines: dict[tuple[str, ...], int] = {}
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
            self.data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"{source} is not YAML", values=str(error).replace("\n", " ")) from None
        if not isinstance(self.data, dict) or root is None:
            raise PlanError(
                f"{source} is not a plan",
                values=type(self.data).__name__,
                alternatives="a mapping as Plan.to_yaml writes it",
            )
        self._remember(root, ())

    def _remember(self, node: Any, path: tuple[str, ...]) -> None:
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._remember(value, (*path, str(key.value)))

    def fail(self, path: tuple[str, ...], message: str, alternatives: str = "") -> PlanError:
        line = self.lines.get(path, self.lines.get(path[:-1], 1))
        return PlanError(f"{self.source}, line {line}: {'.'.join(path)}: {message}", alternatives=alternatives or None)

    def read(self) -> Plan:
        for key in (
            "autopar_plan",
            "model",
            "cluster",
            "mesh",
            "global_batch_size",
            "micro_batches",
            "precision",
            "top",
        ):
            if key not in self.data:
                raise self.fail((key,), "is missing")
        if self.data["autopar_plan"] != FORMAT:
            raise self.fail(("autopar_plan",), f"format {self.data['autopar_plan']} is not {FORMAT}")
        try:
            self.mesh = Mesh.parse(str(self.data["mesh"]))
        except ValueError as error:
            raise self.fail(("mesh",), str(error)) from None
        scopes = {"": self._scope(("top",))}
        for name in self._mapping(("layers",), self.data.get("layers")):
            scopes[name] = self._scope(("layers", name))
        return Plan(
            str(self.data["model"]),
            str(self.data["cluster"]),
            self.mesh,
            self._count("global_batch_size"),
            self._count("micro_batches"),
            str(self.data["precision"]),
            scopes,
            Prediction(dict(self.data.get("predicted_seconds") or {}), dict(self.data.get("predicted_bytes") or {})),
            tuple((r["plan"], float(r["seconds"]), r["why"]) for r in self.data.get("runner_ups") or ()),
        )

    def _scope(self, path: tuple[str, ...]) -> ScopePlan:
        data = self.data
        for part in path:
            data = self._mapping(path, data[part])
        for part in ("parameters", "inputs", "calls", "tensors"):
            self._mapping((*path, part), data.get(part))
        parameters = {n: self._stored((*path, "parameters", n), t) for n, t in (data.get("parameters") or {}).items()}
        inputs = {n: self._placements((*path, "inputs", n), t) for n, t in (data.get("inputs") or {}).items()}
        calls = {n: self._labels((*path, "calls", n), t) for n, t in (data.get("calls") or {}).items()}
        tensors = {n: self._placements((*path, "tensors", n), t) for n, t in (data.get("tensors") or {}).items()}
        return ScopePlan(parameters, inputs, calls, tensors)

    def _mapping(self, path: tuple[str, ...], value: Any) -> dict[str, Any]:
        if not isinstance(value, (dict, type(None))):
            raise self.fail(path, f"{value!r} is not a mapping", "names with their placements")
        return value or {}

    def _count(self, key: str) -> int:
        value = self.data[key]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail((key,), f"{value!r} is not a count", "a whole number of at least 1")
        return value

    def _pairs(self, path: tuple[str, ...], text: Any, extra: tuple[str, ...] = ()) -> dict[str, str]:
        pairs: dict[str, str] = {}
        for part in str(text).split():
            name, equals, value = part.partition("=")
            if not equals or name not in (*self.mesh.axes, *extra):
                raise self.fail(
                    path, f"cannot read {part!r}", f"axis=value with axes {', '.join(self.mesh.axes) or '(none)'}"
                )
            pairs[name] = value
        return pairs

    def _placements(self, path: tuple[str, ...], text: Any, extra: tuple[str, ...] = ()) -> Placements:
        pairs = self._pairs(path, text, extra)
        try:
            return tuple(Placement.parse(pairs[axis]) if axis in pairs else R for axis in self.mesh.axes)
        except ValueError as error:
            raise self.fail(path, str(error)) from None

    def _stored(self, path: tuple[str, ...], text: Any) -> Stored:
        pairs = self._pairs(path, text, ("zero",))
        zero = pairs.get("zero", "0")
        if zero not in ("0", "1", "2", "3"):
            raise self.fail(path, f"zero={zero}", "zero is 0, 1, 2 or 3")
        return Stored(self._placements(path, text, ("zero",)), int(zero))

    def _labels(self, path: tuple[str, ...], text: Any) -> tuple[str, ...]:
        pairs = self._pairs(path, text)
        return tuple(pairs.get(axis, "R") for axis in self.mesh.axes)
