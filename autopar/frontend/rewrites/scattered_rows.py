"""Rewrite a masked scatter of rows, by which multimodal models put image features among word embeddings.

`x.masked_scatter(mask, source)` takes elements of the source in turn: each depends on all of the mask before it, and no
rank could compute a part. If the mask selects rows of D features, rows are taken in turn: x [..., D], mask [..., 1],
source as rows [N, D] -> where(mask, rows[cumsum(mask) - 1], x).

Only the row numbers depend on the whole batch. A mask with more rows than the source raises an IndexError where torch
raises another error.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.operators.traits import REPEATS, SAME_VALUES, VIEWS


def write_scattered_rows(flat: FlatGraph) -> None:
    """Rewrite every such call, as the module docstring describes."""
    if any(base_name(node.op) == "masked_scatter" for node in flat.nodes):
        writer = _Writer(flat)
        flat.nodes = [call for node in flat.nodes for call in writer.written(node)]


class _Writer:
    def __init__(self, flat: FlatGraph) -> None:
        self.metas, self.made_by = flat.metas(), {node.name: node for node in flat.nodes}
        self.taken = {ref.node for ref in self.metas}

    def written(self, node: Node) -> list[Node]:
        """Return the calls in place of one call."""
        if base_name(node.op) != "masked_scatter" or len(node.inputs) != 3:
            return [node]
        x, mask, source = node.inputs
        *lead, width = self.metas[x].shape or (0,)
        rows_mask = mask if self.metas[mask].shape == (*lead, 1) else self.before_expansion(mask)
        if rows_mask is None or self.metas[rows_mask].shape != (*lead, 1):
            return [node]
        if self.metas[x].shape != node.meta.shape or self.metas[source].shape[-1:] != (width,):
            return [node]
        calls: list[Node] = []

        def call(op: str, args: tuple[Any, ...], shape: tuple[int, ...], of: TensorMeta) -> Ref:
            name = unused_name("rows", self.taken)
            self.taken.add(name)
            meta = replace(of, shape=shape)
            calls.append(replace(node, name=name, op=f"aten.{op}", args=args, kwargs=(), outputs=(meta,)))
            return Ref(name)

        places, source_meta = TensorMeta((), torch.int64), self.metas[source]
        number, count = math.prod(lead), source_meta.numel // width
        flat = call("reshape.default", (rows_mask, (number,)), (number,), self.metas[rows_mask])
        turns = call("cumsum.default", (flat, 0), (number,), places)
        ids = call("sub.Tensor", (turns, 1), (number,), places)
        ids = call("clamp.default", (ids, 0), (number,), places)
        ids = call("reshape.default", (ids, tuple(lead)), tuple(lead), places)
        rows = call("reshape.default", (source, (count, width)), (count, width), source_meta)
        looked_up = call("index.Tensor", (rows, (ids,)), node.meta.shape, source_meta)
        return [*calls, replace(node, op="aten.where.self", args=(rows_mask, looked_up, x), kwargs=())]

    def before_expansion(self, mask: Ref) -> Ref | None:
        """Return the mask [..., 1] of rows that this one is expanded from; None if there is none."""
        node = self.made_by.get(mask.node)
        while node is not None and base_name(node.op) in SAME_VALUES and self.metas[node.inputs[0]].dtype == torch.bool:
            node = self.made_by.get(node.inputs[0].node)
        if node is None or base_name(node.op) not in REPEATS & VIEWS:
            return None
        return node.inputs[0] if self.metas[node.inputs[0]].dtype == torch.bool else None
