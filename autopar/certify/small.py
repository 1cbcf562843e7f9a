"""A call as it is, but small: every loop of its rule cut down, with what is sharded still divided as it was.

The rule's factors are the loops of the call. Each gets a size that keeps its structure: the sections that axes cut it
in, one part per rank of the axes that share it (which are cut to two or three ranks), and more than one element in each
part where there was more than one. What the small call must show is checked, not assumed: torch gives its results the
shapes that the factors say, and the rule of the small call has the factors, in the same dims, of the large one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, Node, Ref, TensorMeta, with_refs
from autopar.ir.placement import divides
from autopar.options.strategies import Operator, Option, rule_or_blank
from autopar.rules.call import Call
from autopar.rules.execute import call_op
from autopar.rules.localize import REWRITES, combines, replace_arguments, tensor_placements
from autopar.rules.rule import AxisOption, Dims, Rule, axis_options, label_of

Sizes = tuple[int, ...]
Shape = tuple[int, ...]
FEW = 8
"""Blocked loops that are no longer stay as they are: they count sections, pieces or elements of a window."""
UNSHARDED = 4
"""Elements of a loop that no axis shards; with 2, a norm's results would not depend on its input."""
MOST_ELEMENTS = 1 << 22
"""Of the tensors of a call that is small enough to be run."""


class CannotShrink(ValueError):
    """Why no small call stands for a call."""


@dataclass(frozen=True, slots=True)
class SmallCall:
    """A small call with one option per axis that it is run on. axes: their names in the plan."""

    node: Node
    inputs: tuple[TensorMeta, ...]
    rule: Rule
    options: tuple[AxisOption, ...]
    sizes: Sizes
    axes: tuple[str, ...]


