"""A user's `torch.autograd.Function`: forward and backward are traced into calls that have rules, and cut by those.

A dim is cut where every call of a rank's part is the call that a rule gives for that part, and the parts of results and
gradients are those of the whole: of operands that have the dim the parts', of those that have not the sum. All ranks'
numbers that a size divides into are tried, so that what the size decides shows, too. A Function whose backward is not
linear in its gradients keeps none, nor does one of a call without a rule.
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
from autopar.rules.localize import local_call
from autopar.rules.pointwise import CASTS
from autopar.rules.rule import AxisOption, Rule, axis_options
from codegen.functions import applied, function_of

Metas = tuple[TensorMeta, ...]
Dims = Sequence[int | None]
RuleOf = Callable[[Node, Metas], Rule | None]

_GRADIENTS = torch.autograd.grad  # as it is where a trace has not replaced it

_BACKWARDS = {
    op: run
    for op, run in decomposition_table.items()
    if isinstance(op, torch._ops.OpOverload) and "backward" in str(op)
}
"""Backward operators have no rules: what they are made of has."""

_MOST_RANKS = 64
"""Up to so many ranks, and for one row each, all numbers that divide a dim are tried."""

_CASTS = tuple(f"aten.{name}" for name in CASTS)


def function_rule(call: Call, rule_of: RuleOf) -> Rule | None:
    """A factor for each dim of the first result that may be cut; None where there is none."""
    arguments = tuple(call.arguments.values())
    placed = tuple(("tensor", value.index) if isinstance(value, Operand) else value for value in arguments)
    dims = _cut_dims(rule_of, call.node.op, placed, call.inputs, call.outputs)
    if not dims:
        return None
    sizes: dict[str, int] = {}

    def groups(meta: TensorMeta) -> list[list[str]]:
        found: list[list[str]] = []
        for dim, size in enumerate(meta.shape):
            factor = next((f"d{d}" for d in dims if _dim_of(meta, call.outputs[0], d) == dim), f"k{len(sizes)}")
            sizes[factor] = size
            found.append([factor])
        return found

    inputs, outputs = [groups(meta) for meta in call.inputs], [groups(meta) for meta in call.outputs]
    return make_rule(call, inputs, outputs, sizes, blocked=[factor for factor in sizes if factor.startswith("k")])


def _dim_of(meta: TensorMeta, whole: TensorMeta, dim: int) -> int | None:
    """The dim of `meta` that goes with one of `whole`: its first or its last dims are those of `whole`."""
    rank, more = len(meta.shape), len(whole.shape) - len(meta.shape)
    if more < 0:
        return None
    starts = all(a == b for a, b in zip(meta.shape, whole.shape, strict=False))
    found = dim if starts else dim - more
    return found if 0 <= found < rank and meta.shape[found] == whole.shape[dim] else None


@lru_cache(maxsize=256)
def _cut_dims(rule_of: RuleOf, op: str, placed: tuple[Any, ...], inputs: Metas, outputs: Metas) -> tuple[int, ...]:
    """The dims of the first result that may be cut, each by itself and all together."""
    found: list[int] = []
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        whole = _Traced.of(op, placed, inputs, outputs)
        if whole is None or not whole.is_linear(rule_of):
            return ()
        cut = whole  # along all that was found, to the end
        for dim, size in enumerate(outputs[0].shape):
            ins, outs = ([_dim_of(meta, outputs[0], dim) for meta in metas] for metas in (inputs, outputs))
            if size < 2 or None in outs or all(each is None for each in ins):
                continue
            numbers = [n for n in range(2, _MOST_RANKS) if size % n == 0]
            if all(whole.can_cut(rule_of, ins, outs, n) for n in {*numbers, size}) and (
                cut is whole or cut.can_cut(rule_of, ins, outs, size)
            ):
                found.append(dim)
                cut = cut.part(ins, outs, size) or whole
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Traced:
    """Forward and backward of a Function as calls.

    metas: of all values. arguments: the operands, then gradients of the outputs. results: forward's, then the operands'
    gradients (None: no gradient). constants: tensors that the Function makes or has.
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
        """None where forward and backward cannot be traced for these shapes."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [torch.empty(meta.shape, dtype=meta.dtype) for meta in (*inputs, *outputs)]
            try:
                joint = calls_of(_joint(op, placed, inputs), tensors, _BACKWARDS)
            except Exception:  # whatever the user's code raises for these shapes: it is not cut
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
            made = node.meta["val"] if node.op != "get_attr" else getattr(joint, node.target)
            made = tuple(made) if isinstance(made, tuple | list) else made
            found = tuple(
                TensorMeta(tuple(each.shape), each.dtype) for each in (made if isinstance(made, tuple) else (made,))
            )
            refs = tuple(Ref(node.name, i) for i in range(len(found)))
            values[node] = refs if isinstance(made, tuple) else refs[0]
            metas |= zip(refs, found, strict=True)
            if node.op == "call_function":
                nodes.append(Node(node.name, str(node.target), args, kwargs, outputs=found))
            elif node.op == "get_attr":
                constants[refs[0]] = getattr(joint, node.target)
            else:
                arguments += refs
        raise AssertionError("a graph without an output")

    def part(self, ins: Dims, outs: Dims, number: int) -> _Traced | None:
        """The Function on one of `number` ranks, each tensor cut along its dim; None where it cannot be traced."""
        return self.of(self.op, self.placed, _cut(self.inputs, ins, number), _cut(self.outputs, outs, number))

    def can_cut(self, rule_of: RuleOf, ins: Dims, outs: Dims, number: int) -> bool:
        """Whether `number` ranks with parts of all tensors, along their dims, have the parts of the whole's results."""
        part = self.part(ins, outs, number)
        if part is None:
            return False
        cut = [meta.shape[dim] for meta, dim in zip(self.outputs, outs, strict=True) if dim is not None]
        for sections in (1, 2):
            given = [R if dim is None else S(dim, sections) for dim in (*ins, *outs)]
            wanted = [*given[len(ins) :], *(P if place == R else place for place in given[: len(ins)])]
            divides = all(size % (number * sections) == 0 for size in cut)
            if divides and not self._has(rule_of, part, given, wanted, number):
                return False
        return True

    def _has_constants(self, part: _Traced) -> bool:
        """Whether what the Function makes of its own is the same on a rank."""
        return self.constants.keys() == part.constants.keys() and all(
            value.dtype == part.constants[ref].dtype and torch.equal(value, part.constants[ref])
            for ref, value in self.constants.items()
        )

    def is_linear(self, rule_of: RuleOf) -> bool:
        """Whether parts that sum to the results' gradients give parts that sum to the operands'."""
        given = [*(R for _ in self.inputs), *(P for _ in self.outputs)]
        return self._has(rule_of, self, given, [None] * len(self.outputs) + [P] * len(self.inputs), 2)

    def _has(
        self,
        rule_of: RuleOf,
        part: _Traced,
        given: Sequence[Placement],
        wanted: Sequence[Placement | None],
        number: int,
    ) -> bool:
        """Whether the calls of `part` are those of one of `number` ranks, and place the results as wanted."""
        if len(self.nodes) != len(part.nodes) or self.results != part.results or not self._has_constants(part):
            return False
        places = {ref: frozenset((R,)) for ref in self.constants}
        places |= {ref: frozenset((place,)) for ref, place in zip(self.arguments, given, strict=True)}
        for node, own in zip(self.nodes, part.nodes, strict=True):
            found = _placements(node, own, tuple(self.metas[ref] for ref in node.inputs), places, number, rule_of)
            for i in range(len(node.outputs)):
                places[Ref(node.name, i)] = frozenset(each[i] for each in found)
        pairs = zip(self.results, wanted, strict=True)
        return all(ref is None or want is None or want in places[ref] for ref, want in pairs)


