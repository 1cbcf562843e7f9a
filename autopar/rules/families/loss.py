"""Rules of cross-entropy, negative log-likelihood and margins over classes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.graph import Node, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.ir.placement import R
from autopar.rules.call import Call, Groups, Operand, make_rule
from autopar.rules.rule import Lowering, Rule

NONE, MEAN, SUM = 0, 1, 2


def cross_entropy(call: Call) -> Rule:
    """self [N, C, ...] or [C], target [N, ...] class numbers or self-shaped probabilities.

    mean: tokens are contracted; each rank divides its sum by the number of valid tokens of all ranks (the lowering
    needs that number, because ignored targets are unevenly distributed). Sharded classes: the lowering reduces inside,
    result R. Class weights, probability targets and reduction "none" block the classes. Weights also block the tokens
    of a mean, whose denominator is then a sum of weights.
    """
    x, target = call.tensor("self"), call.tensor("target")
    reduction: int = call["reduction"]
    names = [f"n{i}" for i in range(len(x.shape) - 1)]
    sizes = dict(zip(names, (*x.shape[:1], *x.shape[2:]), strict=bool(names))) if names else {}
    sizes["c"] = x.shape[1] if names else x.shape[0]
    x_dims = [[names[0]], ["c"], *([f] for f in names[1:])] if names else [["c"]]
    by_probability = target.meta.dtype.is_floating_point
    groups: dict[int, Groups] = {
        x.index: x_dims,
        target.index: x_dims if by_probability else [[f] for f in names],
    }
    weight = call.get("weight")
    weighted = isinstance(weight, Operand)
    if isinstance(weight, Operand):
        groups[weight.index] = [["c"]]
    plain = not by_probability and not weighted
    blocked: set[str] = set()
    lowerings: dict[str, Lowering] = {}
    if reduction == MEAN:
        if by_probability:
            # torch divides by the number of rows, with or without weights.
            lowerings = {f: Lowering("mean") for f in names}
        elif plain:
            lowerings = {f: Lowering("cross_entropy") for f in names}
        else:
            blocked |= set(names)
    if plain and reduction in (MEAN, SUM):
        lowerings["c"] = Lowering("cross_entropy", outputs=(R,), contiguous=True)
    else:
        blocked.add("c")
    return make_rule(
        call,
        [groups[i] for i in range(len(groups))],
        [[[f] for f in names] if reduction == NONE else []],
        sizes,
        blocked=blocked,
        lowerings=lowerings,
    )


def nll(call: Call) -> Rule:
    """nll_loss on log-probabilities [N, C, ...]: linear in them; a mean's count of valid targets blocks the tokens."""
    x, target = call.tensor("self"), call.tensor("target")
    names = [f"n{i}" for i in range(len(x.shape) - 1)]
    sizes = dict(zip(names, (*x.shape[:1], *x.shape[2:]), strict=True)) | {"c": x.shape[1] if names else x.shape[0]}
    groups: dict[int, Groups] = {
        x.index: [[names[0]], ["c"], *([f] for f in names[1:])] if names else [["c"]],
        target.index: [[f] for f in names],
    }
    weight = call.get("weight")
    if isinstance(weight, Operand):
        groups[weight.index] = [["c"]]
    reduction: int = call["reduction"]
    blocked = {"c", *(names if reduction == MEAN else ())}
    out = [[f] for f in names] if reduction == NONE else []
    return make_rule(call, [groups[i] for i in range(len(groups))], [out], sizes, blocked=blocked, linear=("self",))


def margin(call: Call) -> Rule:
    """multi_margin_loss and multilabel_margin_loss of [N, C] or [C]: rows are free, a row's classes are blocked.

    A mean is over rows, whatever the classes' weights.
    """
    x, target = call.tensor("self"), call.tensor("target")
    names = ["n", "c"][-len(x.shape) :]
    rows, sizes = names[:-1], dict(zip(names, x.shape, strict=True))
    groups: dict[int, Groups] = {x.index: [[f] for f in names]}
    groups[target.index] = [[f] for f in (names if target.shape == x.shape else rows)]
    weight = call.get("weight")
    if isinstance(weight, Operand):
        groups[weight.index] = [["c"]]
    lowerings = {f: Lowering("mean") for f in rows} if call["reduction"] == MEAN else {}
    out = [[f] for f in rows] if call["reduction"] == NONE else []
    tensors = [groups[i] for i in range(len(groups))]
    return make_rule(call, tensors, [out], sizes, blocked={"c"}, lowerings=lowerings)


def is_plain_cross_entropy(node: Node, inputs: Sequence[TensorMeta], any_dims: bool = False) -> bool:
    """Whether the runtime's own cross-entropy applies: class-number targets, no class weights, [N, C], mean or sum.

    any_dims: also [N, C, ...] and [C], which it supports once the classes are the last of two dims.
    """
    if base_name(node.op) != "cross_entropy_loss":
        return False
    arguments = arguments_of(node)
    by_class = not inputs[1].dtype.is_floating_point and (any_dims or len(inputs[0].shape) == 2)
    return by_class and arguments["weight"] is None and arguments["reduction"] in (MEAN, SUM)


TABLE = {
    "aten.cross_entropy_loss": cross_entropy,
    "aten.nll_loss": nll,
    "aten.nll_loss_nd": nll,
    "aten.nll_loss2d": nll,
    "aten.multi_margin_loss": margin,
    "aten.multilabel_margin_loss": margin,
}
