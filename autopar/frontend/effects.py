"""What a traced graph shows that a generated program would do otherwise: refused, with the user's own line.

Each check takes the flat graph after what the loss does not need is gone, so that what has no effect on training
is not held against a model.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import TraceError
from autopar.frontend.fx_import import FlatGraph
from autopar.frontend.strided import refused_strides
from autopar.frontend.user_line import user_line
from autopar.ir.graph import Node, Ref, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.schemas import find_op, is_seeded
from autopar.operators.traits import DRAWN, ONE_DTYPE


def at(flat: FlatGraph, node: Node) -> str:
    """Where a call comes from, as messages have it."""
    line = user_line(flat.lines.get(node.name))
    return f" at {line}" if line else f" in {node.module}" if node.module else ""


def refuse_effects(flat: FlatGraph) -> None:
    """Raises TraceError for values taken out of tensors, strides, random numbers, sums per batch, mixed products."""
    metas = flat.metas()
    for node in flat.nodes:
        if not node.outputs:
            raise TraceError(
                "forward takes a number out of a tensor, so its computation depends on values",
                values=f"{node.op}{at(flat, node)}",
                alternatives="keep it a tensor (no .item(), float(), int() or tolist() in forward)",
            )
        if is_random(node):
            raise refused_random(node.op, at(flat, node))
        if base_name(node.op).startswith("as_strided"):
            raise refused_strides(f"{node.op}{at(flat, node)}")
        _refuse_lookup(flat, node)
        _refuse_statistics(flat, node)
        dtypes = {metas[ref].dtype for ref in node.inputs if metas[ref].dtype.is_floating_point}
        if base_name(node.op) in ONE_DTYPE and len(dtypes) > 1:
            raise TraceError(
                "a product of tensors of different dtypes, which torch refuses when the model runs",
                values=f"{node.op} of {' and '.join(sorted(str(d) for d in dtypes))}{at(flat, node)}",
                alternatives="inputs of the parameters' dtype, or a cast in forward",
            )


def refused_random(op: str, place: str) -> TraceError:
    """The error for an operator that draws random numbers."""
    return TraceError(
        "forward draws random numbers that no parallel plan can draw as one process does",
        values=f"{op}{place}",
        alternatives=[
            "another distribution: uniform, normal, exponential and Bernoulli numbers, integers and what follows from "
            "them (dropout, Gumbel, multinomial) are drawn alike under every plan",
            "random tensors as inputs of the batch",
        ],
    )


def draws(overload: Any) -> bool:
    """Whether an operator of torch draws random numbers, or may, other than by keys of its own."""
    if not isinstance(overload, torch._ops.OpOverload) or not is_seeded(overload):
        return False
    return overload.namespace != "aten" or base_name(str(overload)) not in DRAWN


def is_random(node: Node) -> bool:
    """Whether the call draws random numbers other than by a key of its own."""
    if not draws(find_op(node.op)):
        return False
    given = arguments_of(node)
    chance, is_training = given.get("dropout", given.get("p", 1.0)), given.get("train", given.get("training", True))
    return bool(is_training) and chance != 0.0


def _refuse_lookup(flat: FlatGraph, node: Node) -> None:
    given = arguments_of(node) if base_name(node.op).startswith("embedding") else {}
    if given.get("scale_grad_by_freq"):
        raise TraceError(
            "scale_grad_by_freq divides gradients by counts over the whole batch, which no rank sees",
            values=f"{node.op}{at(flat, node)}",
            alternatives="scale_grad_by_freq=False",
        )
    if given.get("sparse"):
        raise TraceError(
            "an embedding with sparse gradients, which the program's optimiser would get dense",
            values=f"{node.op}{at(flat, node)}",
            alternatives="sparse=False",
        )


def _refuse_statistics(flat: FlatGraph, node: Node) -> None:
    """Instance norm that updates running statistics: means over the batch that its results do not show."""
    given = arguments_of(node) if base_name(node.op) == "instance_norm" else {}
    if given.get("use_input_stats") and isinstance(given.get("running_mean"), Ref) and given["momentum"]:
        raise TraceError(
            "instance norm updates running statistics inside of the operator",
            values=f"{given['running_mean'].node}{at(flat, node)}",
            alternatives="torch.nn.functional.instance_norm or a module of torch.nn, which are followed",
        )


def refuse_untrained(flat: FlatGraph) -> None:
    """Raises TraceError unless the loss is a number that depends on a trained parameter."""
    if flat.metas()[flat.loss].requires_grad:
        return
    trained = [p.name for p in flat.parameters.values() if p.meta.requires_grad and not p.is_buffer]
    if not trained:
        raise TraceError(
            "there is nothing to train",
            values=f"no parameter of {sum(not p.is_buffer for p in flat.parameters.values())} requires a gradient",
            alternatives="requires_grad_(True) on what is to be trained",
        )
    raise TraceError(
        "the loss depends on no trained parameter",
        values=f"{len(trained)} parameters have requires_grad=True, such as {trained[0]}",
        alternatives="a loss that no detach(), torch.no_grad() or argmax cuts off from the parameters",
    )
