"""Rules of a user's `torch.autograd.Function`: forward and backward are traced into calls whose rules say what to
shard.

A dim is sharded if two conditions are met. Every call on a rank's shard is the call that a rule gives for that shard.
And results and gradients are shards of the whole ones, or, for operands without the dim, partial sums. All numbers of
ranks that divide a size are tried, so that decisions that depend on the size show as well. Nothing is sharded if
backward is not linear in its gradients, or if a call has no rule.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.ir.graph import Node, Ref, TensorMeta, base_name, has_gradients
from autopar.ir.operators import arguments_of, calls_of
from autopar.ir.placement import P, Placement, R, S, local_shape
from autopar.operators.traits import CREATED, FILLS
from autopar.rules.call import Call, Operand, make_rule, packet_name
from autopar.rules.families.pointwise import CASTS
from autopar.rules.localize import local_call
from autopar.rules.rule import AxisOption, Rule, axis_options
from codegen.functions import applied, function_of

Metas = tuple[TensorMeta, ...]
Dims = Sequence[int | None]
RuleOf = Callable[[Node, Metas], Rule | None]

_GRADIENTS = torch.autograd.grad  # bound before a trace can replace it

_BACKWARDS = {
    op: run
    for op, run in decomposition_table.items()
    if isinstance(op, torch._ops.OpOverload) and "backward" in str(op)
}
"""Backward operators have no rules; the operators they decompose into do."""

_MOST_RANKS = 64
"""All divisors of a dim up to this number of ranks are tried, and one row per rank."""

_CASTS = tuple(f"aten.{name}" for name in CASTS)


def function_rule(call: Call, rule_of: RuleOf) -> Rule | None:
    """Return a factor for each dim of the first result that may be sharded; None if there is none."""
    arguments = tuple(call.arguments.values())
    placed = tuple(("tensor", value.index) if isinstance(value, Operand) else value for value in arguments)
    dims = _cut_dims(rule_of, call.node.op, placed, call.inputs, call.outputs)
    if not dims:
        return None
    sizes: dict[str, int] = {}

    def groups(meta: TensorMeta) -> list[list[str]]:
        dims_of_meta: list[list[str]] = []
        for dim, size in enumerate(meta.shape):
            factor = next((f"d{d}" for d in dims if _dim_of(meta, call.outputs[0], d) == dim), f"k{len(sizes)}")
            sizes[factor] = size
            dims_of_meta.append([factor])
        return dims_of_meta

    inputs, outputs = [groups(meta) for meta in call.inputs], [groups(meta) for meta in call.outputs]
    return make_rule(call, inputs, outputs, sizes, blocked=[factor for factor in sizes if factor.startswith("k")])


def _dim_of(meta: TensorMeta, whole: TensorMeta, dim: int) -> int | None:
    """Return the dim of `meta` that corresponds to one of `whole`, whose first or last dims it has."""
    rank, more = len(meta.shape), len(whole.shape) - len(meta.shape)
    if more < 0:
        return None
    starts = all(a == b for a, b in zip(meta.shape, whole.shape, strict=False))
    matching = dim if starts else dim - more
    return matching if 0 <= matching < rank and meta.shape[matching] == whole.shape[dim] else None


@lru_cache(maxsize=256)
def _cut_dims(rule_of: RuleOf, op: str, placed: tuple[Any, ...], inputs: Metas, outputs: Metas) -> tuple[int, ...]:
    """Return the dims of the first result that may be sharded, each alone and all together."""
    cut_dims: list[int] = []
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        whole = _Traced.of(op, placed, inputs, outputs)
        if whole is None or not whole.is_linear(rule_of):
            return ()
        cut = whole  # in the end sharded along all dims found
        for dim, size in enumerate(outputs[0].shape):
            ins, outs = ([_dim_of(meta, outputs[0], dim) for meta in metas] for metas in (inputs, outputs))
            if size < 2 or None in outs or all(dim_in is None for dim_in in ins):
                continue
            numbers = [n for n in range(2, _MOST_RANKS) if size % n == 0]
            if all(whole.can_cut(rule_of, ins, outs, n) for n in {*numbers, size}) and (
                cut is whole or cut.can_cut(rule_of, ins, outs, size)
            ):
                cut_dims.append(dim)
                cut = cut.part(ins, outs, size) or whole
    return tuple(cut_dims)


@dataclass(frozen=True, slots=True)
class _Traced:
    """Forward and backward of a Function as calls.

    metas: of all values. arguments: the operands, then gradients of the outputs. results: forward's, then the operands'
    gradients (None: no gradient). constants: tensors that the Function creates or stores.
    """

    op: str
    placed: tuple[Any, ...]
    inputs: Metas
    outputs: Metas
    nodes: tuple[Node, ...]
    metas: Mapping[Ref, TensorMeta]
    arguments: tuple[Ref, ...]
    results: tuple[Ref | None, ...]
    constants: Mapping[Ref, Tensor]

    @classmethod
    def of(cls, op: str, placed: tuple[Any, ...], inputs: Metas, outputs: Metas) -> _Traced | None:
        """Trace the Function; return None if forward and backward cannot be traced for these shapes."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [torch.empty(meta.shape, dtype=meta.dtype) for meta in (*inputs, *outputs)]
            try:
                joint = calls_of(_joint(op, placed, inputs), tensors, _BACKWARDS)
            except Exception:  # the user's code may raise anything for these shapes; then it is not sharded
                return None
        joint.graph.eliminate_dead_code()
        values: dict[torch.fx.Node, Any] = {}
        metas: dict[Ref, TensorMeta] = {}
        constants: dict[Ref, Tensor] = {}
        arguments: list[Ref] = []
        nodes: list[Node] = []
        for node in joint.graph.nodes:
            args, kwargs = _with_values((node.args, tuple(node.kwargs.items())), values)
            if node.op == "output":
                return cls(
                    op=op,
                    placed=placed,
                    inputs=inputs,
                    outputs=outputs,
                    nodes=tuple(nodes),
                    metas=metas,
                    arguments=tuple(arguments),
                    results=args[0],
                    constants=constants,
                )
            if node.target is operator.getitem:
                values[node] = args[0][args[1]]
                continue
            value = node.meta["val"] if node.op != "get_attr" else getattr(joint, node.target)
            value = tuple(value) if isinstance(value, tuple | list) else value
            metas_of_value = tuple(
                TensorMeta(tuple(tensor.shape), tensor.dtype)
                for tensor in (value if isinstance(value, tuple) else (value,))
            )
            refs = tuple(Ref(node.name, i) for i in range(len(metas_of_value)))
            values[node] = refs if isinstance(value, tuple) else refs[0]
            metas |= zip(refs, metas_of_value, strict=True)
            if node.op == "call_function":
                nodes.append(Node(node.name, str(node.target), args, kwargs, outputs=metas_of_value))
            elif node.op == "get_attr":
                constants[refs[0]] = getattr(joint, node.target)
            else:
                arguments += refs
        raise AssertionError("a graph without an output")

    def part(self, ins: Dims, outs: Dims, number: int) -> _Traced | None:
        """Trace the Function on one of `number` ranks, with each tensor sharded along its dim; None if that fails."""
        return self.of(self.op, self.placed, _cut(self.inputs, ins, number), _cut(self.outputs, outs, number))

    def can_cut(self, rule_of: RuleOf, ins: Dims, outs: Dims, number: int) -> bool:
        """Whether `number` ranks with shards along these dims compute shards of the whole's results."""
        part = self.part(ins, outs, number)
        if part is None:
            return False
        cut = [meta.shape[dim] for meta, dim in zip(self.outputs, outs, strict=True) if dim is not None]
        for sections in (1, 2):
            argument_places = [R if dim is None else S(dim, sections) for dim in (*ins, *outs)]
            result_places = [
                *argument_places[len(ins) :],
                *(P if place == R else place for place in argument_places[: len(ins)]),
            ]
            divides = all(size % (number * sections) == 0 for size in cut)
            if divides and not self._has(rule_of, part, argument_places, result_places, number):
                return False
        return True

    def _has_constants(self, part: _Traced) -> bool:
        """Whether the Function's own tensors are the same on a rank."""
        return self.constants.keys() == part.constants.keys() and all(
            value.dtype == part.constants[ref].dtype and torch.equal(value, part.constants[ref])
            for ref, value in self.constants.items()
        )

    def is_linear(self, rule_of: RuleOf) -> bool:
        """Whether partial sums of the results' gradients give partial sums of the operands' gradients."""
        argument_places = [*(R for _ in self.inputs), *(P for _ in self.outputs)]
        return self._has(rule_of, self, argument_places, [None] * len(self.outputs) + [P] * len(self.inputs), 2)

    def _has(
        self,
        rule_of: RuleOf,
        part: _Traced,
        argument_places: Sequence[Placement],
        result_places: Sequence[Placement | None],
        number: int,
    ) -> bool:
        """Whether the calls of `part` are those of one of `number` ranks and give the results these placements."""
        if len(self.nodes) != len(part.nodes) or self.results != part.results or not self._has_constants(part):
            return False
        places = {ref: frozenset((R,)) for ref in self.constants}
        places |= {ref: frozenset((place,)) for ref, place in zip(self.arguments, argument_places, strict=True)}
        for node, part_node in zip(self.nodes, part.nodes, strict=True):
            output_places = _placements(
                node, part_node, tuple(self.metas[ref] for ref in node.inputs), places, number, rule_of
            )
            for i in range(len(node.outputs)):
                places[Ref(node.name, i)] = frozenset(places_of[i] for places_of in output_places)
        pairs = zip(self.results, result_places, strict=True)
        return all(ref is None or wanted is None or wanted in places[ref] for ref, wanted in pairs)


