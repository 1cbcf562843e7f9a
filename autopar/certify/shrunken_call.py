"""Shrink a call: every loop of its rule gets shorter, and sharded loops still divide as before.

The rule's factors are the loops of the call. The size of each keeps its structure: the sections in which axes shard it,
one part per rank of its axes (which shrink to two or three ranks), and more than one element per part where there was
more than one. The small call is checked: torch must give its results the shapes that the factors say, and its rule must
have the factors of the large call, in the same dims.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, Node, Ref, TensorMeta, with_refs
from autopar.ir.operators import call_operator
from autopar.ir.placement import divides
from autopar.rules.call import Call
from autopar.rules.localize import REWRITES, combines, replace_arguments, tensor_placements
from autopar.rules.rule import AxisOption, Dims, Rule, axis_options, label_of
from autopar.sharding.call_options import Operator, Option, rule_or_blank

Sizes = tuple[int, ...]
Shape = tuple[int, ...]
FEW = 8
"""Blocked loops of at most this length keep their size: they count sections, pieces or elements of a window."""
UNSHARDED = 4
"""Elements of a loop that no axis shards; with 2, a norm's results would not depend on its input."""
MOST_ELEMENTS = 1 << 22
"""The most elements of all tensors of a small call."""


class CannotShrink(ValueError):
    """The reason why no small call represents a call."""


@dataclass(frozen=True, slots=True)
class SmallCall:
    """A small call with one option per axis. axes: their names in the plan."""

    node: Node
    inputs: tuple[TensorMeta, ...]
    rule: Rule
    options: tuple[AxisOption, ...]
    sizes: Sizes
    axes: tuple[str, ...]


def small_call(operator: Operator, option: Option, axes: tuple[str, ...], sizes: Sizes, ranks: int) -> SmallCall:
    """Shrink a call under its option. Raises CannotShrink.

    axes, sizes: of the plan's mesh. ranks: the small number of ranks of each axis that has several. Axes on which all
    ranks do the same are dropped, except one if there is no other.
    """
    kept = [i for i, choice in enumerate(option.axes) if choice.label != "R"] or ([0] if axes else [])
    chosen = tuple(option.axes[i] for i in kept)
    small = tuple(min(ranks, sizes[i]) if sizes[i] > 1 else 1 for i in kept)
    shards = _shards(operator.rule, chosen, tuple(sizes[i] for i in kept), small)
    reasons = []
    for factors in _factor_sizes(operator.rule, shards):
        try:
            node, inputs = _resized(operator, factors)
            rule = _same_rule(operator, node, inputs, factors)
            options = tuple(
                _option_of(rule, choice, size, node, inputs, shards) for choice, size in zip(chosen, small, strict=True)
            )
            _require_divided(node, inputs, rule, options, small)
            return SmallCall(
                node=node, inputs=inputs, rule=rule, options=options, sizes=small, axes=tuple(axes[i] for i in kept)
            )
        except CannotShrink as error:
            reasons.append(str(error))
    raise CannotShrink(reasons[0])


@dataclass(frozen=True, slots=True)
class _Shard:
    """One axis on one factor: its sections, the ranks of the axis, and the ranks in the small call."""

    axis: int
    sections: int
    ranks: int
    small_ranks: int


def _shards(rule: Rule, options: tuple[AxisOption, ...], sizes: Sizes, small: Sizes) -> dict[str, list[_Shard]]:
    """Return the shards of each factor."""
    shards_of: dict[str, list[_Shard]] = {}
    for axis, (option, size, few) in enumerate(zip(options, sizes, small, strict=True)):
        for factor, sections in rule.sharded_by(option.label, size):
            shards_of.setdefault(factor, []).append(_Shard(axis, sections, size, few))
    return shards_of


def _factor_sizes(rule: Rule, shards: Mapping[str, list[_Shard]]) -> Iterator[dict[str, int]]:
    """Yield sizes to try: all loops shrunk; then blocked loops unshrunk; then all unsharded loops unshrunk."""
    all_small = {name: small_size(size, shards.get(name, ())) for name, size in rule.sizes.items()}
    for name in rule.blocked:
        if rule.sizes[name] <= FEW:
            all_small[name] = rule.sizes[name]
    yield all_small
    blocked = all_small | {name: rule.sizes[name] for name in rule.blocked}
    if blocked != all_small:
        yield blocked
    yield {name: all_small[name] if name in shards else size for name, size in rule.sizes.items()}


def small_size(size: int, shards: Any) -> int:
    """Return a factor's small size, with as many levels as its shards have; see `small_sections`."""
    levels = sorted({shard.sections for shard in shards})
    if not levels:
        return few_of(size, UNSHARDED)
    last = levels[-1]
    ways, small_ways = _ways(shards, last)
    rest = size // (last * ways)
    return small_sections(shards)[last] * small_ways * few_of(rest, 2)


