"""Find the calls and tensors with a dim of experts: expert weights, products with them, and tensors sorted by expert.

In one form, rows that each choose an expert are multiplied by one call (`expert_linear`), in the order of the tokens.
Other mixtures keep the rows of each expert together. They have a product of these rows [E, N, A] with weights [E, A,
B], and calls before and after it on tensors that also have E: copies of the tokens, masks that assign tokens, and
biases. A rank may have a run of the experts in all of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Node, Ref, base_name
from autopar.ir.placement import Placement, S
from autopar.operators.traits import BATCHED_PRODUCTS, MATMULS
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.rules.rule import Dims, Rule, find_factor
from autopar.sharding.batch_and_sequence_dims import Key, Rules, factor_of
from autopar.sharding.scopes import Scope

BATCHED = BATCHED_PRODUCTS | {"einsum"}
"""Products that may have a matrix for each index of a dim."""


@dataclass(frozen=True, slots=True)
class ExpertDims:
    """Calls by name, with their factor over experts.

    weights: of experts, and the tensors they are computed from, down to parameters. makers: calls that compute weights,
    and products of weights with rows sorted by expert. others: all other calls on tensors sorted by expert.
    num_experts: of each layer.
    """

    weights: frozenset[Ref]
    makers: Mapping[str, str]
    others: Mapping[str, str]
    num_experts: tuple[int, ...]


def expert_dims(
    scope: Scope, rules: Rules, parameters: Collection[str], positions: Mapping[Key, tuple[str, int]]
) -> ExpertDims:
    """Return the expert dims of a scope.

    parameters: names of the scope's parameters. positions: of calls, the factor over sequence positions.
    """
    layers = [node for node in scope.nodes if node.op == EXPERT_LINEAR]
    rule_of = {node.name: rules[scope.name, node.name][0] for node in scope.nodes}
    along = {name: factor for (owner, name), (factor, _) in positions.items() if owner == scope.name}
    batched = _Batched(scope, rule_of, parameters, along)
    weights = {ref: S(0) for node in layers for ref in (node.inputs[1], *node.inputs[3:])} | batched.weights
    makers = dict(batched.products)
    for node in reversed(scope.nodes):
        mark, rule = weights.get(Ref(node.name)), rule_of[node.name]
        factor = factor_of(rule, rule.outputs[0], mark) if mark else None
        if factor is not None and factor[1] == 1 and len(node.outputs) == 1:
            makers[node.name] = factor[0]
            for ref, dims in zip(node.inputs, rule.inputs, strict=True):
                if placement := find_factor(rule, dims, *factor):
                    weights[ref] = placement
    sizes = [scope.metas[node.inputs[1]].shape[0] for node in layers]
    sizes += [rule_of[name].sizes[factor] for name, factor in batched.products.items()]
    others = {name: factor for name, factor in batched.factors.items() if name not in makers}
    return ExpertDims(frozenset(weights), makers, others, tuple(sizes))


class _Batched:
    """Products of weights [E, A, B] with rows sorted by expert, and other calls on tensors sorted by expert.

    E is a factor of the weight, the rows and the result. Heads with one matrix each are such a product, too. But heads
    and their features come from one dim, which experts and their features do not. Starting from the products, dims of
    experts are followed forward and backward. Other products with a parameter on the way also have weights [E, A, B],
    or end it, as a router does.
    """

    def __init__(
        self, scope: Scope, rules: Mapping[str, Rule], parameters: Collection[str], positions: Mapping[str, str]
    ) -> None:
        self.nodes, self.rules, self.metas = scope.nodes, rules, scope.metas
        self.made_by = {Ref(node.name, index): node for node in self.nodes for index in range(len(node.outputs))}
        self.fixed = {Ref(name) for name in parameters}
        self.products, self.factors = dict[str, str](), dict[str, str]()
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
        """Follow dims of experts to all calls that have them."""
        before = 0
        while len(self.factors) != before:
            before = len(self.factors)
            for node in itertools.chain(self.nodes, reversed(self.nodes)):
                rule = self.rules[node.name]
                for ref, dims in self.tensors(node) if node.name not in self.factors else ():
                    factor = factor_of(rule, dims, self.marks[ref]) if ref in self.marks else None
                    if factor is not None and factor[1] == 1 and factor[0] in rule.shardable:
                        self.add(node, factor[0])
                        break

    def add(self, node: Node, factor: str) -> None:
        """Add a call that runs over experts, unless it is a product with a parameter that has them in another form."""
        having = [(ref, mark) for ref, dims in self.tensors(node) if (mark := self.mark(node, dims, factor))]
        fixed = {ref: mark for ref, mark in having if ref in self.fixed}
        if base_name(node.op) in MATMULS and fixed:
            if base_name(node.op) not in BATCHED or not all(self.is_stored_first(*weight) for weight in fixed.items()):
                return
            if all(len(self.metas[ref].shape) < 3 for ref in fixed):
                return
            self.products[node.name] = factor
        self.weights |= {ref: mark for ref, mark in fixed.items() if self.is_stored_first(ref, mark)}
        self.factors[node.name] = factor
        for ref, mark in having:
            if ref not in self.fixed:
                self.marks.setdefault(ref, mark)

    def is_over_experts(self, node: Node, factor: str) -> bool:
        """Whether a product multiplies the rows of each expert.

        Its factor must occur in a weight, in rows, and in the result or in numbers that weight the rows; heads have no
        such numbers.
        """
        rule = self.rules[node.name]
        operands = list(zip(node.inputs, rule.inputs, strict=True))
        having = [(ref, dims) for ref, dims in operands if self.mark(node, dims, factor)]
        weights = [dims for ref, dims in having if ref in self.fixed and len(dims) > 2]
        rows = [(ref, dims) for ref, dims in having if ref not in self.fixed]
        if len(weights) != 1 or not rows or len(rows) == 1 and factor in rule.contracted:
            return False
        for contracted in rule.contracted - {factor}:
            for ref, dims in rows if self.mark(node, weights[0], contracted) else ():
                marks = [self.mark(node, dims, candidate) for candidate in (factor, contracted)]
                if all(marks) and not self.are_apart(ref, *(mark for mark in marks if mark)):
                    return False
        return any(self.mark(node, dims, contracted) for contracted in rule.contracted - {factor} for _, dims in rows)

    def mark(self, node: Node, dims: Dims, factor: str) -> Placement | None:
        return find_factor(self.rules[node.name], dims, factor)

    def tensors(self, node: Node) -> list[tuple[Ref, Dims]]:
        """List all tensors that a call reads and returns."""
        rule = self.rules[node.name]
        results = [(Ref(node.name, index), dims) for index, dims in enumerate(rule.outputs)]
        return [*zip(node.inputs, rule.inputs, strict=True), *results]

    def is_stored_first(self, ref: Ref, mark: Placement) -> bool:
        """Whether the tensor comes from a parameter whose first dim corresponds to the shard."""
        origin, marks = self.origin(ref, mark)
        return origin not in self.made_by and marks == (S(0),)

    def are_apart(self, ref: Ref, *marks: Placement) -> bool:
        """Whether shards of a tensor are on different dims wherever it comes from."""
        return len({mark.dim for mark in self.origin(ref, *marks)[1]}) == len(marks)

    def origin(self, ref: Ref, *marks: Placement) -> tuple[Ref, tuple[Placement, ...]]:
        """Return the tensor from which shards of another come, and the shards there.

        The search goes back until no earlier tensor has all of them, or until two are in one dim.
        """
        while ref in self.made_by and len({mark.dim for mark in marks}) == len(marks):
            node = self.made_by[ref]
            rule = self.rules[node.name]
            factors = [factor_of(rule, rule.outputs[ref.index], mark) for mark in marks]
            for source, dims in zip(node.inputs, rule.inputs, strict=True) if all(factors) else ():
                sources = [find_factor(rule, dims, *factor) for factor in factors if factor]
                if all(sources) and (source in self.fixed) == (ref in self.fixed):
                    ref, marks = source, tuple(mark for mark in sources if mark)
                    break
            else:
                break
        return ref, marks
