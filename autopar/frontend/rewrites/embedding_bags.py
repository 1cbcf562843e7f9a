"""Rewrite `EmbeddingBag` bags of equal size, which it flattens to one list of ids, as rows of ids.

`embedding_bag` of ids [N, k] is called with the flat list of N k ids and the starts of the bags, 0, k, 2 k ... Cutting
the batch cuts rows. The list cannot be cut, since a rank's bags start at other places than in the whole list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import RESHAPES
from autopar.rules.families.lookup import BAGS

_MODES = ("sum", "mean", "max")


def write_bags(flat: FlatGraph, constants: Mapping[Ref, torch.Tensor]) -> None:
    """Rewrite every such call whose bags all have k ids. constants: values of nodes that depend on no input."""
    if not any(_is_flat(node) for node in flat.nodes):
        return
    metas, nodes = flat.metas(), flat.nodes
    made_by, taken = {node.name: node for node in nodes}, {ref.node for ref in metas}
    read = {ref for node in nodes for ref in node.inputs} | {flat.loss}
    flat.nodes = []
    for node in nodes:
        arguments = arguments_of(node) if _is_flat(node) else {}
        is_alone = not any(Ref(node.name, index) in read for index in range(1, len(node.outputs)))
        size = _size(arguments, constants, metas) if arguments and is_alone else 0
        flat.nodes += _Bags(size, metas, made_by, taken).calls(node, arguments) if size else [node]


def _is_flat(node: Node) -> bool:
    return base_name(node.op) in ("embedding_bag", "_embedding_bag") and node.op != BAGS


def _size(arguments: Mapping[str, Any], constants: Mapping[Ref, torch.Tensor], metas: Mapping[Ref, TensorMeta]) -> int:
    """Return the ids per bag; 0 where bags differ in size, or where a gradient depends on how often an id occurs."""
    starts = constants.get(arguments["offsets"])
    count = metas[arguments["indices"]].shape[0]
    if starts is None or not len(starts) or arguments["include_last_offset"] or arguments["scale_grad_by_freq"]:
        return 0
    size, rest = divmod(count, len(starts))
    return 0 if rest or starts.tolist() != list(range(0, count, max(size, 1))) else size


@dataclass(frozen=True, slots=True)
class _Bags:
    """A call with bags of `size` ids. made_by: calls by name. taken: names."""

    size: int
    metas: Mapping[Ref, TensorMeta]
    made_by: Mapping[str, Node]
    taken: set[str]

    def calls(self, node: Node, arguments: Mapping[str, Any]) -> list[Node]:
        """Return the call on rows, after the views that make rows of a flat list."""
        weights, ignored, views = arguments.get("per_sample_weights"), arguments.get("padding_idx"), list[Node]()
        ids = self.rows(arguments["indices"], views)
        kwargs: dict[str, Any] = {"mode": _MODES[arguments["mode"]]}
        kwargs |= {} if weights is None else {"per_sample_weights": self.rows(weights, views)}
        kwargs |= {} if ignored in (None, -1) else {"padding_idx": ignored}
        args, result = (ids, arguments["weight"]), node.outputs[:1]
        return [*views, replace(node, op=BAGS, args=args, kwargs=tuple(kwargs.items()), outputs=result)]

    def rows(self, ref: Ref, views: list[Node]) -> Ref:
        """Return a list [N k] as rows [N, k]."""
        maker = self.made_by.get(ref.node)
        meta = replace(self.metas[ref], shape=(self.metas[ref].shape[0] // self.size, self.size))
        if maker is not None and base_name(maker.op) in RESHAPES and self.metas[maker.inputs[0]].shape == meta.shape:
            return maker.inputs[0]
        name = unused_name("bags", self.taken)
        self.taken.add(name)
        views.append(
            Node(name=name, op="aten.view.default", args=(ref, meta.shape), kwargs=(), outputs=(meta,), module="")
        )
        return Ref(name)