def _with_values(value: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
    """The same nested structure, in tuples, with every node replaced by its value."""
    if isinstance(value, torch.fx.Node):
        return values[value]
    return tuple(_with_values(each, values) for each in value) if isinstance(value, tuple | list) else value


def _joint(op: str, placed: tuple[Any, ...], inputs: Metas) -> Callable[..., list[Tensor | None]]:
    """(operands, gradients of the results) -> results, the operands' gradients."""
    found = function_of(op)
    assert found is not None

    def run(*tensors: Tensor) -> list[Tensor | None]:
        pairs = zip(tensors, inputs, strict=False)
        leaves = [x.detach().requires_grad_(meta.requires_grad and has_gradients(x.dtype)) for x, meta in pairs]
        args = [leaves[value[1]] if isinstance(value, tuple) else value for value in placed]
        made = applied(found.function, *found.given(args))
        results = made if isinstance(made, tuple) else (made,)
        ends = [(y, g) for y, g in zip(results, tensors[len(inputs) :], strict=True) if y.requires_grad]
        wanted = [x for x in leaves if x.requires_grad]
        gradients: Any = [None] * len(wanted)
        if ends and wanted:
            differentiated, given = zip(*ends, strict=True)
            gradients = _GRADIENTS(differentiated, wanted, given, allow_unused=True)
        each = iter(gradients)
        return [*results, *(next(each) if x.requires_grad else None for x in leaves)]

    return run


def _cut(metas: Metas, dims: Dims, number: int) -> Metas:
    """The metas of one of `number` ranks, each cut along its own dim (None: whole)."""
    pairs = zip(metas, dims, strict=True)
    return tuple(
        meta if dim is None else replace(meta, shape=local_shape(meta.shape, (S(dim),), (number,)))
        for meta, dim in pairs
    )


def _placements(
    node: Node,
    own: Node,
    inputs: Metas,
    places: Mapping[Ref, frozenset[Placement]],
    number: int,
    rule_of: RuleOf,
) -> list[tuple[Placement, ...]]:
    """How the outputs may lie on `number` ranks where each calls `own` for `node`; none where no rule says so."""
    rule = rule_of(node, inputs)
    whole = AxisOption("R", (R,) * len(inputs), (R,) * len(node.outputs))
    options: tuple[AxisOption, ...] = (whole,)
    if rule is not None and "*" not in rule.lowerings:
        counts = {place.sections for ref in node.inputs for place in places[ref] if place.is_shard} | {2}
        options = axis_options(rule, number, inputs, node.outputs, {f: tuple(counts) for f in rule.sizes})
    if packet_name(node.op) in _CASTS and node.outputs[0].dtype.is_floating_point:
        options = (*options, AxisOption("P", (P,), (P,)))  # as sums of gradients in the type of their parts
    given = [places[ref] for ref in node.inputs]
    if base_name(node.op) in CREATED:  # which do not read what they take
        given = [may | {R} if P in may else may for may in given]
    found = []
    for option in options:
        if option.lowering or any(place not in may for place, may in zip(option.inputs, given, strict=True)):
            continue
        call = local_call(node, rule, (option,), inputs, (number,))
        shapes = tuple(
            local_shape(meta.shape, (place,), (number,))
            for meta, place in zip(node.outputs, option.outputs, strict=True)
        )
        is_own = (call.op, call.args, call.kwargs) == (own.op, own.args, own.kwargs)
        if is_own and shapes == tuple(meta.shape for meta in own.outputs):
            found.append(option.outputs)
            if _is_zero(node):
                found.append((P,))
    return found


def _is_zero(node: Node) -> bool:
    """Whether a call makes zeros, which are the sum of zeros over ranks."""
    fill = FILLS.get(base_name(node.op))
    return (arguments_of(node)[fill] if isinstance(fill, str) else fill) == 0
