"""One rank's call: the node with global sizes replaced by local ones, and its lowering if it needs one.

This works for any number of mesh axes at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.ir.graph import Node, TensorMeta
from autopar.ir.placement import Placement, Placements, R, S, divides, local_shape
from autopar.operators.schemas import find_op
from autopar.operators.traits import DRAWN, SHAPES
from autopar.rules.call import Call, normal_dim
from autopar.rules.families.shape import slice_bounds, squeezed_dims
from autopar.rules.rule import AxisOption, Rule, find_factor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoweringCall:
    """A lowering with its parameters.
    name            meaning                                                      parameters used
    mean            the call's result divided by `divisor`                       divisor
    vocab_embedding masked look-up of rows sharded over axes[0]                   axes
    cross_entropy   sum over local tokens / global count of valid targets         axes: the one that shards the classes
                    (reduction "sum": count 1)
    dropout         mask from global positions                                   layout_shape, layout (of the result)
    attention       dropout mask from global positions                           layout_shape, layout ([..., H, S, T])
    draw            random numbers from global positions                         layout_shape, layout (of the result)
    arange          start + step * global position                               layout_shape, layout (of the result)
    all_gather,     attention whose keys are sharded over axes[0], by that        axes, is_striped
    ring            exchange (codegen/runtime/context_attention.py)
    batch_norm,     statistics summed over the ranks that share its rows, or       axes
    group_norm      its space (codegen/runtime/batch_norm.py)
    halo            a convolution of rows of space sharded over axes[0], with      axes
                    rows of the neighbors (codegen/runtime/halo.py)
    routed          rows that travel to the rank of all axes with their expert    axes
                    (codegen/runtime/experts.py)

    axes: numbers of mesh axes. divisor: product of the sizes of the mesh axes that shard a mean.
    layout: one placement per mesh axis, S or R, of a tensor of global shape layout_shape. is_striped: as in a Joint.
    """

    name: str
    axes: tuple[int, ...] = ()
    divisor: int = 1
    layout_shape: Shape = ()
    layout: Placements = ()
    is_striped: bool = False


@dataclass(frozen=True, slots=True)
class LocalCall:
    """`op(*args, **kwargs)` on one rank. Tensors are Refs as in the node."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    lowering: LoweringCall | None = None


def tensor_placements(options: tuple[AxisOption, ...]) -> tuple[tuple[Placements, ...], tuple[Placements, ...]]:
    """Return (per input, per output) one placement per axis, from one option per axis."""
    if not options:
        raise ValueError("no mesh axis: call the node as it is")
    inputs = tuple(zip(*(option.inputs for option in options), strict=True))
    outputs = tuple(zip(*(option.outputs for option in options), strict=True))
    return inputs, outputs


def combines(rule: Rule, options: tuple[AxisOption, ...], axis_sizes: tuple[int, ...]) -> bool:
    """Whether these options, one per mesh axis, may be used together.

    Two axes on one factor must divide the factor, not just the tensor dim that contains it (groups of a convolution: 6
    groups of 2 channels do not split over 2 x 2 ranks, although 12 channels do). A lowering that works over one axis
    may be needed by one axis only. Factors that are sharded together may be sharded by no other axis unless they are
    free.
    """
    by_factor: dict[str, list[tuple[int, int]]] = {}
    alone: set[str] = set()
    for option, size in zip(options, axis_sizes, strict=True):
        for factor, sections in rule.sharded_by(option.label, size):
            by_factor.setdefault(factor, []).append((sections, size))
        joint = rule.joint(option.label)
        if joint is not None:
            alone.update(set(joint.factors) - joint.free)
    for factor, shards in by_factor.items():
        places = tuple(S(0, sections) for sections, _ in shards)
        if not divides((rule.sizes[factor],), places, tuple(size for _, size in shards)):
            return False
        lowering = rule.lowerings.get(factor)
        if len(shards) > 1 and (factor in alone or (lowering and lowering.contiguous)):
            return False
    return True


