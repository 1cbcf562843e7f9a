"""Rewrite losses whose mean divides by other counts than rows as a sum over a sum.

`nll_loss`, cross-entropy with class weights and cross-entropy over more than one position per row divide by the weights
of the targets that count. As two sums they can be cut over ranks and over micro-batches, since the divisor follows from
the batch alone. Plain cross-entropy over [N, C] stays: the run time has one that takes the count from outside.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.operators.schemas import argument_names, find_op
from autopar.operators.traits import CLASS_LOSSES

_MEAN, _SUM = 1, 2


def split_means(flat: FlatGraph) -> None:
    """Rewrite every such mean as `sum / (sum of the weights of the targets)`, as torch defines it."""
    if not any(base_name(node.op) in CLASS_LOSSES for node in flat.nodes):
        return
    metas = flat.metas()
    taken = {ref.node for ref in metas}
    nodes: list[Node] = []
    for node in flat.nodes:
        nodes += _Split(node, metas, taken).nodes() if base_name(node.op) in CLASS_LOSSES else [node]
    flat.nodes = nodes


class _Split:
    """The calls in place of one loss."""

    def __init__(self, node: Node, metas: dict[Ref, TensorMeta], taken: set[str]) -> None:
        self.node, self.metas, self.taken = node, metas, taken
        op = find_op(node.op)
        assert op is not None
        self.names = argument_names(op)
        defaults: dict[str, Any] = {"weight": None, "reduction": _MEAN, "ignore_index": -100}
        self.arguments = defaults | dict(zip(self.names, node.args, strict=False)) | dict(node.kwargs)
        self.calls: list[Node] = []

    def nodes(self) -> list[Node]:
        x, target, weight = (self.arguments[name] for name in ("self", "target", "weight"))
        shape, targets = self.metas[x].shape, self.metas[target]
        is_plain = "cross_entropy" in self.node.op and weight is None and len(shape) == 2
        by_class = len(shape) > 1 and not targets.dtype.is_floating_point
        if self.arguments["reduction"] != _MEAN or is_plain or not by_class:
            return [self.node]
        total = self.make("sum", self.node.op, *self.summed(), meta=self.node.meta)
        count = self.weights_of_targets(target, targets, weight)
        return [*self.calls, replace(self.node, op="aten.div.Tensor", args=(total, count), kwargs=())]

    def summed(self) -> tuple[Any, ...]:
        """Return the loss' arguments, for a sum."""
        arguments = {**self.arguments, "reduction": _SUM}
        return tuple(arguments[name] for name in self.names if name in arguments)

    def weights_of_targets(self, target: Ref, meta: TensorMeta, weight: Ref | None) -> Ref:
        """Return the sum of the weights of all targets that are not ignored; their number if there are no weights."""
        mask = TensorMeta(meta.shape, torch.bool)
        valid = self.make("valid", "aten.ne.Scalar", target, self.arguments["ignore_index"], meta=mask)
        if weight is None:
            return self.make("count", "aten.sum.default", valid, meta=TensorMeta((), torch.int64))
        classes = self.make("classes", "aten.mul.Tensor", target, valid, meta=TensorMeta(meta.shape, meta.dtype))
        weight_meta = self.metas[weight]
        picked = TensorMeta(meta.shape, weight_meta.dtype, weight_meta.requires_grad)
        weights = self.make("weights", "aten.index.Tensor", weight, (classes,), meta=picked)
        kept = self.make("kept", "aten.mul.Tensor", weights, valid, meta=picked)
        return self.make(
            "weight", "aten.sum.default", kept, meta=TensorMeta((), weight_meta.dtype, weight_meta.requires_grad)
        )

    def make(self, word: str, op: str, *args: Any, meta: TensorMeta) -> Ref:
        name = unused_name(f"{self.node.name}_{word}", self.taken, first=2)
        self.taken.add(name)
        self.calls.append(Node(name=name, op=op, args=args, kwargs=(), outputs=(meta,), module=self.node.module))
        return Ref(name)
