"""Mixtures of experts whose rows are sorted, without the sorting: each row with the expert that it chose.

Models sort the N = T k rows of T tokens and k choices by expert, so that an expert's matrix multiplies a run of rows:
ids are sorted, rows are taken in that order, grouped products know where each expert's end, and results are put back
(transformers' grouped_mm), or added to their tokens (torchtitan's scatter_add). The order depends on data: a shard of
the sorted rows is no shard of the batch. In the order of the tokens it is. With p the order, and q its inverse,

    sorted                              in the order of the tokens
    sort(ids)                           ids
    x[p // k]                           repeat_interleave(x, k)
    w[p]                                w
    histc(sort(ids))                    histc(ids), which may be counted before; or one_hot(ids).sum(0)
    grouped_mm(y, weight, offsets)      expert_linear(y, weight, ids)       offsets = cumsum(histc(ids))
    grouped_mm(...) + bias[sort(ids)]   expert_linear(..., bias)
    y[q]                                y
    x.index_add(0, p // k, y)           x + y.view(T, k, -1).sum(1)
    dropout(y)                          y * dropout(1)[q]
    f(y)                                f(y)                                where f does with each row the same

and the numbers are the same. f is a call whose rule (autopar/rules) has one factor for the rows of every result and of
every sorted operand, and of no other operand. The factor is free and needs no lowering. Where another call reads a
sorted value the whole region stays as it was: exact, and computed by every rank for all tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.frontend.fx_import import FlatGraph
from autopar.ir.graph import Node, Ref, TensorMeta, base_name, with_refs
from autopar.ir.operators import arguments_of
from autopar.operators.traits import FILLS, RESHAPES, SAME_PLACES
from autopar.rules.families.experts import EXPERT_LINEAR, row_factor
from autopar.rules.registry import rule_for

_ROWS = "rows"


def write_unsorted(flat: FlatGraph) -> None:
    """Rewrite every region that begins with a sort of integers [N], as the module docstring describes."""
    for sort in [node for node in flat.nodes if base_name(node.op) in ("sort", "argsort")]:
        metas = flat.metas()
        is_of_ids = len(sort.outputs[0].shape) == 1 and not metas[sort.inputs[0]].dtype.is_floating_point
        if not is_of_ids or not _is_ascending(sort):
            continue
        region = _Region(sort, flat.nodes, metas)
        nodes = region.rewritten()
        if nodes is not None and region.kinds.get(flat.loss) is None:
            flat.nodes = nodes


def join_biases(flat: FlatGraph) -> None:
    """Join a product and the row of a table [E, B] that is added for each row's expert into one call."""
    metas, made_by = flat.metas(), {Ref(node.name): node for node in flat.nodes}
    uses = Counter(ref for node in flat.nodes for ref in node.inputs)
    joined: dict[str, Node] = {}
    for node in flat.nodes:
        if base_name(node.op) != "add" or len(node.inputs) != 2 or arguments_of(node)["alpha"] != 1:
            continue
        for product, bias in itertools.permutations(made_by.get(ref) for ref in node.inputs):
            if product is None or bias is None or product.op != EXPERT_LINEAR or len(product.inputs) > 3:
                continue
            table = _bias_of(product, bias, metas, made_by)
            if table is not None and uses[Ref(product.name)] == 1 and product.meta == node.meta:
                joined[node.name] = replace(product, name=node.name, args=(*product.args, table))
    flat.nodes = [joined.get(node.name, node) for node in flat.nodes]


def _bias_of(product: Node, bias: Node, metas: Mapping[Ref, TensorMeta], made_by: Mapping[Ref, Node]) -> Ref | None:
    """Return the table whose rows `bias` takes by expert; None if it does not."""

    def viewed(ref: Ref) -> Ref:
        while ref in made_by and base_name(made_by[ref].op) in RESHAPES:
            ref = made_by[ref].inputs[0]
        return ref

    if base_name(bias.op) not in ("index", "index_select") or len(bias.inputs) != 2:
        return None
    arguments, (table, ids) = arguments_of(bias), bias.inputs
    is_first = arguments.get("dim", 0) == 0 and arguments.get("indices", (ids,)) == (ids,)
    are_ids = metas[ids].shape == product.meta.shape[:1] and viewed(ids) == viewed(product.inputs[2])
    num_experts, _, width = metas[product.inputs[1]].shape
    is_alike = metas[table].shape == (num_experts, width) and metas[table].dtype == product.meta.dtype
    return table if is_first and are_ids and is_alike else None


