"""Refuse effects in a traced graph that a generated program would not repeat, with the user's line.

Each check takes the flat graph after dead calls are gone, so that calls without effect on training are allowed.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import TraceError
from autopar.frontend.fx_import import FlatGraph
from autopar.frontend.trace_modes.as_strided import refused_strides
from autopar.frontend.user_line import user_line
from autopar.ir.graph import Node, Ref, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.schemas import find_op, is_seeded
from autopar.operators.traits import DRAWN, ONE_DTYPE


def at(flat: FlatGraph, node: Node) -> str:
    """Return the place of a call as messages print it."""
    line = user_line(flat.lines.get(node.name))
    return f" at {line}" if line else f" in {node.module}" if node.module else ""


def refuse_effects(flat: FlatGraph) -> None:
    """Raise TraceError for values taken out of tensors, strides, random numbers, sums per batch, mixed products."""
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
                "forward multiplies tensors of different dtypes, which torch refuses when the model runs",
                values=f"{node.op} of {' and '.join(sorted(str(d) for d in dtypes))}{at(flat, node)}",
                alternatives="pass inputs of the parameters' dtype, or cast in forward",
            )


def refused_random(op: str, place: str) -> TraceError:
    """Return the error for an operator that draws random numbers."""
    return TraceError(
        "forward draws random numbers that no parallel plan can draw as one process does",
        values=f"{op}{place}",
        alternatives=[
            "use another distribution: uniform, normal, exponential and Bernoulli numbers, integers, and draws made "
            "from these (dropout, Gumbel, multinomial) are alike under every plan",
            "pass random tensors as inputs of the batch",
        ],
    )


def draws(overload: Any) -> bool:
    """Return whether an operator of torch may draw random numbers, except by keys among its arguments."""
    if not isinstance(overload, torch._ops.OpOverload) or not is_seeded(overload):
        return False
    return overload.namespace != "aten" or base_name(str(overload)) not in DRAWN


def is_random(node: Node) -> bool:
    """Return whether the call draws random numbers, except by a key among its arguments."""
    if not draws(find_op(node.op)):
        return False
    arguments = arguments_of(node)
    chance, is_training = (
        arguments.get("dropout", arguments.get("p", 1.0)),
        arguments.get("train", arguments.get("training", True)),
    )
    return bool(is_training) and chance != 0.0


def _refuse_lookup(flat: FlatGraph, node: Node) -> None:
    arguments = arguments_of(node) if base_name(node.op).startswith("embedding") else {}
    if arguments.get("scale_grad_by_freq"):
        raise TraceError(
            "scale_grad_by_freq divides gradients by counts over the whole batch, which no rank sees",
            values=f"{node.op}{at(flat, node)}",
            alternatives="set scale_grad_by_freq=False",
        )
    if arguments.get("sparse"):
        raise TraceError(
            "an embedding has sparse gradients, but the program's optimizer would get dense ones",
            values=f"{node.op}{at(flat, node)}",
            alternatives="set sparse=False",
        )


def _refuse_statistics(flat: FlatGraph, node: Node) -> None:
    """Refuse instance norm that updates running statistics: batch means that its results do not show."""
    arguments = arguments_of(node) if base_name(node.op) == "instance_norm" else {}
    if arguments.get("use_input_stats") and isinstance(arguments.get("running_mean"), Ref) and arguments["momentum"]:
        raise TraceError(
            "instance norm updates running statistics inside of the operator",
            values=f"{arguments['running_mean'].node}{at(flat, node)}",
            alternatives="call torch.nn.functional.instance_norm or a module of torch.nn, which autopar follows",
        )


def refuse_untrained(flat: FlatGraph) -> None:
    """Raise TraceError unless the loss is a number that depends on a trained parameter."""
    if flat.metas()[flat.loss].requires_grad:
        return
    trained = [p.name for p in flat.parameters.values() if p.meta.requires_grad and not p.is_buffer]
    if not trained:
        raise TraceError(
            "the model has nothing to train",
            values=f"no parameter of {sum(not p.is_buffer for p in flat.parameters.values())} requires a gradient",
            alternatives="call requires_grad_(True) on the parameters to train",
        )
    raise TraceError(
        "the loss depends on no trained parameter",
        values=f"{len(trained)} parameters have requires_grad=True, such as {trained[0]}",
        alternatives="remove the detach(), torch.no_grad() or argmax that cuts the loss off from the parameters",
    )
