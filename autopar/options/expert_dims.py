"""What of a scope runs over the experts of a mixture: their weights, products with these, and what lies by expert.

Rows that choose an expert each are multiplied by one call (`expert_linear`), which takes them in the order of the
tokens. Other mixtures have the rows of each expert together: a product of them [E, N, A] with weights [E, A, B], and
calls before and after it of tensors that have E too, as copies of the tokens, masks that say which token goes where,
and biases. A rank may have a run of the experts in all of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Node, Ref, base_name
from autopar.ir.placement import Placement, S
from autopar.operators.traits import BATCHED_PRODUCTS, MATMULS
from autopar.options.followed import Key, Rules, factor_of
from autopar.options.scopes import Scope
from autopar.rules.experts import EXPERT_LINEAR
from autopar.rules.rule import Dims, Rule, find_factor

BATCHED = BATCHED_PRODUCTS | {"einsum"}
"""Products that may have a matrix for each index of a dim."""


@dataclass(frozen=True, slots=True)
class ExpertDims:
    """Calls by name, with their factor over experts.

    weights: of experts, and what they are made of, down to parameters. makers: what makes weights, and the products of
    rows that lie by expert with them. others: all else of what lies so. num_experts: of each layer.
    """

    weights: frozenset[Ref]
    makers: Mapping[str, str]
    others: Mapping[str, str]
    num_experts: tuple[int, ...]


def expert_dims(
    scope: Scope, rules: Rules, held: Collection[str], positions: Mapping[Key, tuple[str, int]]
) -> ExpertDims:
    """held: the names of the scope's parameters. positions: of calls, the factor that runs over these."""
    layers = [node for node in scope.nodes if node.op == EXPERT_LINEAR]
    own = {node.name: rules[scope.name, node.name][0] for node in scope.nodes}
    along = {name: factor for (owner, name), (factor, _) in positions.items() if owner == scope.name}
    batched = _Batched(scope, own, held, along)
    weights = {ref: S(0) for node in layers for ref in (node.inputs[1], *node.inputs[3:])} | batched.weights
    makers = dict(batched.products)
    for node in reversed(scope.nodes):
        mark, rule = weights.get(Ref(node.name)), own[node.name]
        factor = factor_of(rule, rule.outputs[0], mark) if mark else None
        if factor is not None and factor[1] == 1 and len(node.outputs) == 1:
            makers[node.name] = factor[0]
            for ref, dims in zip(node.inputs, rule.inputs, strict=True):
                if placement := find_factor(rule, dims, *factor):
                    weights[ref] = placement
    sizes = [scope.metas[node.inputs[1]].shape[0] for node in layers]
    sizes += [own[name].sizes[factor] for name, factor in batched.products.items()]
    others = {name: factor for name, factor in batched.found.items() if name not in makers}
    return ExpertDims(frozenset(weights), makers, others, tuple(sizes))


