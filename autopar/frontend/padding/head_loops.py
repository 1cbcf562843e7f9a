"""Follow heads from a call of attention to all tensors that grow with them, and to the contents of the padding.

The operators' rules say which dims are one loop. So heads are followed to the weights that make them and to those that
take them in. Every call on the way is of a kind that is known to keep heads apart.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.ir.graph import Node, Ref, TensorMeta, base_name, map_refs
from autopar.ir.operators import arguments_of
from autopar.operators.schemas import find_op
from autopar.operators.traits import ADDED, ATTENTION, FINITE_EVERYWHERE, LINEAR_PRODUCTS, MOVING, REPEATS
from autopar.rules.families.pointwise import LINEAR, NONLINEAR
from autopar.rules.registry import rule_for
from autopar.rules.rule import Dims, Rule

NORMS = frozenset({"layer_norm", "rms_norm"})
SUMS = frozenset({"mean", "sum"})
POINTWISE = frozenset({*LINEAR, *NONLINEAR}) - MOVING - {"dropout"}


@dataclass(frozen=True, slots=True)
class Longer:
    """A dim with padding: `outer` sections of `units` runs of `inner` entries, and `more` runs of padding after each
    section.
    """

    dim: int
    outer: int
    units: int
    inner: int
    more: int

    @property
    def section(self) -> int:
        """The entries of a section with its padding."""
        return (self.units + self.more) * self.inner

    def lengthened(self, meta: TensorMeta) -> TensorMeta:
        """Return the meta with padding."""
        shape = (*meta.shape[: self.dim], self.outer * self.section, *meta.shape[self.dim + 1 :])
        return replace(meta, shape=shape)


@dataclass(frozen=True, slots=True)
class Scope:
    """Calls of the top level or of a class of layers.

    parameters: those that no other scope reads. metas: of all tensors. leaving: names read outside.
    """

    nodes: Sequence[Node]
    parameters: frozenset[Ref]
    metas: Mapping[Ref, TensorMeta]
    leaving: Collection[Ref]
    results: frozenset[Ref] = field(init=False, repr=False)
    touching: Mapping[Ref, Sequence[Node]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        touching: dict[Ref, list[Node]] = {}
        for node in self.nodes:
            for ref in dict.fromkeys((*node.inputs, *_results(node))):
                touching.setdefault(ref, []).append(node)
        object.__setattr__(self, "touching", touching)
        object.__setattr__(self, "results", frozenset(ref for node in self.nodes for ref in _results(node)))

    def reached(self, start: Ref, longer: Longer) -> dict[Ref, Longer] | None:
        """Return all tensors that grow with a tensor; None where a call might use the padding."""
        longer_dims, open_refs = {start: longer}, [start]
        while open_refs:
            ref = open_refs.pop()
            is_ours = ref not in self.leaving and (ref in self.parameters or ref in self.results)
            if not is_ours or not self.metas[ref].dtype.is_floating_point:
                return None
            for node in self.touching[ref]:
                with_it = self._with(node, ref, longer_dims[ref])
                if with_it is None or any(longer_dims.get(changed, other) != other for changed, other in with_it):
                    return None
                open_refs += [changed for changed, _ in with_it if changed not in longer_dims]
                longer_dims |= dict(with_it)
        return longer_dims

    def _with(self, node: Node, ref: Ref, longer: Longer) -> list[tuple[Ref, Longer]] | None:
        """Return the operands and results of a call that grow with one of them; None for a call that mixes heads."""
        name, rule = base_name(node.op), rule_for(node, tuple(self.metas[tensor_ref] for tensor_ref in node.inputs))
        is_known = name in MOVING | LINEAR_PRODUCTS | NORMS | SUMS | POINTWISE | ATTENTION | {"softmax"}
        if rule is None or not is_known:
            return None
        consumed, produced = (
            [*zip(node.inputs, rule.inputs, strict=True)],
            [*zip(_results(node), rule.outputs, strict=True)],
        )
        loops = {
            _loop(rule, dims[longer.dim], longer) for tensor_ref, dims in (*consumed, *produced) if tensor_ref == ref
        }
        loop = loops.pop()
        if loop is None or loops:
            return None
        factor, inside = loop
        with_it = [(tensor_ref, _placed(rule, dims, factor, inside)) for tensor_ref, dims in (*consumed, *produced)]
        longer_ones = [(tensor_ref, other) for tensor_ref, other in with_it if other is not None]
        is_taken = any(other for _, other in with_it[: len(consumed)])
        is_made = any(other for _, other in with_it[len(consumed) :])
        is_kept = factor not in rule.blocked and (is_taken or name in REPEATS) and (is_made or name in LINEAR_PRODUCTS)
        # One tensor as two operands: x @ x.T
        is_clear = len({tensor_ref for tensor_ref, _ in longer_ones}) == len(set(longer_ones)) and not any(
            other is None and any(tensor_ref == one for one, _ in longer_ones) for tensor_ref, other in with_it
        )
        return longer_ones if is_kept and is_clear else None


def _results(node: Node) -> list[Ref]:
    return [Ref(node.name, index) for index in range(len(node.outputs))]


def _loop(rule: Rule, dim: Sequence[str], longer: Longer) -> tuple[str, Longer] | None:
    """Return the factor of a dim that has the units, and their layout in it (dim -1)."""
    for position, factor in enumerate(dim):
        before = math.prod(rule.sizes[inner] for inner in dim[:position])
        after = math.prod(rule.sizes[inner] for inner in dim[position + 1 :])
        outer, inner = longer.outer // before, longer.inner // after
        is_whole = (outer * before, inner * after) == (longer.outer, longer.inner)
        if is_whole and outer * longer.units * inner == rule.sizes[factor]:
            return factor, replace(longer, dim=-1, outer=outer, inner=inner)
    return None


def _placed(rule: Rule, dims: Dims, factor: str, inside: Longer) -> Longer | None:
    """Return how a tensor with `dims` grows with a factor; None if it lacks the factor."""
    for number, dim in enumerate(dims):
        if factor in dim:
            position = dim.index(factor)
            before = math.prod(rule.sizes[inner_factor] for inner_factor in dim[:position])
            after = math.prod(rule.sizes[inner_factor] for inner_factor in dim[position + 1 :])
            return replace(inside, dim=number, outer=before * inside.outer, inner=inside.inner * after)
    return None


class Unproven(Exception):
    """A call whose padding might be nan."""


def not_zero(scope: Scope, longer_dims: Mapping[Ref, Longer]) -> set[tuple[str, Ref]] | None:
    """Return (call, tensor) of all padding that is summed over and not known to be zero, if padding of parameters is
    zero.

    None where a value or a derivative in the padding might not be finite. With zeros in all such sums, padding changes
    no loss and no gradient but its own, which is 0: sums over heads send nothing back to padding, and each call before
    them treats one head and has finite derivatives.
    """
    fillings: dict[Ref, float | None] = {ref: 0.0 for ref in longer_dims if ref in scope.parameters}
    summed: set[tuple[str, Ref]] = set()
    for node in scope.nodes:
        results = [ref for ref in _results(node) if ref in longer_dims]
        if results:
            try:
                fillings |= dict.fromkeys(results, _filling(node, fillings))
            except Unproven:
                return None
        else:
            summed |= {(node.name, ref) for ref in node.inputs if ref in longer_dims and fillings[ref] != 0.0}
    return summed


def _filling(node: Node, fillings: Mapping[Ref, float | None]) -> float | None:
    """Return the number that fills the padding of a call's results; None for finite unknown numbers."""
    name, arguments = base_name(node.op), arguments_of(node)
    operands = [fillings[ref] for ref in node.inputs if ref in fillings]
    same = operands[0] if len(set(operands)) == 1 else None
    if name in ATTENTION:
        if arguments.get("dropout_p"):  # whose masks are numbered by head
            raise Unproven
        return 0.0 if fillings.get(arguments["value"]) == 0.0 else None
    if name in LINEAR_PRODUCTS:
        added = arguments.get(ADDED.get(name, ""))
        factors = [fillings.get(ref) for ref in node.inputs if ref != added]
        return 0.0 if 0.0 in factors and (added is None or fillings.get(added) == 0.0) else None
    if name in NORMS:
        if arguments.get("eps") == 0:
            raise Unproven
        return same if same == 0.0 and arguments.get("bias") is None else None
    if name in SUMS:
        return same if same == 0.0 or name == "mean" else None
    return same if name in MOVING else _pointwise(node, name, arguments, fillings)