def _is_ascending(sort: Node) -> bool:
    return not arguments_of(sort)["descending"]


class _UnsupportedCallError(Exception):
    """A call outside the patterns reads a sorted value."""


class _Region:
    """One sort and the calls that follow from it.

    kinds: kinds of sorted values: "rows", their "order", its "inverse", the "tokens" of rows or of their elements, and
    "blank" memory of as many. renamed: values -> their counterparts in the order of the tokens.
    """

    def __init__(self, sort: Node, nodes: list[Node], metas: Mapping[Ref, TensorMeta]) -> None:
        self.nodes, self.metas = nodes, metas
        self.made_by = {node.name: node for node in nodes}
        self.sort, self.ids = sort, sort.inputs[0]
        self.num_rows = metas[self.ids].shape[0]
        order = Ref(sort.name, len(sort.outputs) - 1)
        self.kinds: dict[Ref, str] = {Ref(sort.name): _ROWS} | {order: "order"}
        self.choices: dict[Ref, int] = {}
        self.renamed: dict[Ref, Ref] = {Ref(sort.name): self.ids} if order.index else {}

    def rewritten(self) -> list[Node] | None:
        """Return all calls, with the region in the order of the tokens; None if it is no mixture of experts."""
        try:
            written = [[node] if node is self.sort else self.unsorted(node) for node in self.nodes]
        except _UnsupportedCallError:
            return None
        nodes = list(itertools.chain.from_iterable(written))
        return nodes if any(node.op == EXPERT_LINEAR and self.ids in node.inputs for node in nodes) else None

    def unsorted(self, node: Node) -> list[Node]:
        """Return the calls in place of one call."""
        if any(ref in self.kinds for ref in node.inputs):
            several = _WRITERS_OF_SEVERAL.get(base_name(node.op))
            if several is not None:
                return [with_refs(call, self.now) for call in several(self, node)]
            node = _WRITERS.get(base_name(node.op), _Region.row_by_row)(self, node)
        return [with_refs(node, self.now)]

    def now(self, ref: Ref) -> Ref:
        """Return the current name for `ref`."""
        while ref in self.renamed:
            ref = self.renamed[ref]
        return ref

    def is_a(self, kind: str, value: Any) -> bool:
        return isinstance(value, Ref) and self.kinds.get(value) == kind

    def recorded(self, node: Node, kind: str = _ROWS) -> Node:
        self.kinds |= {Ref(node.name, index): kind for index in range(len(node.outputs))}
        return node

    def row_by_row(self, node: Node) -> Node:
        """Write a call that treats each row alone."""
        rule = rule_for(node, tuple(self.metas[ref] for ref in node.inputs))
        rows = [ref for ref in node.inputs if ref in self.kinds]
        if rule is None or not row_factor(node, rule, rows) or any(self.kinds[ref] != _ROWS for ref in rows):
            raise _UnsupportedCallError
        return self.recorded(node)

    def tokens(self, node: Node) -> Node:
        """Note the tokens of rows, p // k."""
        order, choices = node.args[:2]
        if not self.is_a("order", order) or not isinstance(choices, int):
            return self.row_by_row(node)
        self.choices[Ref(node.name)] = choices
        return self.recorded(node, "tokens")

    def spread(self, node: Node) -> Node:
        """Write the tokens of rows as a column, or once for each element of a row."""
        source_shape, shape, column = self.metas[node.inputs[0]].shape, node.meta.shape, (self.num_rows, 1)
        is_right = shape in ((self.num_rows,), column) or (
            source_shape == column and len(shape) == 2 and shape[0] == source_shape[0]
        )
        if not self.is_a("tokens", node.inputs[0]) or not is_right:
            return self.row_by_row(node)
        self.choices[Ref(node.name)] = self.choices[node.inputs[0]]
        return self.recorded(node, "tokens")

    def added(self, node: Node) -> list[Node]:
        """Add rows to their tokens: those of a token are adjacent."""
        base, index, rows = node.inputs
        arguments, (total, source) = arguments_of(node), (self.metas[ref].shape for ref in (base, rows))
        is_plain = (
            arguments["dim"] == 0
            and arguments.get("alpha", 1) == 1
            and base not in self.kinds
            and self.is_a(_ROWS, rows)
        )
        is_whole = self.are_tokens(index, total, base_name(node.op) == "scatter_add") and source[1:] == total[1:]
        if not is_plain or not is_whole or self.metas[rows].dtype != node.meta.dtype:
            raise _UnsupportedCallError
        by_token = replace(self.metas[rows], shape=(total[0], self.choices[index], *total[1:]))
        names = [f"{node.name}_{word}" for word in ("by_token", "sum")]
        summed = replace(node.meta, requires_grad=by_token.requires_grad)
        view, total_of = (replace(node, name=name, kwargs=(), outputs=(summed,)) for name in names)
        view = replace(view, op="aten.view.default", args=(rows, by_token.shape), outputs=(by_token,))
        total_of = replace(total_of, op="aten.sum.dim_IntList", args=(Ref(names[0]), (1,)))
        if base.node in self.made_by and FILLS.get(base_name(self.made_by[base.node].op)) == 0.0:
            return [view, replace(total_of, name=node.name)]
        return [view, total_of, replace(node, op="aten.add.Tensor", args=(base, Ref(names[1])), kwargs=())]

    def dropped(self, node: Node) -> list[Node]:
        """Drop elements of sorted rows: the mask depends on positions among all sorted rows. Every rank draws the whole
        mask, and a row takes its part of it.
        """
        arguments, (rows,) = arguments_of(node), node.inputs
        if not arguments["train"] or not arguments["p"]:
            return [self.row_by_row(node)]
        if not self.is_a(_ROWS, rows) or not _EXACT.issuperset([node.meta.dtype]):
            raise _UnsupportedCallError
        order = Ref(self.sort.name, len(self.sort.outputs) - 1)
        mask = replace(node.meta, requires_grad=False)
        places, ones, drawn, taken = (f"{node.name}_{word}" for word in ("places", "ones", "all", "mask"))

        def call(name: str, op: str, args: tuple[Any, ...], meta: TensorMeta) -> Node:
            return replace(node, name=name, op=f"aten.{op}", args=args, kwargs=(), outputs=(meta,))

        return [
            call(places, "argsort.default", (order,), self.metas[order]),
            call(ones, "ones_like.default", (rows,), mask),
            replace(node, name=drawn, args=(Ref(ones), *node.args[1:]), outputs=(mask,)),
            call(taken, "index_select.default", (Ref(drawn), 0, Ref(places)), mask),
            self.recorded(call(node.name, "mul.Tensor", (rows, Ref(taken)), node.meta)),
        ]

    def are_tokens(self, index: Ref, shape: tuple[int, ...], is_by_element: bool) -> bool:
        """Return whether a tensor names the token of each row, or of each element, in a tensor [T, ...]
        of this shape.
        """
        right = (self.num_rows, *shape[1:]) if is_by_element else (self.num_rows,)
        is_right = self.is_a("tokens", index) and self.metas[index].shape == right
        return is_right and shape[0] * self.choices[index] == self.num_rows

    def blank(self, node: Node) -> Node:
        """Note memory for q."""
        return self.recorded(node, "blank") if self.is_a("order", node.args[0]) else self.row_by_row(node)

    def inverse(self, node: Node) -> Node:
        """Note q, as argsort(p) or as memory into which 0 to N - 1 are written at p."""
        if len(node.inputs) == 1:
            is_inverse = self.is_a("order", node.inputs[0]) and _is_ascending(node)
        elif len(node.inputs) != 3:
            raise _UnsupportedCallError
        else:
            memory, order, values = node.inputs
            numbers = self.made_by.get(values.node)
            counts = numbers is not None and numbers.op == "aten.arange.default" and numbers.args[0] == self.num_rows
            is_inverse = self.is_a("blank", memory) and self.is_a("order", order) and counts
        if not is_inverse or len(node.outputs) > 1:
            raise _UnsupportedCallError
        return self.recorded(node, "inverse")

    def histogram(self, node: Node) -> Node:
        """Write counts, which do not depend on the order; nor do sums of integers over all rows."""
        source, is_sum = node.inputs[0], base_name(node.op) == "sum"
        is_over_rows = not is_sum or 0 in (arguments_of(node).get("dim") or (0,))
        if is_sum and (self.metas[source].dtype.is_floating_point or not is_over_rows):
            return self.row_by_row(node)
        if not self.is_a(_ROWS, source):
            raise _UnsupportedCallError
        return node

    def taken(self, node: Node) -> Node:
        """Write x[p // k], w[p] and y[q] along the first dim; any other index is taken row by row."""
        source, index = node.inputs[0], node.inputs[-1]
        arguments = arguments_of(node)
        if arguments.get("dim", 0) != 0 or arguments.get("indices", (index,)) != (index,):
            return self.row_by_row(node)
        kind, is_plain = self.kinds.get(index), len(node.inputs) == 2 and source not in self.kinds
        shape, by_element = self.metas[source].shape or (0,), base_name(node.op) == "gather"
        if by_element and kind in ("inverse", "order") and len(shape) > 1:
            raise _UnsupportedCallError
        if kind == "inverse" and self.is_a(_ROWS, source):
            self.renamed[Ref(node.name)] = source
            return node
        if kind == "order" and is_plain and shape[0] == self.num_rows:
            self.renamed[Ref(node.name)] = source
            return self.recorded(node)
        if kind == "tokens" and is_plain and self.are_tokens(index, shape, by_element):
            args = (source, self.choices[index], 0)
            return self.recorded(replace(node, op="aten.repeat_interleave.self_int", args=args, kwargs=()))
        return self.row_by_row(node)

    def product(self, node: Node) -> Node:
        """Write a grouped product over all sorted rows, without a bias, in their dtype."""
        if len(node.inputs) != 3:
            raise _UnsupportedCallError
        rows, weight, offsets = node.inputs
        weight_meta = self.metas[weight]
        is_plain = len(weight_meta.shape) == 3 and weight not in self.kinds and weight_meta.dtype == node.meta.dtype
        if not is_plain or not self.is_a(_ROWS, rows) or not self.ends_of_experts(offsets, weight_meta.shape[0]):
            raise _UnsupportedCallError
        return self.recorded(replace(node, op=EXPERT_LINEAR, args=(rows, weight, self.ids), kwargs=()))

    def is_of_ids(self, ref: Ref) -> bool:
        """Return whether a tensor has the ids, sorted or unsorted, in any dtype and shape."""
        ref = self.elements_of(ref)
        return self.elements_of(self.now(ref)) == self.elements_of(self.ids)

    def elements_of(self, ref: Ref, are_whole: bool = False) -> Ref:
        """Return the source with the same numbers in the same order. are_whole: they are integers before a cast to
        integers.
        """
        while ref.node in self.made_by and base_name(self.made_by[ref.node].op) in RESHAPES | SAME_PLACES:
            before = self.made_by[ref.node].inputs[0]
            source, target = self.metas[before].dtype, self.metas[ref].dtype
            is_rounded = source.is_floating_point and not target.is_floating_point and not are_whole
            if not _EXACT.issuperset([source, target]) or is_rounded:
                break
            ref = before
        return ref

    def ends_of_experts(self, offsets: Ref, num_experts: int) -> bool:
        """Return whether a tensor is the cumsum of the number of rows of each of so many experts."""
        total = self.made_by.get(self.elements_of(offsets, are_whole=True).node)
        source = total.inputs[0] if total is not None and base_name(total.op) == "cumsum" else offsets
        counts = self.made_by.get(self.elements_of(source, are_whole=True).node)
        if total is None or counts is None or total is counts:
            return False
        arguments, name = arguments_of(counts), base_name(counts.op)
        if name == "histc":
            is_by_expert = (arguments["bins"], arguments["min"], arguments["max"]) == (num_experts, 0, num_experts - 1)
            return is_by_expert and self.is_of_ids(counts.inputs[0])
        marks = self.made_by.get(counts.inputs[0].node) if name == "sum" and len(counts.inputs) == 1 else None
        if marks is None or base_name(marks.op) != "one_hot" or list(arguments.get("dim") or ()) != [0]:
            return False
        is_row_each = len(self.metas[marks.inputs[0]].shape) == 1 and arguments_of(marks)["num_classes"] == num_experts
        return is_row_each and self.is_of_ids(marks.inputs[0])


_EXACT = frozenset([torch.int32, torch.int64, torch.float32, torch.float64])
"""Dtypes in which ids of experts and row numbers are exact."""

_WRITERS_OF_SEVERAL: Mapping[str, Callable[[_Region, Node], list[Node]]] = {
    "index_add": _Region.added,
    "scatter_add": _Region.added,
    "dropout": _Region.dropped,
}

_WRITERS: Mapping[str, Callable[[_Region, Node], Node]] = {
    "floor_divide": _Region.tokens,
    "empty_like": _Region.blank,
    "zeros_like": _Region.blank,
    "index_put": _Region.inverse,
    "argsort": _Region.inverse,
    "sort": _Region.inverse,
    "histc": _Region.histogram,
    "sum": _Region.histogram,
    "index": _Region.taken,
    "index_select": _Region.taken,
    "gather": _Region.taken,
    "view": _Region.spread,
    "reshape": _Region.spread,
    "unsqueeze": _Region.spread,
    "expand": _Region.spread,
    "grouped_mm": _Region.product,
    "grouped_mm_fallback": _Region.product,
}