def local_call(
    node: Node,
    rule: Rule | None,
    options: tuple[AxisOption, ...],
    inputs: tuple[TensorMeta, ...],
    axis_sizes: tuple[int, ...],
) -> LocalCall:
    """Return the call of one rank, for one option per mesh axis (mesh order).

    rule None (an unknown op) allows only replicated options. Raises ValueError for options that `combines` rejects.
    """
    if not options:
        return LocalCall(node.op, node.args, node.kwargs)
    if rule and not combines(rule, options, axis_sizes):
        raise ValueError(f"{node.op}: options {[o.label for o in options]} do not combine on axes of {axis_sizes}")
    in_places, out_places = tensor_placements(options)
    call = Call.of(node, inputs)
    local_in = tuple(local_shape(m.shape, p, axis_sizes) for m, p in zip(inputs, in_places, strict=True))
    local_out = tuple(local_shape(m.shape, p, axis_sizes) for m, p in zip(node.outputs, out_places, strict=True))
    lowering = _lowering(call, rule, options, out_places, axis_sizes) if rule else None
    changed = local_in != tuple(m.shape for m in inputs) or local_out != tuple(m.shape for m in node.outputs)
    rewrite = REWRITES.get(call.packet)
    if not changed or rewrite is None or not node.op.startswith("aten."):
        return LocalCall(node.op, node.args, node.kwargs, lowering)
    op, replaced = rewrite(call, local_in, local_out)
    args, kwargs = replace_arguments(node, replaced)
    return LocalCall(op, args, kwargs, lowering)


def _lowering(
    call: Call,
    rule: Rule,
    options: tuple[AxisOption, ...],
    out_places: tuple[Placements, ...],
    axis_sizes: tuple[int, ...],
) -> LoweringCall | None:
    """Return the lowering that the options name, or the one that the op always needs ("*")."""
    always = rule.lowerings.get("*")
    names = {option.lowering for option in options if option.lowering} | ({always.name} if always else set())
    if not names:
        return None
    if len(names) > 1:
        raise ValueError(f"{call.node.op} needs the lowerings {sorted(names)} at once")
    (name,) = names
    axes = tuple(i for i, option in enumerate(options) if option.lowering == name)
    if name == "mean":
        return LoweringCall(name, axes, divisor=math.prod(axis_sizes[i] for i in axes))
    if name == "cross_entropy":
        classes = {factor for factor, lowering in rule.lowerings.items() if lowering.contiguous}
        return LoweringCall(name, tuple(i for i in axes if options[i].label in classes))
    if name == "attention":
        dims, shape = _probabilities(call, rule)
        layout = tuple(_factor_shard(rule, dims, o, n) for o, n in zip(options, axis_sizes, strict=True))
        return LoweringCall(name, layout_shape=shape, layout=layout)
    if name in ("dropout", "draw", "arange"):
        layout = tuple(p if p.is_shard else R for p in out_places[0])
        return LoweringCall(name, layout_shape=call.outputs[0].shape, layout=layout)
    joint = rule.joint(options[axes[0]].label)
    return LoweringCall(name, axes, is_striped=joint is not None and joint.is_striped)


def _probabilities(call: Call, rule: Rule) -> tuple[tuple[tuple[str, ...], ...], Shape]:
    """Return the factors and global shape of an attention's probabilities [..., H, S, T]."""
    k = call.tensor("key")
    return (*rule.outputs[0][:-1], rule.inputs[k.index][-2]), (*call.outputs[0].shape[:-1], k.shape[-2])


def _factor_shard(rule: Rule, dims: tuple[tuple[str, ...], ...], option: AxisOption, axis_size: int) -> Placement:
    """Return the placement of a tensor inside the op under an option that shards a factor; R if it lacks the factor."""
    for factor, sections in rule.sharded_by(option.label, axis_size):
        shard = find_factor(rule, dims, factor, sections)
        if shard:
            return shard
    return R


