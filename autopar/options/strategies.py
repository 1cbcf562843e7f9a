"""Rule x mesh -> the options of every operator.

The mesh's axes have roles, so that a plan's axis names mean what they say: `dp` and `ddp` shard the factor that runs
over the batch, `cp` the one that runs over the positions of the sequence, every other axis any other factor. Which
factor these are is found by following the dims of the inputs through the rules. `ep` shards the batch too, but the
weights of experts by expert, which is followed back to the parameters. Section counts (fused QKV, merged dims) travel
the same way, from the operator that needs them to the ones that can provide them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.ir.graph import ATTENTION, Graph, Input, LayerRun, Node, Ref, TensorMeta, base_name, derived, is_causal
from autopar.ir.mesh import DATA_AXES, Mesh
from autopar.ir.placement import Placement, Placements, R, Rp, divides
from autopar.options.followed import follow, follow_experts, follow_sections
from autopar.options.fused import Fusion, Fusions
from autopar.options.routes import Route, routes_of
from autopar.options.scopes import Scope, scopes_of
from autopar.rules.attention import EXCHANGES, HEADS
from autopar.rules.experts import EXPERT_LINEAR, ROUTED
from autopar.rules.localize import combines
from autopar.rules.registry import rule_for
from autopar.rules.rule import AxisOption, Rule, axis_options

UNCUT = ("R", "Rp", "P")
"""Labels of options that shard nothing."""


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

    batch, positions: the factor (and sections) that runs over the batch, over the sequence. is_striped: whether `cp`
    shards sequences in stripes. experts: of what makes a weight of experts, the factor that runs over these. route: of
    a layer of experts, how its rows come and go. runs: of the scope's calls, what one kernel may do.
    """

    scope: str
    node: Node
    inputs: tuple[TensorMeta, ...]
    rule: Rule
    known: bool
    batch: tuple[str, int] | None
    sections: Mapping[str, tuple[int, ...]]
    positions: tuple[str, int] | None = None
    is_striped: bool = False
    experts: str | None = None
    route: Route = Route()
    runs: Fusions | None = None

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """Runs with this call among them, in the order in which programs prefer them."""
        return self.runs.of(self.node.name) if self.runs is not None else ()


def operators_of(graph: Graph) -> dict[tuple[str, str], Operator]:
    """Every call of the graph by (scope, node name), with its batch factor and section counts found."""
    scopes, rules = scopes_of(graph), rules_of(graph)
    batch = follow(graph, scopes, rules, {i.name: i.batch_dim for i in graph.inputs})
    positions = follow(graph, scopes, rules, sequence_dims(graph), is_sequence=True)
    is_striped = any(base_name(node.op) in ATTENTION and is_causal(node) for scope in scopes for node in scope.nodes)
    sections = follow_sections(graph, scopes, rules)
    experts = {key: factor for scope in scopes for key, factor in follow_experts(scope, rules).items()}
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
                positions=positions.get(key),
                is_striped=is_striped,
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


@derived
def rules_of(graph: Graph) -> dict[tuple[str, str], tuple[Rule, bool]]:
    """Every call's rule by (scope, node name), and whether its operator is known."""
    return {(s.name, n.name): rule_or_blank(n, s.metas) for s in scopes_of(graph) for n in s.nodes}


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


@derived
def sequence_dims(graph: Graph) -> dict[str, int]:
    """The dim of each batch input that is the positions of sequences: 1 of ids [B, L] and of vectors [B, L, D].

    Where the sizes of these dims differ, they are positions if they reach a layer or attention, or are as many as in
    one that does: boundaries of documents, candidates and classes of a row are none.
    """
    found = {each.name: (1, each.meta.shape[1]) for each in graph.inputs if _may_be_sequence(each)}
    sizes = {size for _, size in found.values()}
    if len(sizes) > 1:
        scopes, rules = scopes_of(graph), rules_of(graph)
        inner = {(s.name, n.name) for s in scopes for n in s.nodes if s.name or base_name(n.op) in ATTENTION}
        reaching = {
            size
            for name, (dim, size) in found.items()
            if inner & follow(graph, scopes, rules, {name: dim}, is_sequence=True).keys()
        }
        sizes = reaching or sizes
    return {name: dim for name, (dim, size) in found.items() if size in sizes}


