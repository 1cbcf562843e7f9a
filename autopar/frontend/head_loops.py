"""What becomes longer with the heads of one call of attention, and what stands in the padding.

The operators' rules say which dims are one loop, so that heads are followed from a call of attention to the weights
that make them and to those that take them in. Every call on the way is of a kind that is known to keep heads apart.
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
from autopar.rules.pointwise import LINEAR, NONLINEAR
from autopar.rules.registry import rule_for
from autopar.rules.rule import Dims, Rule

NORMS = frozenset({"layer_norm", "rms_norm"})
SUMS = frozenset({"mean", "sum"})
POINTWISE = frozenset({*LINEAR, *NONLINEAR}) - MOVING - {"dropout"}


@dataclass(frozen=True, slots=True)
class Longer:
    """A dim has `outer` sections of `units` runs of `inner` entries; `more` runs of padding follow those of each."""

    dim: int
    outer: int
    units: int
    inner: int
    more: int

    @property
    def section(self) -> int:
        """Entries of a section with its padding."""
        return (self.units + self.more) * self.inner

    def lengthened(self, meta: TensorMeta) -> TensorMeta:
        """The meta with padding."""
        shape = (*meta.shape[: self.dim], self.outer * self.section, *meta.shape[self.dim + 1 :])
        return replace(meta, shape=shape)


@dataclass(frozen=True, slots=True)
class Scope:
    """Calls of the top level or of a class of layers.

    parameters: those that nothing else reads. metas: of all tensors. leaving: what is read outside.
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
        """All that is longer with a tensor; None where padding meets what might see it."""
        found, open_refs = {start: longer}, [start]
        while open_refs:
            ref = open_refs.pop()
            is_ours = ref not in self.leaving and (ref in self.parameters or ref in self.results)
            if not is_ours or not self.metas[ref].dtype.is_floating_point:
                return None
            for node in self.touching[ref]:
                with_it = self._with(node, ref, found[ref])
                if with_it is None or any(found.get(each, other) != other for each, other in with_it):
                    return None
                open_refs += [each for each, _ in with_it if each not in found]
                found |= dict(with_it)
        return found

    def _with(self, node: Node, ref: Ref, longer: Longer) -> list[tuple[Ref, Longer]] | None:
        """What a call takes and makes that is longer with one of them; None for a call that mixes heads."""
        name, rule = base_name(node.op), rule_for(node, tuple(self.metas[each] for each in node.inputs))
        is_known = name in MOVING | LINEAR_PRODUCTS | NORMS | SUMS | POINTWISE | ATTENTION | {"softmax"}
        if rule is None or not is_known:
            return None
        taken, made = [*zip(node.inputs, rule.inputs, strict=True)], [*zip(_results(node), rule.outputs, strict=True)]
        loops = {_loop(rule, dims[longer.dim], longer) for each, dims in (*taken, *made) if each == ref}
        loop = loops.pop()
        if loop is None or loops:
            return None
        factor, inside = loop
        with_it = [(each, _placed(rule, dims, factor, inside)) for each, dims in (*taken, *made)]
        longer_ones = [(each, other) for each, other in with_it if other is not None]
        is_taken = any(other for _, other in with_it[: len(taken)])
        is_made = any(other for _, other in with_it[len(taken) :])
        is_kept = factor not in rule.blocked and (is_taken or name in REPEATS) and (is_made or name in LINEAR_PRODUCTS)
        # One tensor in two roles: x @ x.T
        is_clear = len({each for each, _ in longer_ones}) == len(set(longer_ones)) and not any(
            other is None and any(each == one for one, _ in longer_ones) for each, other in with_it
        )
        return longer_ones if is_kept and is_clear else None


def _results(node: Node) -> list[Ref]:
    return [Ref(node.name, index) for index in range(len(node.outputs))]


def _loop(rule: Rule, dim: Sequence[str], longer: Longer) -> tuple[str, Longer] | None:
    """The factor of a dim that has the units, and how they lie in it (dim -1)."""
    for position, factor in enumerate(dim):
        before = math.prod(rule.sizes[each] for each in dim[:position])
        after = math.prod(rule.sizes[each] for each in dim[position + 1 :])
        outer, inner = longer.outer // before, longer.inner // after
        is_whole = (outer * before, inner * after) == (longer.outer, longer.inner)
        if is_whole and outer * longer.units * inner == rule.sizes[factor]:
            return factor, replace(longer, dim=-1, outer=outer, inner=inner)
    return None


