"""Mixtures of experts that look up a matrix for each row, without copies of matrices.

A row's matrix is taken from the experts' weight [E, A, B] by the number of the expert that it chose, and multiplied by
that row alone (transformers' batched_mm, gpt-fast's einsum):

    bmm(x[:, None], weight[ids])                        expert_linear(x, weight, ids)[:, None]
    einsum("ta,tkab->tkb", x, weight[ids])              expert_linear(repeat_interleave(x, k, 0), weight, ids.view(-1))

The numbers are the same. A weight [E, B, A] is transposed first. No expert id may be negative, as the calls that make
them show (integer_bounds.py): a look-up would count negative ids from the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from autopar.frontend.fx_import import FlatGraph, unused_name
from autopar.frontend.rewrites.integer_bounds import integer_bounds
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import RESHAPES, SAME_VALUES
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.rules.registry import rule_for
from autopar.rules.rule import Dims, Rule

_KEEPING = RESHAPES | SAME_VALUES
"""Operators that keep integers unchanged."""


def write_chosen(flat: FlatGraph) -> None:
    """Rewrite every product of rows with the matrices that they chose, as the module docstring describes."""
    writer = _Writer(flat)
    flat.nodes = [call for node in flat.nodes for call in writer.written(node)]
    flat.substitute(writer.renamed)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """rows: [..., A], of which there are as many as ids, or one per run of `copies` ids. is_turned: whether the weight
    is [E, B, A].
    """

    rows: Ref
    weight: Ref
    ids: Ref
    copies: int
    width: int
    is_turned: bool


class _Writer:
    """Write products as layers of experts. renamed: results that became rows again -> the rows before their views."""

    def __init__(self, flat: FlatGraph) -> None:
        self.metas, self.made_by = flat.metas(), {node.name: node for node in flat.nodes}
        self.names = set(self.made_by) | set(flat.parameters) | set(flat.inputs)
        self.bounds = integer_bounds(flat)
        self.flat_ids: dict[Ref, Ref] = {}
        self.rows_of: dict[Ref, Ref] = {}
        self.renamed: dict[Ref, Ref] = {}

    def written(self, node: Node) -> list[Node]:
        """Return the calls in place of one call."""
        chosen = self.chosen(node)
        if chosen is not None:
            return self.product(node, chosen)
        source = self.rows_of.get(node.inputs[0]) if len(node.inputs) == 1 and base_name(node.op) in _KEEPING else None
        if source is not None and self.metas[source] == node.meta:
            self.renamed[Ref(node.name)] = source
        return [node]

    def product(self, node: Node, chosen: _Chosen) -> list[Node]:
        """Return the call as a layer of experts, with views that keep the shapes of its operands and results."""
        calls: list[Node] = []

        def call(word: str, op: str, args: tuple[Any, ...], shape: tuple[int, ...], of: TensorMeta) -> Ref:
            name = unused_name(f"{node.name}_{word}", self.names)
            meta = replace(of, shape=shape)
            calls.append(replace(node, name=name, op=op, args=args, kwargs=(), outputs=(meta,)))
            self.names.add(name)
            self.metas[Ref(name)] = meta
            return Ref(name)

        num_rows, rows, ids, weight = math.prod(self.metas[chosen.ids].shape), chosen.rows, chosen.ids, chosen.weight
        rows_meta, weight_meta = self.metas[rows], self.metas[weight]
        few, maker = (num_rows // chosen.copies, chosen.width), self.made_by.get(rows.node)
        if maker is not None and base_name(maker.op) == "unsqueeze" and self.metas[maker.inputs[0]].shape == few:
            rows = maker.inputs[0]
        elif rows_meta.shape != few:
            rows = call("rows", "aten.reshape.default", (rows, few), few, rows_meta)
        if chosen.copies > 1:
            shape = (num_rows, chosen.width)
            rows = call("copies", "aten.repeat_interleave.self_int", (rows, chosen.copies, 0), shape, rows_meta)
        if len(self.metas[ids].shape) > 1:
            if ids not in self.flat_ids:
                flat = (num_rows,)
                self.flat_ids[ids] = call("ids", "aten.reshape.default", (ids, flat), flat, self.metas[ids])
            ids = self.flat_ids[ids]
        if chosen.is_turned:
            weight = call(
                "weight",
                "aten.transpose.int",
                (weight, 1, 2),
                (weight_meta.shape[0], *weight_meta.shape[:0:-1]),
                weight_meta,
            )
        shape = (num_rows, weight_meta.shape[1 if chosen.is_turned else 2])
        result = call("chosen", EXPERT_LINEAR, (rows, weight, ids), shape, node.meta)
        self.rows_of[Ref(node.name)] = result
        args = (result, node.meta.shape)
        return [*calls, replace(node, op="aten.view.default", args=args, kwargs=())]

    def chosen(self, node: Node) -> _Chosen | None:
        """Return the operands of a call, where it multiplies a row by the matrix that it chose."""
        if base_name(node.op) not in ("bmm", "matmul", "einsum") or len(node.inputs) != 2:
            return None
        rule = rule_for(node, tuple(self.metas[ref] for ref in node.inputs))
        for position, ref in enumerate(node.inputs) if rule is not None else ():
            lookup = self.lookup(ref)
            if lookup is not None and rule is not None:
                return self.multiplied(node, rule, position, *lookup)
        return None

    def multiplied(self, node: Node, rule: Rule, position: int, weight: Ref, ids: Ref) -> _Chosen | None:
        rows = node.inputs[1 - position]
        of_weight, of_rows, of_result = (
            _factors(rule, dims) for dims in (rule.inputs[position], rule.inputs[1 - position], rule.outputs[0])
        )
        *chosen, first, last = of_weight
        is_turned = last in rule.contracted
        inner, outer = (last, first) if is_turned else (first, last)
        by_id, lie = [name for name in chosen if name], [name for name in of_rows if name]
        metas = [self.metas[operand] for operand in (rows, weight)]
        is_alike = all(meta.dtype == node.meta.dtype for meta in metas)
        is_product = inner in rule.contracted and outer and [name for name in of_result if name] == [*by_id, outer]
        if not inner or not is_product or not is_alike:
            return None
        copies = 1 if lie == [*by_id, inner] else rule.sizes[by_id[-1]] if by_id else 0
        if lie not in ([*by_id, inner], [*by_id[:-1], inner]) or not copies or math.prod(self.metas[ids].shape) < 2:
            return None
        width = rule.sizes[inner]
        return _Chosen(rows=rows, weight=weight, ids=ids, copies=copies, width=width, is_turned=is_turned)

    def lookup(self, ref: Ref) -> tuple[Ref, Ref] | None:
        """Return (weight [E, A, B], ids) of the matrices that rows chose."""
        node = self.made_by.get(ref.node)
        if node is None or base_name(node.op) not in ("index", "index_select") or len(node.inputs) != 2:
            return None
        arguments, (weight, ids) = arguments_of(node), node.inputs
        is_first = arguments.get("dim", 0) == 0 and arguments.get("indices", (ids,)) == (ids,)
        is_matrix = len(self.metas[weight].shape) == 3 and not self.metas[ids].dtype.is_floating_point
        return (weight, ids) if is_first and is_matrix and ids in self.bounds and self.bounds[ids].low >= 0 else None


def _factors(rule: Rule, dims: Dims) -> list[str]:
    """Return the factor of each dim, "" for a dim of size 1; a dim of several factors is not rewritten here."""
    return [dim[0] if len(dim) == 1 and rule.sizes[dim[0]] > 1 else "*" if len(dim) > 1 else "" for dim in dims]