def small_call(operator: Operator, option: Option, axes: tuple[str, ...], sizes: Sizes, ranks: int) -> SmallCall:
    """The call under its option, small. Raises CannotShrink.

    axes, sizes: of the plan's mesh. ranks: how many each axis has where its own number allows any. Axes on which all
    ranks do the same are left out, but for one if there is no other.
    """
    kept = [i for i, each in enumerate(option.axes) if each.label != "R"] or ([0] if axes else [])
    chosen = tuple(option.axes[i] for i in kept)
    small = tuple(min(ranks, sizes[i]) if sizes[i] > 1 else 1 for i in kept)
    shards = _shards(operator.rule, chosen, tuple(sizes[i] for i in kept), small)
    reasons = []
    for factors in _factor_sizes(operator.rule, shards):
        try:
            node, inputs = _resized(operator, factors)
            rule = _same_rule(operator, node, inputs, factors)
            options = tuple(
                _option_of(rule, each, size, node, inputs, shards) for each, size in zip(chosen, small, strict=True)
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
    """One axis on one factor: sections in which it is cut, ranks of the axis; and the same of the small call."""

    axis: int
    sections: int
    ranks: int
    small_ranks: int


def _shards(rule: Rule, options: tuple[AxisOption, ...], sizes: Sizes, small: Sizes) -> dict[str, list[_Shard]]:
    """What shards each factor."""
    found: dict[str, list[_Shard]] = {}
    for axis, (option, size, few) in enumerate(zip(options, sizes, small, strict=True)):
        for factor, sections in rule.sharded_by(option.label, size):
            found.setdefault(factor, []).append(_Shard(axis, sections, size, few))
    return found


def _factor_sizes(rule: Rule, shards: Mapping[str, list[_Shard]]) -> Iterator[dict[str, int]]:
    """Sizes to try: all loops cut down; then blocked ones, and ones that no axis shards, as they are."""
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
    """A factor's small size, with as many levels as its shards have; see `small_sections`."""
    levels = sorted({shard.sections for shard in shards})
    if not levels:
        return few_of(size, UNSHARDED)
    last = levels[-1]
    ways, small_ways = _ways(shards, last)
    rest = size // (last * ways)
    return small_sections(shards)[last] * small_ways * few_of(rest, 2)


def small_sections(shards: Any) -> dict[int, int]:
    """Number of sections -> that of the small factor, which nests in the parts of the coarser ones as the first did."""
    found: dict[int, int] = {}
    product = small_product = 1
    for level in sorted({shard.sections for shard in shards}):
        found[level] = small_product * few_of(level // product, 2)
        ways, small_ways = _ways(shards, level)
        product, small_product = level * ways, found[level] * small_ways
    return found


def _ways(shards: Any, level: int) -> tuple[int, int]:
    own = [shard for shard in shards if shard.sections == level]
    return math.prod(s.ranks for s in own), math.prod(s.small_ranks for s in own)


def few_of(count: int, wanted: int) -> int:
    """The smallest divisor of a count that is at least what is wanted; the wanted number itself for a large prime."""
    for divisor in range(min(wanted, count), min(count, FEW) + 1):
        if count % divisor == 0:
            return divisor
    return min(count, wanted)


def _resized(operator: Operator, factors: Mapping[str, int]) -> tuple[Node, tuple[TensorMeta, ...]]:
    """The call on tensors of these factor sizes, its arguments that name sizes with it. Raises CannotShrink."""
    node, rule = operator.node, operator.rule
    inputs = tuple(_meta(m, dims, rule, factors) for m, dims in zip(operator.inputs, rule.inputs, strict=True))
    outputs = tuple(_meta(m, dims, rule, factors) for m, dims in zip(node.outputs, rule.outputs, strict=True))
    if sum(meta.numel for meta in (*inputs, *outputs)) > MOST_ELEMENTS:
        raise CannotShrink(f"its loops do not get smaller than {max(m.numel for m in (*inputs, *outputs))} elements")
    made = _rewritten(Call.of(node, operator.inputs), inputs, outputs)
    numbers = itertools.count()
    made = _distinct(replace(made, outputs=outputs), numbers)
    _check_shapes(made, inputs)
    return made, inputs


def _distinct(node: Node, numbers: Iterator[int]) -> Node:
    """The call with an input of its own for every tensor argument, so that each has its own gradient."""
    return with_refs(node, lambda _: Ref(f"in{next(numbers)}"))


def _meta(meta: TensorMeta, dims: Dims, rule: Rule, factors: Mapping[str, int]) -> TensorMeta:
    whole = tuple(math.prod(rule.sizes[f] for f in dim) for dim in dims)
    if whole != meta.shape:
        raise CannotShrink(f"no rule says what loops {list(meta.shape)} is made of")
    return replace(meta, shape=tuple(math.prod(factors[f] for f in dim) for dim in dims))


def _rewritten(call: Call, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]) -> Node:
    shapes = tuple(m.shape for m in inputs), tuple(m.shape for m in outputs)
    own = _OWN.get(call.packet) or _OWN.get(call.node.op)
    if own is not None:
        args, kwargs = replace_arguments(call.node, own(call, *shapes))
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
    """A window that hides as large a share of the keys as it did."""
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
    """A slice that is one of equal sections stays that section; one to the end, or from the beginning, stays so."""
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
"""Arguments that name sizes which no axis shards, beyond REWRITES."""


def _check_shapes(node: Node, inputs: tuple[TensorMeta, ...]) -> None:
    """Raises CannotShrink unless torch gives the small call's results the shapes that its factors say."""
    given = [torch.empty(meta.shape, dtype=meta.dtype, device="meta") for meta in inputs]
    try:
        made = call_op(node.op, node.args, node.kwargs, given, device="meta")
    except Exception as error:  # operators raise what they like for sizes that do not fit
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CannotShrink(f"torch does not take the small call: {reason}") from None
    shapes, wanted = [tuple(each.shape) for each in made], [meta.shape for meta in node.outputs]
    if shapes != wanted:
        raise CannotShrink(f"the small call gives {shapes}, its loops say {wanted}")


def _same_rule(operator: Operator, node: Node, inputs: tuple[TensorMeta, ...], factors: Mapping[str, int]) -> Rule:
    """The small call's own rule. Raises CannotShrink unless it is the large one's with these sizes."""
    names = {ref: meta for ref, meta in zip(node.inputs, inputs, strict=True)}
    rule, is_known = rule_or_blank(node, names)
    own = operator.rule
    if not is_known:
        raise CannotShrink("it has no rule")
    is_same = (rule.inputs, rule.outputs, rule.additive, set(rule.joints)) == (
        own.inputs,
        own.outputs,
        own.additive,
        set(own.joints),
    )
    if not is_same or any(rule.sizes[f] != factors[f] for dims in (*own.inputs, *own.outputs) for d in dims for f in d):
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
    """The small call's option that does what this one does. Raises CannotShrink."""
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
    found = [each for each in offered if each.label == label and _kinds(each) == kinds]
    if not found:
        raise CannotShrink(f"the small call has no option {label}")
    return found[0]


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
