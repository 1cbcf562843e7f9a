"""Rule x mesh -> the options of every operator.

The mesh's axes have roles, so that a plan's axis names mean what they say: `dp` and `ddp` shard the factor that runs
over the batch, every other axis shards any other factor. Which factor is the batch's is found by following the batch
dim of the inputs through the rules. `ep` shards the batch too, but the weights of experts by expert, which is followed
back to the parameters. Section counts (fused QKV, merged dims) travel the same way, from the operator that
needs them to the ones that can provide them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, LayerClass, LayerRun, Node, Ref, TensorMeta, derived
from autopar.ir.mesh import DATA_AXES, Mesh
from autopar.ir.placement import Placement, Placements, R, Rp, S, divides
from autopar.options.fused import Fusion, Fusions
from autopar.options.routes import Route, routes_of
from autopar.rules.attention import EXCHANGES
from autopar.rules.experts import EXPERT_LINEAR, ROUTED
from autopar.rules.localize import combines
from autopar.rules.registry import rule_for
from autopar.rules.rule import AxisOption, Rule, axis_options, find_factor

Sections = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a call on the whole mesh: an AxisOption per axis, and what it means for each tensor."""

    axes: tuple[AxisOption, ...]
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(option.label for option in self.axes)


@dataclass(frozen=True, slots=True)
class Operator:
    """A call with its rule, in its scope ("" or a layer class' name).

    batch: the factor (and sections) that runs over the batch. experts: of what makes a weight of experts, the factor
    that runs over these. route: of a layer of experts, how its rows come and go. runs: of the scope's calls, what one
    kernel may do.
    """

    scope: str
    node: Node
    inputs: tuple[TensorMeta, ...]
    rule: Rule
    known: bool
    batch: tuple[str, int] | None
    sections: Mapping[str, tuple[int, ...]]
    experts: str | None = None
    route: Route = Route()
    runs: Fusions | None = None

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """Runs with this call among them, in the order in which programs prefer them."""
        return self.runs.of(self.node.name) if self.runs is not None else ()


@dataclass(frozen=True, slots=True)
class Scope:
    """A flat list of nodes with the metas of everything they can refer to; shared by the layers at `instances`."""

    name: str
    nodes: tuple[Node, ...]
    metas: Mapping[Ref, TensorMeta]
    instances: tuple[str, ...] = ("",)
    layer: LayerClass | None = None

    @property
    def count(self) -> int:
        """How many layers share the scope; 1 for the top level."""
        return len(self.instances)

    def full_names(self, name: str) -> list[str]:
        """`name` as the user's model has it, once per layer."""
        return [f"{path}.{name}".strip(".") for path in self.instances]


@derived
def scopes_of(graph: Graph) -> tuple[Scope, ...]:
    """The top level, then each layer class once."""
    top_metas = {Ref(p.name): p.meta for p in graph.parameters} | {Ref(i.name): i.meta for i in graph.inputs}
    top_nodes: list[Node] = []
    classes: dict[str, tuple[LayerClass, tuple[str, ...]]] = {}
    for piece in graph.body:
        top_metas |= {Ref(piece.name, i): meta for i, meta in enumerate(piece.outputs)}
        if isinstance(piece, LayerRun):
            layer, paths = classes.get(piece.layer.name, (piece.layer, ()))
            classes[layer.name] = (layer, paths + piece.instances)
        else:
            top_nodes.append(piece)
    scopes = [Scope("", tuple(top_nodes), top_metas)]
    for layer, paths in classes.values():
        metas = {Ref(name): meta for name, meta in layer.inputs}
        metas |= {Ref(p.name): p.meta for p in layer.parameters}
        metas |= {Ref(n.name, i): meta for n in layer.nodes for i, meta in enumerate(n.outputs)}
        scopes.append(Scope(name=layer.name, nodes=layer.nodes, metas=metas, instances=paths, layer=layer))
    return tuple(scopes)


