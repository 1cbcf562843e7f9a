"""What the dims of tensors are, in a reader's words: batch, heads, sequence, vocabulary, width.

A few operators say what their dims mean: attention has heads and a sequence, cross-entropy has classes, a lookup has
rows. From there the meaning travels through the sharding rules as a shard would: `S(2)` of a linear's output is
"heads" because, views and transposes later, it is the shard of attention's head dim. Names of modules play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Ref, ancestors, base_name, layer_borders
from autopar.ir.placement import Placement, S
from autopar.operators.traits import ATTENTION, CONVOLUTIONS, LINEAR_PRODUCTS
from autopar.options.followed import factor_of
from autopar.options.strategies import Operator
from autopar.rules.rule import find_factor

Key = tuple[str, Ref, Placement]


@dataclass(frozen=True)
class DimNames:
    """Words for a shard of a tensor. `names` holds those that are known; every tensor gets some words."""

    names: Mapping[Key, str]
    fallbacks: Mapping[Key, str]

    def of(self, scope: str, ref: Ref, shard: Placement, num_dims: int) -> str:
        """The name of a sharded dim, such as "heads"; "features" for the last dim of a tensor that nothing is known of,
        else "dim 1"."""
        key = (scope, ref, shard)
        unknown = "features" if shard.dim == num_dims - 1 else f"dim {shard.dim}"
        return self.names.get(key) or self.fallbacks.get(key) or unknown


def name_dims(graph: Graph, operators: Mapping[tuple[str, str], Operator]) -> DimNames:
    """Names of all shards that the operators' rules connect with a dim of known meaning."""
    names: dict[Key, str] = {}
    # One meaning after the other, so that the first and surest takes a dim that two could claim.
    for kind in ("batch", "heads", "sequence", "vocabulary", "width"):
        seeds = {key: name for key, name in _seeds(kind, graph, operators) if key not in names}
        names |= {**_spread(graph, operators, seeds, names), **names}
    return DimNames(names, dict(_features(operators)))


def _seeds(kind: str, graph: Graph, operators: Mapping[tuple[str, str], Operator]) -> Iterator[tuple[Key, str]]:
    if kind == "batch":
        yield from ((("", Ref(i.name), S(i.batch_dim)), "batch") for i in graph.inputs if i.batch_dim is not None)
    batch = {i.name for i in graph.inputs}
    tables = {
        op.inputs[0].shape[0]
        for op in operators.values()
        if base_name(op.node.op) == "embedding" and op.inputs[0].shape
    }
    for (scope, _), operator in operators.items():
        name, refs = base_name(operator.node.op), operator.node.inputs
        if name in ATTENTION and kind in ("heads", "sequence"):
            dim = 1 if kind == "heads" else 2
            yield from (((scope, ref, S(dim)), kind) for ref in (*refs[:3], Ref(operator.node.name)))
        if name == "cross_entropy_loss" and kind == "vocabulary":
            classes = min(1, len(operator.inputs[0].shape) - 1)
            word = "vocabulary" if operator.inputs[0].shape[classes] in tables else "classes"
            yield (scope, refs[0], S(classes)), word
        if name == "embedding":
            if kind == "vocabulary":
                is_given = not scope and bool(ancestors(graph, refs[1]) & batch)
                yield (scope, refs[0], S(0)), "vocabulary" if is_given else "positions"
            if kind == "sequence" and len(operator.inputs[1].shape) == 2:
                yield (scope, refs[1], S(1)), "sequence"
            if kind == "width":
                yield (scope, refs[0], S(1)), "width"


def _spread(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    seeds: Mapping[Key, str],
    taken: Mapping[Key, str],
) -> dict[Key, str]:
    """The seeds' names, carried through rules and layer borders until nothing new is reached."""
    touching: dict[tuple[str, Ref], list[Operator]] = {}
    for (scope, name), operator in operators.items():
        for ref in (*operator.node.inputs, *(Ref(name, i) for i in range(len(operator.node.outputs)))):
            touching.setdefault((scope, ref), []).append(operator)
    borders: dict[tuple[str, Ref], list[tuple[str, Ref]]] = {}
    for inner, outer in layer_borders(graph):
        borders.setdefault(inner, []).append(outer)
        borders.setdefault(outer, []).append(inner)
    found = dict(seeds)
    open_keys = list(seeds)
    while open_keys:
        scope, ref, shard = key = open_keys.pop()
        reached = [(*other, shard) for other in borders.get((scope, ref), ())]
        for operator in touching.get((scope, ref), ()):
            reached += _through(operator, ref, shard)
        for other in reached:
            if other not in found and other not in taken:
                found[other] = found[key]
                open_keys.append(other)
    return found


def _through(operator: Operator, ref: Ref, shard: Placement) -> Iterator[Key]:
    """The shards of a call's other tensors by the factor that `shard` shards."""
    node, rule = operator.node, operator.rule
    tensors = [*zip(node.inputs, rule.inputs, strict=True)]
    tensors += [(Ref(node.name, i), dims) for i, dims in enumerate(rule.outputs)]
    for own, dims in tensors:
        factor = factor_of(rule, dims, shard) if own == ref else None
        if factor is not None:
            for other, other_dims in tensors:
                placement = find_factor(rule, other_dims, *factor)
                if placement is not None:
                    yield operator.scope, other, placement


def _features(operators: Mapping[tuple[str, str], Operator]) -> Iterator[tuple[Key, str]]:
    """A weight's dims as its linear sees them: summed over, or kept."""
    for (scope, _), operator in operators.items():
        if base_name(operator.node.op) in LINEAR_PRODUCTS | CONVOLUTIONS:
            for ref, dims, meta in zip(operator.node.inputs, operator.rule.inputs, operator.inputs, strict=True):
                for dim in range(len(meta.shape) if len(meta.shape) <= 2 else 0):
                    for factor in dims[dim][:1]:
                        is_summed = factor in operator.rule.contracted
                        yield (scope, ref, S(dim)), "input features" if is_summed else "output features"