def _pointwise(
    node: Node, name: str, arguments: Mapping[str, Any], fillings: Mapping[Ref, float | None]
) -> float | None:
    numbers = [fillings.get(ref) for ref in node.inputs]
    if None not in numbers and name != "softmax":
        return _at(node, [number for number in numbers if number is not None])
    is_scaled = name == "div" and isinstance(arguments["other"], int | float) and arguments["other"] != 0
    if name not in FINITE_EVERYWHERE and name != "softmax" and not is_scaled:
        raise Unproven
    return 0.0 if name == "mul" and 0.0 in numbers else None


def _at(node: Node, numbers: Sequence[float]) -> float:
    """Return a pointwise call of numbers; raise Unproven if it or a derivative is not finite."""
    op = find_op(node.op)
    if op is None:
        raise Unproven
    tensors = [torch.tensor(number, dtype=node.meta.dtype, requires_grad=True) for number in numbers]
    tensors_left: Iterator[torch.Tensor] = iter(tensors)
    args, kwargs = map_refs((node.args, tuple(node.kwargs)), lambda _: next(tensors_left))
    value = op(*args, **dict(kwargs))
    slopes = torch.autograd.grad(value, tensors, allow_unused=True) if value.requires_grad else ()
    if not all(result.isfinite() for result in (value, *slopes) if result is not None):
        raise Unproven
    return float(value.detach())