def replace_arguments(node: Node, replaced: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Return the node's args and kwargs with arguments replaced by schema name; new ones become kwargs."""
    op = find_op(node.op)
    names = [a.name for a in op._schema.arguments] if op is not None else []
    args = tuple(replaced.get(names[i], value) if i < len(names) else value for i, value in enumerate(node.args))
    kwargs = dict(node.kwargs)
    kwargs.update({n: v for n, v in replaced.items() if n not in names[: len(node.args)]})
    return args, tuple(kwargs.items())


Rewrite = Callable[[Call, tuple[Shape, ...], tuple[Shape, ...]], tuple[str, dict[str, Any]]]
"""(call, local input shapes, local output shapes) -> the op to call, and the changed arguments by name."""


def _sizes(argument: str) -> Rewrite:
    """Rewrite ops whose argument is the output's shape. A -1 stays: torch infers it."""

    def rewrite(call: Call, _: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
        sizes = call[argument]
        local = tuple(-1 if old == -1 else new for old, new in zip(sizes, out[0], strict=True))
        return call.node.op, {argument: local}

    return rewrite


def _unflatten(call: Call, _: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    dim = normal_dim(call["dim"], len(call.inputs[0].shape))
    sizes = call["sizes"]
    local = out[0][dim : dim + len(sizes)]
    return call.node.op, {"sizes": tuple(-1 if old == -1 else new for old, new in zip(sizes, local, strict=True))}


def _split(call: Call, _: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    dim = normal_dim(call["dim"], len(call.inputs[0].shape))
    name = "split_sizes" if "split_sizes" in call.arguments else "split_size"
    if isinstance(call[name], int):
        return call.node.op, {name: out[0][dim]}
    return call.node.op, {name: tuple(shape[dim] for shape in out)}


def _slice(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    dim, start, step = slice_bounds(call)
    length, local = call.outputs[0].shape[dim], out[0][dim]
    if local == length:
        return call.node.op, {}
    begin = start // length * local  # only whole sections are sharded, see shape.slice_
    if "length" in call.arguments:
        return call.node.op, {"start": begin, "length": local}
    return call.node.op, {"start": begin, "end": begin + local}


def _repeat(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    source = (1,) * (len(out[0]) - len(inputs[0])) + inputs[0]
    return call.node.op, {"repeats": tuple(m // n for n, m in zip(source, out[0], strict=True))}


def _repeat_interleave(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    dim = normal_dim(call["dim"], len(out[0]))
    output_size = {} if call.get("output_size") is None else {"output_size": out[0][dim]}
    return call.node.op, {"repeats": out[0][dim] // inputs[0][dim], **output_size}


def _convolution(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    x, weight = call.tensor("input"), call.tensor("weight")
    channels = inputs[x.index][1 - len(weight.shape)]
    return call.node.op, {"groups": channels // inputs[weight.index][1]}


def _transposed_convolution(
    call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]
) -> tuple[str, dict[str, Any]]:
    weight = call.tensor("weight")
    return call.node.op, {"groups": out[0][1 - len(weight.shape)] // inputs[weight.index][1]}


def _group_norm(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    return call.node.op, {"num_groups": call["num_groups"] * out[0][1] // call.outputs[0].shape[1]}


def _resampled(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    output_size = call.get("output_size")
    return call.node.op, {} if output_size is None else {"output_size": out[0][len(out[0]) - len(output_size) :]}


def _squeeze(call: Call, inputs: tuple[Shape, ...], out: tuple[Shape, ...]) -> tuple[str, dict[str, Any]]:
    """Name the dims to squeeze, because a dim of local size 1 must stay if its global size is not 1."""
    return "aten.squeeze.dims", {"dim": squeezed_dims(call)}


REWRITES: Mapping[str, Rewrite] = {
    **{name: _sizes(argument) for name, argument in SHAPES.items() if name not in DRAWN},
    "_unsafe_view": _sizes("size"),
    "unflatten": _unflatten,
    "split": _split,
    "unsafe_split": _split,
    "split_with_sizes": _split,
    **{f"conv_transpose{n}d": _transposed_convolution for n in (1, 2, 3)},
    "slice": _slice,
    "narrow": _slice,
    "repeat": _repeat,
    "repeat_interleave": _repeat_interleave,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "group_norm": _group_norm,
    **{f"{kind}{n}d": _resampled for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)},
    "squeeze": _squeeze,
}