def small_sections(shards: Any) -> dict[int, int]:
    """Return the small factor's section counts by those of the large one; they nest in coarser shards as before."""
    small_count: dict[int, int] = {}
    product = small_product = 1
    for level in sorted({shard.sections for shard in shards}):
        small_count[level] = small_product * few_of(level // product, 2)
        ways, small_ways = _ways(shards, level)
        product, small_product = level * ways, small_count[level] * small_ways
    return small_count


def _ways(shards: Any, level: int) -> tuple[int, int]:
    at_level = [shard for shard in shards if shard.sections == level]
    return math.prod(s.ranks for s in at_level), math.prod(s.small_ranks for s in at_level)


def few_of(count: int, wanted: int) -> int:
    """Return the smallest divisor of `count` that is at least `wanted`; `wanted` itself for a large prime."""
    for divisor in range(min(wanted, count), min(count, FEW) + 1):
        if count % divisor == 0:
            return divisor
    return min(count, wanted)


def _resized(operator: Operator, factors: Mapping[str, int]) -> tuple[Node, tuple[TensorMeta, ...]]:
    """Return the call on tensors of these factor sizes, with arguments that name sizes. Raises CannotShrink."""
    node, rule = operator.node, operator.rule
    inputs = tuple(_meta(m, dims, rule, factors) for m, dims in zip(operator.inputs, rule.inputs, strict=True))
    outputs = tuple(_meta(m, dims, rule, factors) for m, dims in zip(node.outputs, rule.outputs, strict=True))
    if sum(meta.numel for meta in (*inputs, *outputs)) > MOST_ELEMENTS:
        raise CannotShrink(f"its loops do not get smaller than {max(m.numel for m in (*inputs, *outputs))} elements")
    rewritten = _rewritten(Call.of(node, operator.inputs), inputs, outputs)
    numbers = itertools.count()
    rewritten = _distinct(replace(rewritten, outputs=outputs), numbers)
    _check_shapes(rewritten, inputs)
    return rewritten, inputs


def _distinct(node: Node, numbers: Iterator[int]) -> Node:
    """Give every tensor argument a separate input, so that each has a separate gradient."""
    return with_refs(node, lambda _: Ref(f"in{next(numbers)}"))


def _meta(meta: TensorMeta, dims: Dims, rule: Rule, factors: Mapping[str, int]) -> TensorMeta:
    whole = tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)
    if whole != meta.shape:
        raise CannotShrink(f"no rule gives the loops of shape {list(meta.shape)}")
    return replace(meta, shape=tuple(math.prod(factors[f] for f in dim) for dim in dims))


def _rewritten(call: Call, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]) -> Node:
    shapes = tuple(m.shape for m in inputs), tuple(m.shape for m in outputs)
    replacement = _OWN.get(call.packet) or _OWN.get(call.node.op)
    if replacement is not None:
        args, kwargs = replace_arguments(call.node, replacement(call, *shapes))
        return replace(call.node, args=args, kwargs=kwargs)
    rewrite = REWRITES.get(call.packet)
    if rewrite is None or not call.node.op.startswith("aten.") or shapes == _shapes(call):
        return call.node
    op, replaced = rewrite(call, *shapes)
    args, kwargs = replace_arguments(call.node, replaced)
    return replace(call.node, op=op, args=args, kwargs=kwargs)


def _shapes(call: Call) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    return tuple(m.shape for m in call.inputs), tuple(m.shape for m in call.outputs)


_Replace = Callable[[Call, tuple[Shape, ...], tuple[Shape, ...]], dict[str, Any]]


def _normalized(call: Call, inputs: tuple[Shape, ...], _: tuple[Shape, ...]) -> dict[str, Any]:
    return {"normalized_shape": inputs[0][len(inputs[0]) - len(call["normalized_shape"]) :]}


