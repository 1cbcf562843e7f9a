"""Calls that a sharded operator needs instead of the plain one: what the rules' lowering names become.

Each takes the local call and returns the statement that the program makes. The run-time functions are in
codegen/runtime; their names here are `runtime.<function>`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.graph import Node, Ref
from autopar.placement import R
from autopar.rules.localize import LocalCall, local_call
from autopar.rules.rule import AxisOption, find_factor
from autopar.saved import base_name
from autopar.strategies import Operator, Option
from codegen.program import Call, Raw, Statement

if TYPE_CHECKING:
    from autopar.lower import _Lowering

_MEAN = 1


def lower_call(scope: _Lowering, node: Node, operator: Operator, option: Option, local: LocalCall, call: Call) -> Statement:
    """The statement for one call."""
    lowering = local.lowering
    if not option.axes:
        lowering = _on_one_rank(node, operator)
    name = base_name(node.op)
    if name == "cross_entropy_loss" and _is_plain_cross_entropy(operator):
        return _cross_entropy(scope, node, operator, lowering.axes if lowering and lowering.name == "cross_entropy" else (), call)
    if lowering is None:
        return call
    if lowering.name == "mean":
        return replace(call, divisor=lowering.divisor)
    if lowering.name == "vocab_embedding":
        weight, ids, *rest = call.args
        padding = (("padding_idx", rest[0]),) if rest and rest[0] not in (None, -1) else ()
        axis = Raw(scope.shared.mesh.axes[lowering.axes[0]])
        return replace(call, target="runtime.vocab_embedding", args=(ids, weight, axis), kwargs=padding)
    layout = scope.layout(lowering.layout_shape, lowering.layout)
    if lowering.name == "arange":
        return _arange(call, layout)
    number = scope.num_dropout_calls
    scope.num_dropout_calls += 1
    where: tuple[tuple[str, Any], ...] = (("call", number), ("layout", Raw(layout)))
    if not _starts_with_batch(operator):
        where = (*where, ("batched", False))
    if lowering.name == "dropout":
        return replace(call, target="self.same_dropout", args=call.args[:2], kwargs=where)
    if lowering.name == "attention":
        return replace(call, target="self.dropout_attention", kwargs=(*call.kwargs, *where))
    raise AssertionError(f"no statement for lowering {lowering.name}")


def _starts_with_batch(operator: Operator) -> bool:
    """Whether dim 0 of the result is the batch, or merged from it and more."""
    if operator.batch is None:
        return False
    placement = find_factor(operator.rule, operator.rule.outputs[0], *operator.batch)
    return placement is not None and placement.dim == 0 and placement.sections == 1


def _on_one_rank(node: Node, operator: Operator) -> Any:
    """The lowering that a call needs even where nothing is sharded: a rank alone is an axis of one."""
    option = AxisOption("R", (R,) * len(operator.inputs), (R,) * len(node.outputs))
    lowering = local_call(node, operator.rule, (option,), operator.inputs, (1,)).lowering
    return None if lowering is None else replace(lowering, layout=())


def _is_plain_cross_entropy(operator: Operator) -> bool:
    """Class-number targets, no class weights, [N, C] logits, averaged or summed."""
    arguments = _cross_entropy_arguments(operator.node)
    targets = operator.inputs[1]
    return (
        arguments["weight"] is None
        and not targets.dtype.is_floating_point
        and len(operator.inputs[0].shape) == 2
        and arguments["reduction"] in (1, 2)
    )


def _cross_entropy_arguments(node: Node) -> dict[str, Any]:
    names = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")
    defaults = {"weight": None, "reduction": _MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    return defaults | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _cross_entropy(scope: _Lowering, node: Node, operator: Operator, axes: tuple[int, ...], call: Call) -> Call:
    arguments = _cross_entropy_arguments(node)
    if arguments["reduction"] == _MEAN:
        divisor = Raw(f"num_targets[{scope.loss_index(node, Ref(node.inputs[1].node, node.inputs[1].index), arguments['ignore_index'])}]")
    else:
        divisor = Raw("1.0")
    kwargs: list[tuple[str, Any]] = []
    if arguments["ignore_index"] != -100:
        kwargs.append(("ignore_index", arguments["ignore_index"]))
    if axes:
        kwargs.append(("vocab_axis", Raw(scope.shared.mesh.axes[axes[0]])))
    if arguments["label_smoothing"]:
        kwargs.append(("label_smoothing", arguments["label_smoothing"]))
    return replace(call, target="runtime.cross_entropy", args=(*call.args[:2], divisor), kwargs=tuple(kwargs))


def _arange(call: Call, layout: str) -> Call:
    """start + step * (global position), in the call's dtype."""
    numbers = [a for a in call.args if isinstance(a, (int, float))]
    start, step = (0, 1) if len(numbers) < 2 else (numbers[0], numbers[2] if len(numbers) > 2 else 1)
    return replace(call, target="runtime.arange", args=(start, step, Raw(layout), Raw("self.mesh")), kwargs=call.kwargs)
