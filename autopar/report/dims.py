"""Names for the dims of tensors: batch, heads, sequence, vocabulary, width.

A few operators define what their dims mean: attention has heads and a sequence, cross-entropy has classes, a lookup has
rows. The sharding rules carry this meaning to other tensors, as they carry a shard: `S(2)` of a linear's output is
"heads" because views and transposes turn it into the shard of attention's head dim. Module names play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.ir.graph import Graph, Ref, ancestors, base_name, layer_borders
from autopar.ir.placement import Placement, S
from autopar.operators.traits import ATTENTION, CONVOLUTIONS, LINEAR_PRODUCTS
from autopar.rules.rule import find_factor
from autopar.sharding.batch_and_sequence_dims import factor_of
from autopar.sharding.call_options import Operator

Key = tuple[str, Ref, Placement]


@dataclass(frozen=True)
class DimNames:
    """Words for the shards of tensors. names: shards of known meaning; fallbacks: words for the dims of weights."""

    names: Mapping[Key, str]
    fallbacks: Mapping[Key, str]

    def of(self, scope: str, ref: Ref, shard: Placement, num_dims: int) -> str:
        """Return the name of a sharded dim, such as "heads". A dim without a known meaning is "features" if it is the
        tensor's last, else "dim 1"."""
        key = (scope, ref, shard)
        unknown = "features" if shard.dim == num_dims - 1 else f"dim {shard.dim}"
        return self.names.get(key) or self.fallbacks.get(key) or unknown


def name_dims(graph: Graph, operators: Mapping[tuple[str, str], Operator]) -> DimNames:
    """Name all shards that the operators' rules connect with a dim of known meaning."""
    names: dict[Key, str] = {}
    # Process one meaning at a time: the first and surest takes a dim that two could claim.
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
                is_batch = not scope and bool(ancestors(graph, refs[1]) & batch)
                yield (scope, refs[0], S(0)), "vocabulary" if is_batch else "positions"
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
    """Carry the seeds' names through rules and layer borders until no new shard is reached."""
    touching: dict[tuple[str, Ref], list[Operator]] = {}
    for (scope, name), operator in operators.items():
        for ref in (*operator.node.inputs, *(Ref(name, i) for i in range(len(operator.node.outputs)))):
            touching.setdefault((scope, ref), []).append(operator)
    borders: dict[tuple[str, Ref], list[tuple[str, Ref]]] = {}
    for inner, outer in layer_borders(graph):
        borders.setdefault(inner, []).append(outer)
        borders.setdefault(outer, []).append(inner)
    named = dict(seeds)
    open_keys = list(seeds)
    while open_keys:
        scope, ref, shard = key = open_keys.pop()
        reached = [(*other, shard) for other in borders.get((scope, ref), ())]
        for operator in touching.get((scope, ref), ()):
            reached += _through(operator, ref, shard)
        for other in reached:
            if other not in named and other not in taken:
                named[other] = named[key]
                open_keys.append(other)
    return named


def _through(operator: Operator, ref: Ref, shard: Placement) -> Iterator[Key]:
    """Yield the shards of a call's other tensors by the factor that `shard` shards."""
    node, rule = operator.node, operator.rule
    tensors = [*zip(node.inputs, rule.inputs, strict=True)]
    tensors += [(Ref(node.name, i), dims) for i, dims in enumerate(rule.outputs)]
    for tensor_ref, dims in tensors:
        factor = factor_of(rule, dims, shard) if tensor_ref == ref else None
        if factor is not None:
            for other, other_dims in tensors:
                placement = find_factor(rule, other_dims, *factor)
                if placement is not None:
                    yield operator.scope, other, placement


def _features(operators: Mapping[tuple[str, str], Operator]) -> Iterator[tuple[Key, str]]:
    """Yield the names of a weight's dims: input features are summed over, output features are not."""
    for (scope, _), operator in operators.items():
        if base_name(operator.node.op) in LINEAR_PRODUCTS | CONVOLUTIONS:
            for ref, dims, meta in zip(operator.node.inputs, operator.rule.inputs, operator.inputs, strict=True):
                for dim in range(len(meta.shape) if len(meta.shape) <= 2 else 0):
                    for factor in dims[dim][:1]:
                        is_summed = factor in operator.rule.contracted
                        yield (scope, ref, S(dim)), "input features" if is_summed else "output features"
