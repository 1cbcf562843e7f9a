"""Allocations that autograd keeps for the backward of a scope's calls, each named once.

kept.py finds what one call keeps. A tensor that several operators keep is one allocation, and so is a view and its
base; `saved_tensors` names each allocation once, at the first node that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from autopar.costs.kept import is_view, kept
from autopar.ir.graph import Node, Ref, TensorMeta


class Saved(NamedTuple):
    """An allocation: the tensor that keeps it, and its bytes over all ranks. A view may be smaller."""

    ref: Ref
    num_bytes: int


Copy = tuple[Ref, object]
"""An allocation: its first tensor, and the placement for which it was copied since (None: the original)."""


def _is_first(node: Node, ref: Ref) -> object:
    return None


def saved_tensors(
    nodes: tuple[Node, ...],
    metas: Mapping[Ref, TensorMeta],
    parameters: frozenset[str],
    copied: Callable[[Node, Ref], object] = _is_first,
    on_cpu: bool = True,
) -> dict[str, tuple[Saved, ...]]:
    """Return for each node the allocations that it is first to keep, by Refs of its inputs or outputs.

    copied: the placement of an input that is copied for a node (as a resharded one is); None if it is not. By
    default nothing is copied, so that kept tensors do not depend on placements. on_cpu: whether the calls run on a
    CPU. A kept piece (one of q, k, v of a fused projection) keeps the whole allocation.
    """
    base: dict[Ref, Copy] = {}
    counted: set[Copy] = set()
    saved: dict[str, tuple[Saved, ...]] = {}

    def allocation(node: Node, ref: Ref) -> Copy:
        first = base.get(ref, (ref, None))
        copy = copied(node, ref) if ref.node != node.name else None
        return first if copy is None else (ref, copy)

    for node in nodes:
        if is_view(node):
            root = allocation(node, node.inputs[0])
            base |= {Ref(node.name, index): root for index in range(len(node.outputs))}
        if not any(meta.requires_grad for meta in node.outputs):
            continue
        record = kept(node, tuple(metas[ref] for ref in node.inputs), on_cpu)
        first = []
        for ref in (*(node.inputs[i] for i in record.inputs), *(Ref(node.name, i) for i in record.outputs)):
            root = allocation(node, ref)
            if root not in counted and root[0].node not in parameters:
                counted.add(root)
                # An expanded view is often copied by the reshape that follows it.
                first.append(Saved(ref, max(metas[root[0]].num_bytes, metas[ref].num_bytes)))
        saved[node.name] = tuple(first)
    return saved
