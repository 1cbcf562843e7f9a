"""Normalizations: the normalized dims are blocked, the others are free."""

from __future__ import annotations

from autopar.rules.call import Call, Groups, Operand, make_rule, normal_dim
from autopar.rules.rule import Lowering, Rule

SYNCHRONISED = ("batch_norm", "group_norm")
"""Lowerings of norms whose statistics cover elements of several ranks (codegen/runtime/batch_norm.py)."""


def trailing_norm(call: Call) -> Rule:
    """layer_norm and rms_norm over the trailing `normalized_shape` dims; native_layer_norm also returns statistics."""
    x = call.tensor("input")
    num_lead = len(x.shape) - len(call["normalized_shape"])
    names = [f"b{i}" for i in range(num_lead)] + [f"h{i}" for i in range(len(x.shape) - num_lead)]
    sizes = dict(zip(names, x.shape, strict=True))
    groups: dict[int, Groups] = {x.index: [[f] for f in names]}
    for name in ("weight", "bias"):
        value = call.get(name)
        if isinstance(value, Operand):
            groups[value.index] = [[f] for f in names[num_lead:]]
    statistics: Groups = [[f] if i < num_lead else [] for i, f in enumerate(names)]
    outputs = [groups[x.index], *(statistics for _ in call.outputs[1:])]
    return make_rule(call, [groups[i] for i in range(len(groups))], outputs, sizes, blocked=names[num_lead:])


def batch_norm(call: Call) -> Rule:
    """Channels are free with their weights and statistics, and so are batch and space.

    In training, the statistics of a sharded batch or space are summed over its ranks. Statistics per rank would equal
    torch's DistributedDataParallel, not the model on one device.
    """
    x = call.tensor("input")
    names = ["b", "c", *(f"s{i}" for i in range(len(x.shape) - 2))]
    sizes = dict(zip(names, x.shape, strict=True))
    groups: dict[int, Groups] = {x.index: [[f] for f in names]}
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = call.get(name)
        if isinstance(value, Operand):
            groups[value.index] = [["c"]]
    uses_batch = call.get("training", call.get("use_input_stats", True)) or call.get("running_mean") is None
    lowerings = {f: Lowering("batch_norm") for f in names if f != "c"} if uses_batch else {}
    return make_rule(call, [groups[i] for i in range(len(groups))], [groups[x.index]], sizes, lowerings=lowerings)


def group_norm(call: Call) -> Rule:
    """Batch, groups and space are free, with statistics summed over space; channels within a group are blocked."""
    x = call.tensor("input")
    sizes = {"b": x.shape[0], "g": call["num_groups"], "c": x.shape[1] // call["num_groups"]}
    space = [f"s{i}" for i in range(len(x.shape) - 2)]
    sizes |= dict(zip(space, x.shape[2:], strict=True))
    groups: dict[int, Groups] = {x.index: [["b"], ["g", "c"], *([s] for s in space)]}
    for name in ("weight", "bias"):
        value = call.get(name)
        if isinstance(value, Operand):
            groups[value.index] = [["g", "c"]]
    lowerings = {factor: Lowering("group_norm") for factor in space}
    tensors = [groups[i] for i in range(len(groups))]
    return make_rule(call, tensors, [groups[x.index]], sizes, blocked={"c"}, lowerings=lowerings)


def instance_norm(call: Call) -> Rule | None:
    """Rows and channels are free, space is blocked. None if it updates running statistics, which cover all rows."""
    x = call.tensor("input")
    if call["momentum"] and any(isinstance(call.get(name), Operand) for name in ("running_mean", "running_var")):
        return None
    names = ["b", "c", *(f"s{i}" for i in range(len(x.shape) - 2))]
    groups: dict[int, Groups] = {index: [["c"]] for index in range(len(call.inputs))}
    groups[x.index] = [[f] for f in names]
    sizes = dict(zip(names, x.shape, strict=True))
    return make_rule(call, [groups[i] for i in range(len(groups))], [groups[x.index]], sizes, blocked=names[2:])


def along_dim(call: Call) -> Rule:
    """softmax, log_softmax, cumsum, sort ...: the dim along which they run is blocked; outputs have the input's shape.

    cumsum is linear.
    """
    (x,) = call.inputs
    names = [f"d{i}" for i in range(len(x.shape))]
    sizes = dict(zip(names, x.shape, strict=True))
    blocked = {names[normal_dim(call["dim"], len(names))]} if names else set()
    dims = [[f] for f in names]
    linear = ("self",) if call.packet == "cumsum" else ()
    return make_rule(call, [dims], [dims for _ in call.outputs], sizes, blocked=blocked, linear=linear)


def softmax_backward(call: Call) -> Rule:
    """The gradient of softmax: linear in the result's gradient, along the same dim."""
    names = [f"d{i}" for i in range(len(call.outputs[0].shape))]
    sizes = dict(zip(names, call.outputs[0].shape, strict=True))
    blocked = {names[normal_dim(call["dim"], len(names))]} if names else set()
    dims = [[f] for f in names]
    return make_rule(call, [dims, dims], [dims], sizes, blocked=blocked, linear=("grad_output",))


TABLE = {
    "aten.layer_norm": trailing_norm,
    "aten.native_layer_norm": trailing_norm,
    "aten.rms_norm": trailing_norm,
    "aten.batch_norm": batch_norm,
    "aten.group_norm": group_norm,
    "aten.instance_norm": instance_norm,
    **{f"aten.{name}": softmax_backward for name in ("_softmax_backward_data", "_log_softmax_backward_data")},
    **{
        f"aten.{name}": along_dim
        for name in (
            "softmax",
            "_softmax",
            "log_softmax",
            "_log_softmax",
            "cumsum",
            "cumprod",
            "sort",
            "argsort",
            "logcumsumexp",
            "cummax",
            "cummin",
        )
    },
}