def _may_be_sequence(batch_input: Input) -> bool:
    num_dims, dtype = len(batch_input.meta.shape), batch_input.meta.dtype
    return batch_input.batch_dim == 0 and (num_dims == 3 if dtype.is_floating_point else num_dims >= 2)


@derived
def sequence_length(graph: Graph) -> int:
    """The greatest common divisor of the numbers of positions of all inputs that are sequences; 0 without any."""
    dims = sequence_dims(graph)
    return math.gcd(*(each.meta.shape[dims[each.name]] for each in graph.inputs if each.name in dims))


@derived
def has_context(graph: Graph) -> bool:
    """Whether some attention on sequences may be cut along them."""
    return any(op.positions is not None and can_cut_context(op) for op in operators_of(graph).values())


def can_cut_context(operator: Operator) -> bool:
    """Whether queries and keys of the call may be cut along the sequence together, the ranks exchanging keys."""
    return any(joint.lowering in EXCHANGES for joint in operator.rule.joints.values())


def _axis_choices(operator: Operator, axis: str, size: int) -> list[AxisOption]:
    """Options of one axis by its role. A data axis that can shard the batch does nothing else: what costs the same on
    two data-parallel ranks as on many is what shards (see planning/solved_layers.py), and a partial weight with the
    whole batch is not. Layers of experts and what makes their weights are cut by expert on `ep`, and only there."""
    if axis == "cp":
        return _context_choices(operator, size)
    batch = operator.batch
    sections = dict(operator.sections)
    if batch and batch[1] > 1:
        sections[batch[0]] = (*sections.get(batch[0], ()), batch[1])
    options = axis_options(operator.rule, size, operator.inputs, operator.node.outputs, sections)
    batch_label = None if batch is None else _label(*batch)
    is_batch = [option.label.split("/")[0] == batch[0] if batch else False for option in options]
    routed = [option for option in options if option.lowering == ROUTED]
    if axis == "ep" and (routed or operator.experts):
        return routed or [option for option in options if option.label == operator.experts]
    if axis not in DATA_AXES:
        special = [option for option in options if option.label in operator.rule.joints]
        return [option for option, b in zip(options, is_batch, strict=True) if not b and option not in special]
    if any(option.label == batch_label for option in options):
        return [option for option in options if option.label == batch_label]
    return [option for option in options if option.label in UNCUT]


def _context_choices(operator: Operator, size: int) -> list[AxisOption]:
    """Options of `cp`: positions of sequences are cut, where they cannot be, all that is no batch, and nothing of calls
    without any. Attention exchanges keys, or has the heads cut instead (S. A. Jacobs et al., "DeepSpeed Ulysses"
    (2023))."""
    rule = operator.rule
    if operator.positions is None:
        options = axis_options(rule, size, operator.inputs, operator.node.outputs)
        return [option for option in options if option.label in UNCUT]
    factor, count = operator.positions
    if operator.is_striped and rule.sizes[factor] % (count * size) == 0:
        count = rule.sizes[factor] // size
    options = axis_options(rule, size, operator.inputs, operator.node.outputs, {factor: (count,)})
    wanted = _label(factor, count)
    joint = [o for o in options if o.label in rule.joints and rule.joints[o.label].is_striped == operator.is_striped]
    if can_cut_context(operator):
        return joint + [o for o in options if o.label in HEADS] or [options[0]]
    cut = [option for option in options if option.label == wanted]
    batch = operator.batch[0] if operator.batch else None
    others = [o for o in options if o.label not in rule.joints and o.label.split("/")[0] not in (batch, factor)]
    return cut or others


def _label(factor: str, sections: int) -> str:
    return factor if sections == 1 else f"{factor}/{sections}"


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