def _with_values(value: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
    """Return the same nested structure, in tuples, with every node replaced by its value."""
    if isinstance(value, torch.fx.Node):
        return values[value]
    return tuple(_with_values(item, values) for item in value) if isinstance(value, tuple | list) else value


def _joint(op: str, placed: tuple[Any, ...], inputs: Metas) -> Callable[..., list[Tensor | None]]:
    """Return a function: (operands, gradients of the results) -> results, the operands' gradients."""
    user_function = function_of(op)
    assert user_function is not None

    def run(*tensors: Tensor) -> list[Tensor | None]:
        pairs = zip(tensors, inputs, strict=False)
        leaves = [x.detach().requires_grad_(meta.requires_grad and has_gradients(x.dtype)) for x, meta in pairs]
        args = [leaves[value[1]] if isinstance(value, tuple) else value for value in placed]
        output = applied(user_function.function, *user_function.given(args))
        results = output if isinstance(output, tuple) else (output,)
        ends = [(y, g) for y, g in zip(results, tensors[len(inputs) :], strict=True) if y.requires_grad]
        trained = [x for x in leaves if x.requires_grad]
        gradients: Any = [None] * len(trained)
        if ends and trained:
            differentiated, incoming = zip(*ends, strict=True)
            gradients = _GRADIENTS(differentiated, trained, incoming, allow_unused=True)
        remaining = iter(gradients)
        return [*results, *(next(remaining) if x.requires_grad else None for x in leaves)]

    return run


def _cut(metas: Metas, dims: Dims, number: int) -> Metas:
    """Return the metas of one of `number` ranks, each sharded along its dim (None: whole)."""
    pairs = zip(metas, dims, strict=True)
    return tuple(
        meta if dim is None else replace(meta, shape=local_shape(meta.shape, (S(dim),), (number,)))
        for meta, dim in pairs
    )


def _placements(
    node: Node,
    part_node: Node,
    inputs: Metas,
    places: Mapping[Ref, frozenset[Placement]],
    number: int,
    rule_of: RuleOf,
) -> list[tuple[Placement, ...]]:
    """List possible output placements on `number` ranks that call `part_node`; empty if no rule allows it."""
    rule = rule_of(node, inputs)
    whole = AxisOption("R", (R,) * len(inputs), (R,) * len(node.outputs))
    options: tuple[AxisOption, ...] = (whole,)
    if rule is not None and "*" not in rule.lowerings:
        counts = {place.sections for ref in node.inputs for place in places[ref] if place.is_shard} | {2}
        options = axis_options(rule, number, inputs, node.outputs, {f: tuple(counts) for f in rule.sizes})
    if packet_name(node.op) in _CASTS and node.outputs[0].dtype.is_floating_point:
        options = (*options, AxisOption("P", (P,), (P,)))  # gradients are also summed in the dtype of their parts
    allowed = [places[ref] for ref in node.inputs]
    if base_name(node.op) in CREATED:  # these do not read their operands
        allowed = [may | {R} if P in may else may for may in allowed]
    placements = []
    for option in options:
        if option.lowering or any(place not in may for place, may in zip(option.inputs, allowed, strict=True)):
            continue
        call = local_call(node, rule, (option,), inputs, (number,))
        shapes = tuple(
            local_shape(meta.shape, (place,), (number,))
            for meta, place in zip(node.outputs, option.outputs, strict=True)
        )
        is_own = (call.op, call.args, call.kwargs) == (part_node.op, part_node.args, part_node.kwargs)
        if is_own and shapes == tuple(meta.shape for meta in part_node.outputs):
            placements.append(option.outputs)
            if _is_zero(node):
                placements.append((P,))
    return placements


def _is_zero(node: Node) -> bool:
    """Whether a call creates zeros, which are the sum of zeros over ranks."""
    fill = FILLS.get(base_name(node.op))
    return (arguments_of(node)[fill] if isinstance(fill, str) else fill) == 0
