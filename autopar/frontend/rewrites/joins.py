"""Simplify joins of tensors and cuts of the results. Both passes take the flat graph and change it in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.frontend.fx_import import FlatGraph
from autopar.frontend.rewrites.gradient_flow import reached
from autopar.ir.graph import Node, Ref, TensorMeta
from autopar.ir.operators import arguments_of

_CAT = "aten.cat.default"

Piece = tuple[Ref, int, int]
"""A tensor between two positions of a dim."""


def drop_cut_joins(flat: FlatGraph) -> None:
    """Cut the joined tensors instead of their join. So a tensor that is made empty and then written part by part
    becomes the join of these parts.

    Nothing changes where no cut would read a parameter any more: its gradient of zeros would become None.
    """
    metas, before, nodes = flat.metas(), reached(flat), flat.nodes
    flat.nodes = list(nodes)
    pieces: dict[tuple[Ref, int], list[Piece]] = {}
    renamed: dict[Ref, Ref] = {}
    for position, node in enumerate(nodes):
        if node.op not in (_CAT, "aten.slice.Tensor", "aten.select.int"):
            continue
        dim = arguments_of(node)["dim"] % len(metas[node.inputs[0]].shape)
        joined_pieces = _pieces(node, dim, pieces, metas)
        if not joined_pieces:
            continue
        if node.op == "aten.select.int":
            flat.nodes[position] = replace(node, args=(joined_pieces[0][0], dim, joined_pieces[0][1]), kwargs=())
            continue
        pieces[Ref(node.name), dim] = joined_pieces
        refs = tuple(ref for ref, _, _ in joined_pieces)
        is_whole = all(_whole(ref, dim, metas) == [(ref, *at)] for ref, *at in joined_pieces)
        if is_whole and len(joined_pieces) == 1:
            renamed[Ref(node.name)] = refs[0]
        elif is_whole and refs != node.inputs:
            flat.nodes[position] = replace(node, op=_CAT, args=(refs, dim), kwargs=())
        elif not is_whole and len(joined_pieces) == 1:
            flat.nodes[position] = replace(
                node, op="aten.slice.Tensor", args=(refs[0], dim, *joined_pieces[0][1:]), kwargs=()
            )
    loss = flat.loss
    flat.substitute(renamed)
    if (before - reached(flat)) & set(flat.parameters):
        flat.nodes, flat.loss = nodes, loss


def _pieces(
    node: Node, dim: int, pieces: dict[tuple[Ref, int], list[Piece]], metas: dict[Ref, TensorMeta]
) -> list[Piece]:
    """Return the pieces that a call joins along `dim`, or cuts from a join; nothing for any other call."""
    arguments = arguments_of(node)
    if "tensors" in arguments:
        joined, rank = arguments["tensors"], len(node.meta.shape)
        # A piece of another rank is the empty tensor that `cat` leaves out; one of another dtype is promoted.
        if any((len(metas[part].shape), metas[part].dtype) != (rank, node.meta.dtype) for part in joined):
            return []
        return [piece for part in joined for piece in pieces.get((part, dim), _whole(part, dim, metas))]
    source = arguments["self"]
    if (source, dim) not in pieces:
        return []
    if "index" in arguments:
        at = arguments["index"] % metas[source].shape[dim]
        kept = range(at, at + 1)
    else:
        kept = range(metas[source].shape[dim])[slice(arguments["start"], arguments["end"], arguments["step"])]
    return list(_cut(pieces[source, dim], kept.start, kept.stop)) if kept.step == 1 else []


def _whole(ref: Ref, dim: int, metas: dict[Ref, TensorMeta]) -> list[Piece]:
    return [(ref, 0, metas[ref].shape[dim])]


def _cut(pieces: list[Piece], start: int, end: int) -> Iterator[Piece]:
    """Yield the pieces between two positions of joined pieces."""
    for ref, first, last in pieces:
        length = last - first
        if max(start, 0) < min(end, length):
            yield ref, first + max(start, 0), first + min(end, length)
        start, end = start - length, end - length


class _Joins:
    """Joins along one dim by their pieces, read from one end: a tree with a branch per tensor."""

    def __init__(self) -> None:
        self.result: Ref | None = None
        self.longer: dict[Ref, _Joins] = {}

    def longest(self, refs: tuple[Ref, ...]) -> tuple[int, Ref] | None:
        """Return the result of the longest join of at least two tensors that begins `refs`, and the number of its
        pieces.
        """
        longest_join, at = None, self
        for count, ref in enumerate(refs, 1):
            if ref not in at.longer:
                break
            at = at.longer[ref]
            if at.result is not None:
                longest_join = count, at.result
        return longest_join

    def add(self, refs: tuple[Ref, ...], result: Ref) -> None:
        """Register a join, which later joins may begin with."""
        at = self
        for ref in refs:
            at = at.longer.setdefault(ref, _Joins())
        at.result = at.result or result


def nest_joins(flat: FlatGraph) -> None:
    """Replace the pieces of an earlier join at either end of a join by that join's result.

    A loop that writes row after row reads all earlier rows in each turn: every row would be read by all later turns,
    and the decisions for one join would grow with the loop. Values are the same; gradients are summed turn by turn, as
    autograd sums them through a tensor that is written to in place.
    """
    metas = flat.metas()
    first: dict[int, _Joins] = {}
    last: dict[int, _Joins] = {}
    for position, node in enumerate(flat.nodes):
        if node.op != _CAT:
            continue
        kinds = {(len(metas[ref].shape), metas[ref].dtype) for ref in node.inputs}
        is_exact = node.meta.requires_grad == any(metas[ref].requires_grad for ref in node.inputs)
        if kinds != {(len(node.meta.shape), node.meta.dtype)} or len(node.inputs) < 2 or not is_exact:
            continue
        dim = arguments_of(node)["dim"] % len(node.meta.shape)
        ways = ((first.setdefault(dim, _Joins()), 1), (last.setdefault(dim, _Joins()), -1))
        joins = [(tree.longest(node.inputs[::step]), step) for tree, step in ways]
        for tree, step in ways:
            tree.add(node.inputs[::step], Ref(node.name))
        best, step = max(joins, key=lambda join: join[0][0] if join[0] else 0)
        if best is not None and best[0] < len(node.inputs):
            count, result = best
            refs = (result, *node.inputs[count:]) if step > 0 else (*node.inputs[:-count], result)
            flat.nodes[position] = replace(node, args=(refs, dim), kwargs=())