def _placed(rule: Rule, dims: Dims, factor: str, inside: Longer) -> Longer | None:
    """How a tensor with `dims` is longer with a factor; None if it lacks the factor."""
    for number, dim in enumerate(dims):
        if factor in dim:
            position = dim.index(factor)
            before = math.prod(rule.sizes[each] for each in dim[:position])
            after = math.prod(rule.sizes[each] for each in dim[position + 1 :])
            return replace(inside, dim=number, outer=before * inside.outer, inner=inside.inner * after)
    return None


class Unproven(Exception):
    """A call for which padding might be no number."""


def not_zero(scope: Scope, found: Mapping[Ref, Longer]) -> set[tuple[str, Ref]] | None:
    """(call, tensor) of all whose padding is summed over and not known to be zeros, given that of parameters is zeros.

    None where a value or a derivative in the padding might not be finite. With zeros in all that such sums take, no
    loss and no gradient but those of padding itself are other than without it, and those are 0: sums over heads send
    nothing back to padding, and each call before them is of one head and has finite derivatives.
    """
    known: dict[Ref, float | None] = {ref: 0.0 for ref in found if ref in scope.parameters}
    summed: set[tuple[str, Ref]] = set()
    for node in scope.nodes:
        results = [ref for ref in _results(node) if ref in found]
        if results:
            try:
                known |= dict.fromkeys(results, _filling(node, known))
            except Unproven:
                return None
        else:
            summed |= {(node.name, ref) for ref in node.inputs if ref in found and known[ref] != 0.0}
    return summed


def _filling(node: Node, known: Mapping[Ref, float | None]) -> float | None:
    """The number that all padding of a call's results is; None for finite ones that are not known."""
    name, arguments = base_name(node.op), arguments_of(node)
    taken = [known[ref] for ref in node.inputs if ref in known]
    same = taken[0] if len(set(taken)) == 1 else None
    if name in ATTENTION:
        if arguments.get("dropout_p"):  # whose masks are numbered by head
            raise Unproven
        return 0.0 if known.get(arguments["value"]) == 0.0 else None
    if name in LINEAR_PRODUCTS:
        added = arguments.get(ADDED.get(name, ""))
        factors = [known.get(ref) for ref in node.inputs if ref != added]
        return 0.0 if 0.0 in factors and (added is None or known.get(added) == 0.0) else None
    if name in NORMS:
        if arguments.get("eps") == 0:
            raise Unproven
        return same if same == 0.0 and arguments.get("bias") is None else None
    if name in SUMS:
        return same if same == 0.0 or name == "mean" else None
    return same if name in MOVING else _pointwise(node, name, arguments, known)


def _pointwise(node: Node, name: str, arguments: Mapping[str, Any], known: Mapping[Ref, float | None]) -> float | None:
    numbers = [known.get(ref) for ref in node.inputs]
    if None not in numbers and name != "softmax":
        return _at(node, [each for each in numbers if each is not None])
    is_scaled = name == "div" and isinstance(arguments["other"], int | float) and arguments["other"] != 0
    if name not in FINITE_EVERYWHERE and name != "softmax" and not is_scaled:
        raise Unproven
    return 0.0 if name == "mul" and 0.0 in numbers else None


def _at(node: Node, numbers: Sequence[float]) -> float:
    """A pointwise call of numbers; Unproven where it or a derivative is not finite."""
    op = find_op(node.op)
    if op is None:
        raise Unproven
    tensors = [torch.tensor(number, dtype=node.meta.dtype, requires_grad=True) for number in numbers]
    given: Iterator[torch.Tensor] = iter(tensors)
    args, kwargs = map_refs((node.args, tuple(node.kwargs)), lambda _: next(given))
    value = op(*args, **dict(kwargs))
    slopes = torch.autograd.grad(value, tensors, allow_unused=True) if value.requires_grad else ()
    if not all(each.isfinite() for each in (value, *slopes) if each is not None):
        raise Unproven
    return float(value.detach())