def _arange(call: Call, _: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> dict[str, Any]:
    start, step = call.get("start") or 0, call.get("step") or 1
    return {"end": start + step * outputs[0][0]}


def _one_hot(_: Call, __: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> dict[str, Any]:
    return {"num_classes": outputs[0][-1]}


def _drawn(_: Call, __: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> dict[str, Any]:
    return {"size": outputs[0]}


def _window(call: Call, inputs: tuple[Shape, ...], _: tuple[Shape, ...]) -> dict[str, Any]:
    """Return a window that hides as large a share of the keys as before."""
    key = call.tensor("key").index
    length, small = call.inputs[key].shape[-2], inputs[key][-2]
    named = {name: call.get(name) for name in ("before", "after", "chunk")}
    return {
        name: max(1, min(value, small) * small // length if value >= length else value * small // length)
        if value
        else value
        for name, value in named.items()
        if isinstance(value, int)
    }


def _section(call: Call, inputs: tuple[Shape, ...], outputs: tuple[Shape, ...]) -> dict[str, Any]:
    """Return a slice that takes the same one of equal sections; one from the beginning or to the end stays so."""
    dim = call["dim"] % len(inputs[0])
    size, length, new, small = call.inputs[0].shape[dim], call.outputs[0].shape[dim], inputs[0][dim], outputs[0][dim]
    start = call.get("start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    if (size, length) == (new, small):
        return {}
    if length and start % length == 0 and size % length == 0:
        begin = start // length * small
        return (
            {"start": begin, "length": small} if "length" in call.arguments else {"start": begin, "end": begin + small}
        )
    raise CannotShrink("a slice that is none of equal sections")


_OWN: Mapping[str, _Replace] = {
    "layer_norm": _normalized,
    "rms_norm": _normalized,
    "arange": _arange,
    "one_hot": _one_hot,
    "draw": _drawn,
    "slice": _section,
    "narrow": _section,
    WINDOW_ATTENTION: _window,
    SINK_ATTENTION: _window,
}
"""Arguments that name sizes no axis shards, beyond REWRITES."""


def _check_shapes(node: Node, inputs: tuple[TensorMeta, ...]) -> None:
    """Raise CannotShrink unless torch gives the small call's results the shapes that its factors say."""
    tensors = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in inputs]
    try:
        results = call_operator(node, tensors, device="meta")
    except Exception as error:  # operators raise arbitrary exceptions for sizes that do not fit
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CannotShrink(f"torch does not take the small call: {reason}") from None
    shapes, expected = [tuple(result.shape) for result in results], [meta.shape for meta in node.outputs]
    if shapes != expected:
        raise CannotShrink(f"the small call gives {shapes}, its loops say {expected}")


def _same_rule(operator: Operator, node: Node, inputs: tuple[TensorMeta, ...], factors: Mapping[str, int]) -> Rule:
    """Return the small call's rule. Raises CannotShrink unless it is the large call's rule with these sizes."""
    names = {ref: meta for ref, meta in zip(node.inputs, inputs, strict=True)}
    rule, is_known = rule_or_blank(node, names)
    large_rule = operator.rule
    if not is_known:
        raise CannotShrink("it has no rule")
    is_same = (rule.inputs, rule.outputs, rule.additive, set(rule.joints)) == (
        large_rule.inputs,
        large_rule.outputs,
        large_rule.additive,
        set(large_rule.joints),
    )
    if not is_same or any(
        rule.sizes[f] != factors[f] for dims in (*large_rule.inputs, *large_rule.outputs) for d in dims for f in d
    ):
        raise CannotShrink("the small call has other loops")
    return rule


def _option_of(
    rule: Rule,
    option: AxisOption,
    size: int,
    node: Node,
    inputs: tuple[TensorMeta, ...],
    shards: Mapping[str, list[_Shard]],
) -> AxisOption:
    """Return the small call's option that corresponds to this one. Raises CannotShrink."""
    factor, _, count = option.label.rpartition("/")
    label, sections = option.label, {}
    if factor and rule.joint(option.label) is None:
        few = small_sections(shards[factor])[int(count)]
        label, sections = label_of(factor, few), {factor: (few,)}
    elif factor and (joint := rule.joint(option.label)) is not None and option.label not in rule.joints:
        few = small_sections(shards[joint.output])[int(count)]
        label, sections = label_of(factor, few), {joint.output: (few,)}
    offered = axis_options(rule, size, inputs, node.outputs, sections)
    kinds = _kinds(option)
    matching = [offer for offer in offered if offer.label == label and _kinds(offer) == kinds]
    if not matching:
        raise CannotShrink(f"the small call has no option {label}")
    return matching[0]


def _kinds(option: AxisOption) -> tuple[Any, ...]:
    return tuple((p.kind, p.dim) for p in (*option.inputs, *option.outputs)), option.lowering


def _require_divided(
    node: Node, inputs: tuple[TensorMeta, ...], rule: Rule, options: tuple[AxisOption, ...], sizes: Sizes
) -> None:
    if not options:
        return
    places_in, places_out = tensor_placements(options)
    tensors = (*zip(inputs, places_in, strict=True), *zip(node.outputs, places_out, strict=True))
    if not combines(rule, options, sizes) or not all(divides(m.shape, p, sizes) for m, p in tensors):
        raise CannotShrink(f"the small sizes do not divide over {'x'.join(map(str, sizes))} ranks")
