"""The calls of a flat graph in the form that patterns of calls match (codegen/fusion/template.py).

A target is an operator's name without namespace and overload, and its arguments are all of its schema's, in order. A
cast between floating dtypes, which only rounds, is called `cast`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.frontend.fx_import import FlatGraph
from autopar.ir.graph import Node, Ref, TensorMeta, base_name, map_refs
from autopar.ir.operators import arguments_of
from codegen.fusion import Match, matches
from codegen.fusion.template import Bound, Pattern
from codegen.program import Call, TensorType, Var


def matches_in(flat: FlatGraph, pattern: Pattern) -> dict[str, Match]:
    """Return the matches by the name of their last call. No call outside a match reads its intermediate results."""
    metas, read = flat.metas(), {ref for node in flat.nodes for ref in node.inputs} | {flat.loss}
    body = tuple(_call(node, metas, read) for node in flat.nodes)
    return {flat.nodes[match.last].name: match for match in matches((pattern,), body, (_variable(flat.loss, metas),))}


def ref_of(bound: Bound) -> Ref:
    """Return the tensor that a name of the pattern stands for."""
    return Ref(*bound.type.tensor)


def _variable(ref: Ref, metas: Mapping[Ref, TensorMeta]) -> Var:
    meta = metas[ref]
    return Var(f"{ref.node}:{ref.index}", TensorType(meta.shape, str(meta.dtype), tensor=(ref.node, ref.index)))


def _call(node: Node, metas: Mapping[Ref, TensorMeta], read: Collection[Ref]) -> Call:
    """Return a call, without results that nothing reads."""
    refs = (Ref(node.name, index) for index in range(len(node.outputs)))
    results = tuple(_variable(ref, metas) for ref in refs if ref in read)
    arguments = tuple(arguments_of(node).values()) or (node.args, *node.kwargs)  # an operator that torch does not have
    args = map_refs(arguments, lambda ref: _variable(ref, metas))
    return Call("cast" if _rounds(node, metas) else base_name(node.op), args, (), results)


def _rounds(node: Node, metas: Mapping[Ref, TensorMeta]) -> bool:
    is_cast = base_name(node.op) in ("to", "to_copy")
    return is_cast and all(meta.dtype.is_floating_point for meta in (metas[node.inputs[0]], node.meta))