def operators_of(graph: Graph) -> dict[tuple[str, str], Operator]:
    """Every call of the graph by (scope, node name), with its batch factor and section counts found."""
    scopes = scopes_of(graph)
    rules = {(s.name, n.name): rule_or_blank(n, s.metas) for s in scopes for n in s.nodes}
    batch = _follow_batch(graph, scopes, rules)
    sections = _follow_sections(graph, scopes, rules)
    experts = {key: factor for scope in scopes for key, factor in _follow_experts(scope, rules).items()}
    found = {}
    for scope in scopes:
        leaving = _leaving(graph, scope)
        runs = Fusions(scope.nodes, scope.metas, leaving)
        routes = routes_of(
            scope.nodes,
            {node.name: rules[scope.name, node.name][0] for node in scope.nodes},
            {name: factor for (owner, name), factor in batch.items() if owner == scope.name},
            leaving,
        )
        for node in scope.nodes:
            key = (scope.name, node.name)
            rule, is_known = rules[key]
            metas = tuple(scope.metas[ref] for ref in node.inputs)
            found[key] = Operator(
                scope=scope.name,
                node=node,
                inputs=metas,
                rule=rule,
                known=is_known,
                batch=batch.get(key),
                sections=sections.get(key, {}),
                experts=experts.get(key),
                route=routes.get(node.name, Route()),
                runs=runs,
            )
    return found


@derived
def num_experts(graph: Graph) -> int:
    """The greatest common divisor of the experts of all layers whose rows may travel to them; 0 without any."""
    calls = [(scope, node) for scope in scopes_of(graph) for node in scope.nodes if node.op == EXPERT_LINEAR]
    return math.gcd(*(scope.metas[node.inputs[1]].shape[0] for scope, node in calls))


def _leaving(graph: Graph, scope: Scope) -> set[Ref]:
    """What is read of a scope outside of its calls."""
    if scope.layer:
        return set(scope.layer.outputs)
    return {graph.loss} | {ref for piece in graph.body if isinstance(piece, LayerRun) for ref in piece.args}


def rule_or_blank(node: Node, metas: Mapping[Ref, TensorMeta]) -> tuple[Rule, bool]:
    """The node's rule; an unknown operator gets one without factors, which only replication satisfies."""
    inputs = tuple(metas[ref] for ref in node.inputs)
    rule = rule_for(node, inputs)
    if rule is not None:
        return rule, True
    blank = tuple(tuple(() for _ in meta.shape) for meta in inputs)
    return Rule(blank, tuple(tuple(() for _ in meta.shape) for meta in node.outputs), {}), False


def options_of(operator: Operator, mesh: Mesh) -> tuple[Option, ...]:
    """Every combination of one AxisOption per axis whose shards are all of equal size."""
    per_axis = [_axis_choices(operator, axis, size) for axis, size in zip(mesh.axes, mesh.sizes, strict=True)]
    shapes_in = [meta.shape for meta in operator.inputs]
    shapes_out = [meta.shape for meta in operator.node.outputs]
    found = []
    for axes in itertools.product(*per_axis):
        if not combines(operator.rule, axes, mesh.sizes):
            continue
        inputs = tuple(tuple(a.inputs[i] for a in axes) for i in range(len(shapes_in)))
        outputs = tuple(tuple(a.outputs[i] for a in axes) for i in range(len(shapes_out)))
        tensors = itertools.chain(zip(shapes_in, inputs, strict=True), zip(shapes_out, outputs, strict=True))
        if all(divides(shape, placements, mesh.sizes) for shape, placements in tensors):
            found.append(Option(axes, inputs, outputs))
    return tuple(found)


def can_cut_context(operator: Operator) -> bool:
    """Whether queries and keys of the call may be cut along the sequence together, the ranks exchanging keys."""
    return any(joint.lowering in EXCHANGES for joint in operator.rule.joints.values())


def cuts_context(option: Option) -> bool:
    """Whether some axis cuts queries and keys along the sequence together."""
    return any(axis.lowering in EXCHANGES for axis in option.axes)