class _Batched:
    """Products of weights [E, A, B] with rows that lie by expert, and what else lies so.

    E is a factor of the weight, the rows and the result. Heads with a matrix each are such a product, too; but where
    their features come from they are one dim with the heads, which an expert's are not. From the products, dims of
    experts are followed forwards and back. Other products with a parameter on the way have weights [E, A, B] as well,
    or end it, as a router does.
    """

    def __init__(
        self, scope: Scope, rules: Mapping[str, Rule], held: Collection[str], positions: Mapping[str, str]
    ) -> None:
        self.nodes, self.rules, self.metas = scope.nodes, rules, scope.metas
        self.made_by = {Ref(node.name, index): node for node in self.nodes for index in range(len(node.outputs))}
        self.fixed = {Ref(name) for name in held}
        self.products, self.found = dict[str, str](), dict[str, str]()
        self.weights, self.marks = dict[Ref, Placement](), dict[Ref, Placement]()
        for node in self.nodes:
            if node.inputs and self.fixed.issuperset(node.inputs):
                self.fixed |= {Ref(node.name, index) for index in range(len(node.outputs))}
        for node in self.nodes:
            if base_name(node.op) in BATCHED and not self.fixed.isdisjoint(node.inputs):
                factors = [f for f in rules[node.name].shardable if f != positions.get(node.name)]
                for factor in [f for f in factors if self.is_over_experts(node, f)][:1]:
                    self.add(node, factor)
        self.spread()

    def spread(self) -> None:
        """Follows dims of experts to all calls that have them."""
        before = 0
        while len(self.found) != before:
            before = len(self.found)
            for node in itertools.chain(self.nodes, reversed(self.nodes)):
                rule = self.rules[node.name]
                for ref, dims in self.tensors(node) if node.name not in self.found else ():
                    factor = factor_of(rule, dims, self.marks[ref]) if ref in self.marks else None
                    if factor is not None and factor[1] == 1 and factor[0] in rule.shardable:
                        self.add(node, factor[0])
                        break

    def add(self, node: Node, factor: str) -> None:
        """A call that runs over experts, unless it is a product with a parameter that has them otherwise."""
        having = [(ref, mark) for ref, dims in self.tensors(node) if (mark := self.mark(node, dims, factor))]
        held = {ref: mark for ref, mark in having if ref in self.fixed}
        if base_name(node.op) in MATMULS and held:
            if base_name(node.op) not in BATCHED or not all(self.is_stored_first(*each) for each in held.items()):
                return
            if all(len(self.metas[ref].shape) < 3 for ref in held):
                return
            self.products[node.name] = factor
        self.weights |= {ref: mark for ref, mark in held.items() if self.is_stored_first(ref, mark)}
        self.found[node.name] = factor
        for ref, mark in having:
            if ref not in self.fixed:
                self.marks.setdefault(ref, mark)

    def is_over_experts(self, node: Node, factor: str) -> bool:
        """Whether a product multiplies the rows of each expert: its factor is that of a weight, of rows, and either of
        the result or of numbers by which it weighs the rows, as heads have none."""
        rule = self.rules[node.name]
        operands = list(zip(node.inputs, rule.inputs, strict=True))
        having = [(ref, dims) for ref, dims in operands if self.mark(node, dims, factor)]
        weights = [dims for ref, dims in having if ref in self.fixed and len(dims) > 2]
        rows = [(ref, dims) for ref, dims in having if ref not in self.fixed]
        if len(weights) != 1 or not rows or len(rows) == 1 and factor in rule.contracted:
            return False
        for each in rule.contracted - {factor}:
            for ref, dims in rows if self.mark(node, weights[0], each) else ():
                marks = [self.mark(node, dims, found) for found in (factor, each)]
                if all(marks) and not self.are_apart(ref, *(mark for mark in marks if mark)):
                    return False
        return any(self.mark(node, dims, each) for each in rule.contracted - {factor} for _, dims in rows)

    def mark(self, node: Node, dims: Dims, factor: str) -> Placement | None:
        return find_factor(self.rules[node.name], dims, factor)

    def tensors(self, node: Node) -> list[tuple[Ref, Dims]]:
        """All that a call reads and makes."""
        rule = self.rules[node.name]
        made = [(Ref(node.name, index), dims) for index, dims in enumerate(rule.outputs)]
        return [*zip(node.inputs, rule.inputs, strict=True), *made]

    def is_stored_first(self, ref: Ref, mark: Placement) -> bool:
        """Whether it is made of a parameter whose first dim has what the shard is of."""
        origin, marks = self.origin(ref, mark)
        return origin not in self.made_by and marks == (S(0),)

    def are_apart(self, ref: Ref, *marks: Placement) -> bool:
        """Whether shards of a tensor are of two dims wherever it comes from."""
        return len({mark.dim for mark in self.origin(ref, *marks)[1]}) == len(marks)

    def origin(self, ref: Ref, *marks: Placement) -> tuple[Ref, tuple[Placement, ...]]:
        """The tensor that shards of another come from, and as what: the first that none has all of them before, or that
        has two in one dim."""
        while ref in self.made_by and len({mark.dim for mark in marks}) == len(marks):
            node = self.made_by[ref]
            rule = self.rules[node.name]
            factors = [factor_of(rule, rule.outputs[ref.index], mark) for mark in marks]
            for source, dims in zip(node.inputs, rule.inputs, strict=True) if all(factors) else ():
                found = [find_factor(rule, dims, *factor) for factor in factors if factor]
                if all(found) and (source in self.fixed) == (ref in self.fixed):
                    ref, marks = source, tuple(mark for mark in found if mark)
                    break
            else:
                break
        return ref, marks
