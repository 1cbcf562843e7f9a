"""Turn rules and a mesh into the options of every operator.

The mesh's axes have roles, so that a plan's axis names mean what they say. `dp` and `ddp` shard the factor over the
batch, `cp` the factor over sequence positions, and every other axis any other factor. These factors are found by
following the dims of the inputs through the rules. `ep` also shards the batch, but shards expert weights by expert,
which is followed back to the parameters; it may also shard tensors that keep the rows of each expert together. In
expert layers, `tp` and `ttp` may shard positions if these are one dim with the batch. The experts may then be sharded
over their ranks as well, together with these rows, which is called folding ("MoE Parallel Folding", D. Liu et al.
(2025)). Section counts (fused QKV, merged dims) are followed the same way, from the operator that needs them to the
operators that can provide them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.ir.graph import Graph, Input, LayerRun, Node, Ref, TensorMeta, base_name, derived, is_causal
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Placement, Placements, R, Rp, divides
from autopar.operators.traits import ATTENTION, MATMULS
from autopar.rules.families.attention import EXCHANGES, HEADS
from autopar.rules.families.convolution import HALO
from autopar.rules.families.experts import EXPERT_LINEAR, ROUTED, ROWS_AND_EXPERTS
from autopar.rules.localize import combines
from autopar.rules.registry import rule_for
from autopar.rules.rule import AxisOption, Rule, axis_options, label_of
from autopar.sharding.batch_and_sequence_dims import follow, follow_sections
from autopar.sharding.expert_dims import ExpertDims, expert_dims
from autopar.sharding.expert_routes import Route, routes_of
from autopar.sharding.fusible_runs import Fusion, Fusions
from autopar.sharding.scopes import Scope, scopes_of
from codegen.axis_records import AXES

UNCUT = ("R", "Rp", "P")
"""Labels of options that shard nothing."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a call on the whole mesh: an AxisOption per axis, and the placements of each tensor."""

    axes: tuple[AxisOption, ...]
    inputs: tuple[Placements, ...]
    outputs: tuple[Placements, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(option.label for option in self.axes)


@dataclass(frozen=True, slots=True)
class Operator:
    """A call with its rule, in its scope ("" or a layer class' name).

    batch, positions: the factor (and sections) over the batch, over the sequence. position_size: indices of the latter
    per position (k rows where tokens have k choices of an expert). after_positions: whether the call has no positions
    itself but reads results computed from some, as a step of a recurrence does. is_striped: whether `cp` shards
    sequences in stripes. experts: the factor over experts of calls that compute expert weights, and of their products
    with rows sorted by expert. by_expert: that factor of other calls on tensors sorted by expert. route: how the rows
    of an expert layer, or of a call between two, arrive and leave. beside_experts: whether its scope has such layers.
    runs: of the scope's calls, for fused kernels. options: of `options_of`, by mesh.
    """

    scope: str
    node: Node
    inputs: tuple[TensorMeta, ...]
    rule: Rule
    has_rule: bool
    batch: tuple[str, int] | None
    sections: Mapping[str, tuple[int, ...]]
    positions: tuple[str, int] | None = None
    position_size: int = 1
    after_positions: bool = False
    is_striped: bool = False
    experts: str | None = None
    by_expert: str | None = None
    route: Route = Route()
    beside_experts: bool = False
    runs: Fusions | None = None
    options: dict[Mesh, tuple[Option, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def multiplies_by_expert(self) -> bool:
        """Whether it multiplies rows by the matrices of their experts."""
        return self.node.op == EXPERT_LINEAR or (self.experts is not None and base_name(self.node.op) in MATMULS)

    @property
    def fusions(self) -> tuple[Fusion, ...]:
        """Return the runs that contain this call, in the order in which programs prefer them."""
        return self.runs.of(self.node.name) if self.runs is not None else ()


@derived
def operators_of(graph: Graph) -> dict[tuple[str, str], Operator]:
    """Return every call of the graph by (scope, node name), with its batch factor and section counts."""
    scopes, rules = scopes_of(graph), rules_of(graph)
    batch = follow(graph, scopes, rules, {i.name: i.batch_dim for i in graph.inputs})
    positions = follow(graph, scopes, rules, sequence_dims(graph), is_sequence=True)
    dims = sequence_dims(graph)
    lengths = {entry.meta.shape[dims[entry.name]] for entry in graph.inputs if entry.name in dims}
    after_positions = {key for scope in scopes for key in _after(scope, positions)}
    is_striped = any(base_name(node.op) in ATTENTION and is_causal(node) for scope in scopes for node in scope.nodes)
    sections = follow_sections(graph, scopes, rules)
    experts = expert_dims_of(graph)
    operators = {}
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
            rule, has_rule = rules[key]
            metas = tuple(scope.metas[ref] for ref in node.inputs)
            operators[key] = Operator(
                scope=scope.name,
                node=node,
                inputs=metas,
                rule=rule,
                has_rule=has_rule,
                batch=batch.get(key),
                sections=sections.get(key, {}),
                positions=positions.get(key),
                position_size=_position_size(rule, positions.get(key), lengths),
                after_positions=key in after_positions,
                is_striped=is_striped,
                experts=experts[scope.name].makers.get(node.name),
                by_expert=experts[scope.name].others.get(node.name),
                route=routes.get(node.name, Route()),
                beside_experts=bool(routes),
                runs=runs,
            )
    return operators


def _position_size(rule: Rule, positions: tuple[str, int] | None, lengths: Collection[int]) -> int:
    """Return how many indices of its factor form one position. lengths: of the sequences."""
    per_row = 0 if positions is None else rule.sizes[positions[0]] // positions[1]
    dividing = [length for length in lengths if per_row and per_row % length == 0]
    return per_row // max(dividing) if dividing else 1


def _after(scope: Scope, positions: Mapping[tuple[str, str], tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """Yield calls without positions that depend on calls of the scope with positions."""
    dependent = set[str]()
    for node in scope.nodes:
        if (scope.name, node.name) in positions:
            dependent.add(node.name)
        elif any(ref.node in dependent for ref in node.inputs):
            dependent.add(node.name)
            yield scope.name, node.name


@derived
def expert_dims_of(graph: Graph) -> Mapping[str, ExpertDims]:
    """Return the expert dims by scope name."""
    scopes, rules = scopes_of(graph), rules_of(graph)
    positions = follow(graph, scopes, rules, sequence_dims(graph), is_sequence=True)
    stored = {scope.name: scope.layer.parameters if scope.layer else graph.parameters for scope in scopes}
    return {scope.name: expert_dims(scope, rules, {p.name for p in stored[scope.name]}, positions) for scope in scopes}


@derived
def num_experts(graph: Graph) -> int:
    """Return the greatest common divisor of the expert counts of all layers that ranks may share; 0 without any."""
    return math.gcd(*(number for dims in expert_dims_of(graph).values() for number in dims.num_experts))


@derived
def expert_parameters(graph: Graph) -> frozenset[tuple[str, Ref]]:
    """Return (scope, name) of expert weights and of the tensors they are computed from."""
    return frozenset((name, ref) for name, dims in expert_dims_of(graph).items() for ref in dims.weights)


def _leaving(graph: Graph, scope: Scope) -> set[Ref]:
    """Return the tensors of a scope that are read outside of its calls."""
    if scope.layer:
        return set(scope.layer.outputs)
    return {graph.loss} | {ref for piece in graph.body if isinstance(piece, LayerRun) for ref in piece.args}


@derived
def rules_of(graph: Graph) -> dict[tuple[str, str], tuple[Rule, bool]]:
    """Return every call's rule by (scope, node name), and whether its operator has a rule."""
    return {(s.name, n.name): rule_or_blank(n, s.metas) for s in scopes_of(graph) for n in s.nodes}


def rule_or_blank(node: Node, metas: Mapping[Ref, TensorMeta]) -> tuple[Rule, bool]:
    """Return the node's rule; an operator without one gets a rule without factors, which allows only replication."""
    inputs = tuple(metas[ref] for ref in node.inputs)
    rule = rule_for(node, inputs)
    if rule is not None:
        return rule, True
    blank = tuple(tuple(() for _ in meta.shape) for meta in inputs)
    return Rule(blank, tuple(tuple(() for _ in meta.shape) for meta in node.outputs), {}), False


def options_of(operator: Operator, mesh: Mesh) -> tuple[Option, ...]:
    """Return every combination of one AxisOption per axis whose shards all have equal size."""
    if mesh not in operator.options:
        operator.options[mesh] = _options_of(operator, mesh)
    return operator.options[mesh]


def _options_of(operator: Operator, mesh: Mesh) -> tuple[Option, ...]:
    per_axis = [_axis_choices(operator, axis, size) for axis, size in zip(mesh.axes, mesh.sizes, strict=True)]
    shapes_in = [meta.shape for meta in operator.inputs]
    shapes_out = [meta.shape for meta in operator.node.outputs]
    options = []
    for axes in itertools.product(*per_axis):
        if not combines(operator.rule, axes, mesh.sizes) or not _are_neighbors(routed_axes(axes), mesh):
            continue
        inputs = tuple(tuple(a.inputs[i] for a in axes) for i in range(len(shapes_in)))
        outputs = tuple(tuple(a.outputs[i] for a in axes) for i in range(len(shapes_out)))
        tensors = itertools.chain(zip(shapes_in, inputs, strict=True), zip(shapes_out, outputs, strict=True))
        if all(divides(shape, placements, mesh.sizes) for shape, placements in tensors):
            options.append(Option(axes, inputs, outputs))
    return tuple(options)


def routed_axes(axes: tuple[AxisOption, ...]) -> tuple[int, ...]:
    """Return the indices of the axes over which rows travel to their experts."""
    return tuple(number for number, option in enumerate(axes) if option.lowering == ROUTED)


def expert_axes(operator: Operator, option: Option) -> tuple[int, ...]:
    """Return the indices of the axes over which an expert layer shards its experts."""
    routed = routed_axes(option.axes)
    return routed + tuple(number for number, axis in enumerate(option.axes) if axis.label == operator.experts)


def _are_neighbors(axes: tuple[int, ...], mesh: Mesh) -> bool:
    """Whether no axis is between these, so that their links are those of one axis."""
    return not axes or all(mesh.sizes[number] == 1 for number in set(range(axes[0], axes[-1])) - set(axes))


@derived
def sequence_dims(graph: Graph) -> dict[str, int]:
    """Return the dim of sequence positions of each batch input: 1 of ids [B, L] and of vectors [B, L, D].

    If these dims differ in size, they are positions if they reach a layer or attention, or have the size of one that
    does. Boundaries of documents, candidates and classes of a row are not positions.
    """
    candidates = {entry.name: (1, entry.meta.shape[1]) for entry in graph.inputs if _may_be_sequence(entry)}
    sizes = {size for _, size in candidates.values()}
    if len(sizes) > 1:
        scopes, rules = scopes_of(graph), rules_of(graph)
        inner = {(s.name, n.name) for s in scopes for n in s.nodes if s.name or base_name(n.op) in ATTENTION}
        reaching = {
            size
            for name, (dim, size) in candidates.items()
            if inner & follow(graph, scopes, rules, {name: dim}, is_sequence=True).keys()
        }
        sizes = reaching or sizes
    return {name: dim for name, (dim, size) in candidates.items() if size in sizes}


def _may_be_sequence(batch_input: Input) -> bool:
    num_dims, dtype = len(batch_input.meta.shape), batch_input.meta.dtype
    return batch_input.batch_dim == 0 and (num_dims == 3 if dtype.is_floating_point else num_dims >= 2)


@derived
def sequence_length(graph: Graph) -> int:
    """Return the greatest common divisor of the numbers of positions of all sequence inputs; 0 without any."""
    dims = sequence_dims(graph)
    return math.gcd(*(entry.meta.shape[dims[entry.name]] for entry in graph.inputs if entry.name in dims))


@derived
def has_context(graph: Graph) -> bool:
    """Whether some attention on sequences may be sharded along them."""
    return any(op.positions is not None and can_cut_context(op) for op in operators_of(graph).values())


def can_cut_context(operator: Operator) -> bool:
    """Whether queries and keys of the call may be sharded together along the sequence, with an exchange of keys."""
    return any(joint.lowering in EXCHANGES for joint in operator.rule.joints.values())


def _axis_choices(operator: Operator, axis: str, size: int) -> list[AxisOption]:
    """Return the options of one axis by its role.

    A data axis that can shard the batch does nothing else. Whatever costs the same on two data-parallel ranks as on
    many is a shard (see planning/solved_layers.py); a partial weight with the whole batch is not. Expert layers and
    calls that compute their weights are sharded by expert on `ep`, and only there; other calls on tensors sorted by
    expert may be.
    """
    kind = AXES[axis]
    if kind.cuts_sequence:
        return _context_choices(operator, size)
    batch = operator.batch
    sections = dict(operator.sections)
    positions = operator.positions if _has_tokens(operator) else None
    for factor, count in (dim for dim in (batch, positions) if dim and dim[1] > 1):
        sections[factor] = (*sections.get(factor, ()), count)
    options = axis_options(operator.rule, size, operator.inputs, operator.node.outputs, sections)
    batch_label = None if batch is None else label_of(*batch)
    is_batch = [option.label.split("/")[0] == batch[0] if batch else False for option in options]
    routed = [option for option in options if option.label == ROWS_AND_EXPERTS]
    if kind.cuts_batch and kind.cuts_experts and (routed or operator.experts):
        return routed or [option for option in options if option.label == operator.experts]
    if not kind.cuts_batch:
        name = ROWS_AND_EXPERTS if operator.node.op == EXPERT_LINEAR else positions[0] if positions else ""
        tokens = label_of(name, positions[1]) if positions else None
        joint = [o.lowering != HALO and operator.rule.joint(o.label) is not None for o in options]
        barred = [in_batch or is_joint for in_batch, is_joint in zip(is_batch, joint, strict=True)]
        return [o for o, is_barred in zip(options, barred, strict=True) if not is_barred or o.label == tokens]
    kept = {batch_label} if any(option.label == batch_label for option in options) else set(UNCUT)
    if kind.cuts_experts and operator.by_expert is not None:
        kept.add(operator.by_expert)
    return [option for option in options if option.label in kept]


def _context_choices(operator: Operator, size: int) -> list[AxisOption]:
    """Return the options of `cp`.

    Positions of sequences are sharded. Calls whose positions cannot be sharded take any factor except the batch. Calls
    without positions are not sharded, but a recurrence shards the channels or heads that it produces. Attention
    exchanges keys, or shards heads instead (S. A. Jacobs et al., "DeepSpeed Ulysses" (2023)). Experts are sharded with
    their rows, or whole on every rank.
    """
    rule = operator.rule
    batch = operator.batch[0] if operator.batch else None
    if operator.positions is None:
        options = axis_options(rule, size, operator.inputs, operator.node.outputs, operator.sections)
        if operator.after_positions:
            cut = [o for o in options if rule.joint(o.label) is None and o.label.split("/")[0] != batch]
            return [o for o in cut if o.label == "R" or all(p.is_shard for p in o.outputs)]
        return [option for option in options if option.label in (*UNCUT, operator.experts)]
    factor, count = operator.positions
    stripe = size * operator.position_size
    if operator.is_striped and rule.sizes[factor] % (count * stripe) == 0:
        count = rule.sizes[factor] // stripe
    options = axis_options(rule, size, operator.inputs, operator.node.outputs, {factor: (count,)})
    label = label_of(factor, count)
    joint = [o for o in options if (exchange := rule.joint(o.label)) and exchange.is_striped == operator.is_striped]
    if can_cut_context(operator):
        return joint + [o for o in options if o.label in HEADS] or [options[0]]
    cut = [option for option in options if option.label in (label, label_of(ROWS_AND_EXPERTS, count))]
    others = [o for o in options if rule.joint(o.label) is None and o.label.split("/")[0] not in (batch, factor)]
    return cut or others


def _has_tokens(operator: Operator) -> bool:
    """Whether the call is in a scope with experts, and its rows are positions, of one sequence or with the batch."""
    batch, positions = operator.batch, operator.positions
    return operator.beside_experts and positions is not None and (batch is None or batch[0] == positions[0])


def placement_choices(meta: TensorMeta, offered: Iterable[Placements], mesh: Mesh) -> tuple[Placements, ...]:
    """Return all combinations of the per-axis placements in `offered` that divide, in a fixed order."""
    per_axis: list[list[Placement]] = []
    for axis in range(len(mesh.axes)):
        seen = sorted({placements[axis] for placements in offered})
        per_axis.append([p for p in seen if meta.requires_grad or p != Rp] or [R])
    return tuple(c for c in itertools.product(*per_axis) if divides(meta.shape, c, mesh.sizes))


def num_local(meta: TensorMeta, placements: Placements, mesh: Mesh) -> int:
    """Count the elements of one rank's shard."""
    ways = math.prod([n for p, n in zip(placements, mesh.sizes, strict=True) if p.kind == "S"])
    return meta.numel // ways