def _axis_choices(operator: Operator, axis: str, size: int) -> list[AxisOption]:
    """Options of one axis by its role. A data axis that can shard the batch does nothing else: what costs the same on
    two data-parallel ranks as on many is what shards (see planning/solved_layers.py), and a partial weight with the
    whole batch is not. Layers of experts and what makes their weights are cut by expert on `ep`, and only there."""
    batch = operator.batch
    sections = dict(operator.sections)
    if batch and batch[1] > 1:
        sections[batch[0]] = (*sections.get(batch[0], ()), batch[1])
    options = axis_options(operator.rule, size, operator.inputs, operator.node.outputs, sections)
    batch_label = None if batch is None else batch[0] if batch[1] == 1 else f"{batch[0]}/{batch[1]}"
    is_batch = [option.label.split("/")[0] == batch[0] if batch else False for option in options]
    routed = [option for option in options if option.lowering == ROUTED]
    if axis == "ep" and (routed or operator.experts):
        return routed or [option for option in options if option.label == operator.experts]
    if axis not in DATA_AXES:
        return [option for option, b in zip(options, is_batch, strict=True) if not b and option not in routed]
    if any(option.label == batch_label for option in options):
        return [option for option in options if option.label == batch_label]
    return [option for option in options if option.label in ("R", "Rp", "P")]


def _spread(graph: Graph, scopes: tuple[Scope, ...], marks: dict[tuple[str, Ref], set[Placement]]) -> None:
    """Copy marks across layer borders, both ways."""
    by_name = {scope.name: scope for scope in scopes}
    for piece in graph.body:
        if not isinstance(piece, LayerRun):
            continue
        scope = by_name[piece.layer.name]
        pairs = [
            ((scope.name, Ref(formal)), ("", arg))
            for (formal, _), arg in zip(piece.layer.inputs, piece.args, strict=True)
        ]
        pairs += [((scope.name, ref), ("", Ref(piece.name, i))) for i, ref in enumerate(piece.layer.outputs)]
        for here, there in pairs:
            both = marks.get(here, set()) | marks.get(there, set())
            if both:
                marks[here] = set(both)
                marks[there] = set(both)


def _follow_batch(
    graph: Graph, scopes: tuple[Scope, ...], rules: Mapping[tuple[str, str], tuple[Rule, bool]]
) -> dict[tuple[str, str], tuple[str, int]]:
    """For each node the (factor, sections) that its batch dim is, found forward from the inputs."""
    marks: dict[tuple[str, Ref], set[Placement]] = {
        ("", Ref(i.name)): {S(i.batch_dim)} for i in graph.inputs if i.batch_dim is not None
    }
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for _ in range(len(scopes) + 1):
        _spread(graph, scopes, marks)
        before = len(found)
        for scope in scopes:
            for node in scope.nodes:
                rule = rules[scope.name, node.name][0]
                for ref, dims in zip(node.inputs, rule.inputs, strict=True):
                    for mark in marks.get((scope.name, ref), ()):
                        factor = factor_of(rule, dims, mark)
                        if factor is not None and factor[0] not in rule.blocked:
                            found.setdefault((scope.name, node.name), factor)
                batch = found.get((scope.name, node.name))
                if batch:
                    for index, dims in enumerate(rule.outputs):
                        placement = find_factor(rule, dims, *batch)
                        if placement:
                            marks[scope.name, Ref(node.name, index)] = {placement}
        if len(found) == before:
            break
    return found


def _follow_experts(scope: Scope, rules: Mapping[tuple[str, str], tuple[Rule, bool]]) -> dict[tuple[str, str], str]:
    """For each call that makes a weight of experts alone, the factor that its first dim is, found back from its use."""
    layers = [node for node in scope.nodes if node.op == EXPERT_LINEAR]
    wanted = {ref: S(0) for node in layers for ref in (node.inputs[1], *node.inputs[3:])}
    found: dict[tuple[str, str], str] = {}
    for node in reversed(scope.nodes):
        mark, key = wanted.get(Ref(node.name)), (scope.name, node.name)
        factor = factor_of(rules[key][0], rules[key][0].outputs[0], mark) if mark else None
        if factor is not None and factor[1] == 1 and len(node.outputs) == 1:
            found[key] = factor[0]
            for ref, dims in zip(node.inputs, rules[key][0].inputs, strict=True):
                if placement := find_factor(rules[key][0], dims, *factor):
                    wanted[ref] = placement
    return found


def factor_of(rule: Rule, dims: tuple[tuple[str, ...], ...], mark: Placement) -> tuple[str, int] | None:
    """The factor and its sections that put shard `mark` on a tensor with `dims`."""
    if mark.dim >= len(dims):
        return None
    before = 1
    for factor in dims[mark.dim]:
        rest, remainder = divmod(mark.sections, before)
        if remainder == 0 and rest >= 1 and rule.sizes[factor] % rest == 0 and rest < rule.sizes[factor]:
            return factor, rest
        before *= rule.sizes[factor]
    return None


def _follow_sections(
    graph: Graph, scopes: tuple[Scope, ...], rules: Mapping[tuple[str, str], tuple[Rule, bool]]
) -> dict[tuple[str, str], Sections]:
    """For each node the section counts worth offering per factor: those that some neighbour's shard needs."""
    marks: dict[tuple[str, Ref], set[Placement]] = {}
    found: dict[tuple[str, str], dict[str, set[int]]] = {}
    for _ in range(8):
        before = sum(len(placements) for placements in marks.values())
        _spread(graph, scopes, marks)
        for scope in scopes:
            for node in itertools.chain(scope.nodes, reversed(scope.nodes)):
                _mark_sections(scope.name, node, rules[scope.name, node.name][0], marks, found)
        if sum(len(placements) for placements in marks.values()) == before:
            break
    return {key: {f: tuple(sorted(counts)) for f, counts in value.items()} for key, value in found.items()}


def _mark_sections(
    scope: str,
    node: Node,
    rule: Rule,
    marks: dict[tuple[str, Ref], set[Placement]],
    found: dict[tuple[str, str], dict[str, set[int]]],
) -> None:
    tensors: list[tuple[Ref, tuple[tuple[str, ...], ...]]] = [
        *zip(node.inputs, rule.inputs, strict=True),
        *((Ref(node.name, i), dims) for i, dims in enumerate(rule.outputs)),
    ]
    wanted: set[tuple[str, int]] = {(factor, 1) for factor in rule.shardable}
    for ref, dims in tensors:
        for mark in marks.get((scope, ref), ()):
            pair = factor_of(rule, dims, mark)
            if pair and pair[0] in rule.shardable:
                wanted.add(pair)
    counts = found.setdefault((scope, node.name), {})
    for factor, sections in wanted:
        if sections > 1:
            counts.setdefault(factor, set()).add(sections)
        for ref, dims in tensors:
            placement = find_factor(rule, dims, factor, sections)
            if placement and placement.sections > 1:
                marks.setdefault((scope, ref), set()).add(placement)


def placement_choices(meta: TensorMeta, offered: Iterable[Placements], mesh: Mesh) -> tuple[Placements, ...]:
    """All combinations of the per-axis placements seen in `offered` that divide, in a fixed order."""
    per_axis: list[list[Placement]] = []
    for axis in range(len(mesh.axes)):
        seen = sorted({placements[axis] for placements in offered})
        per_axis.append([p for p in seen if meta.requires_grad or p != Rp] or [R])
    return tuple(c for c in itertools.product(*per_axis) if divides(meta.shape, c, mesh.sizes))


def num_local(meta: TensorMeta, placements: Placements, mesh: Mesh) -> int:
    """Elements of one rank's part."""
    ways = math.prod([n for p, n in zip(placements, mesh.sizes, strict=True) if p.kind == "S"])
    return meta.numel // ways
