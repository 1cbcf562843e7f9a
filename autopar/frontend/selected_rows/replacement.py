"""Replace rows that a mask selects, `x[mask]`, by all rows beside the mask: the number of selected rows is unknown.

A selection becomes all rows, with zeros (or a selected row) in place of the others. Calls that treat each row alone run
on all of them. Where rows are put back, added up or averaged, unselected rows are left out, and no gradient goes
through them. Calls that mix rows otherwise stay unchanged, and are refused at their readers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from autopar.frontend.selected_rows.sinks import RowSinks
from autopar.frontend.selected_rows.sources import PLACES, Selection, Selections
from autopar.frontend.selected_rows.values import Layout, count, value_of
from autopar.ir import graph as ir
from autopar.operators.traits import FILLED_NEW, FINITE_AT_ZERO, SHAPES
from autopar.rules.registry import rule_for

_aten = torch.ops.aten


def write_out(program: torch.export.ExportedProgram) -> None:
    """Write out every selection of a program by a mask. Raises TraceError where selected rows are mixed."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            selections = Selections(module.graph)
            if selections.by_symbol:
                _Writer(module.graph, selections, selections.of_other_operators(FINITE_AT_ZERO)).run()


class _Writer(RowSinks):
    """Write the calls of one graph."""

    def run(self) -> None:
        dead: list[Node] = []
        for node in list(self.graph.nodes):
            self.at = node
            if self.selections.is_of_size(node):  # a size, or a check of one
                dead.append(node)
            elif self.selections.is_unknown(node):
                dead.append(node)
                self.write(node)
            elif any(operand in self.full or self.selections.is_of_size(operand) for operand in node.all_input_nodes):
                dead.append(node)
                self.renamed[node] = self.sink(node)
                node.replace_all_uses_with(self.renamed[node])
        for node in reversed(dead):
            self.graph.erase_node(node)

    # --- what is selected, and what is computed of it ----------------------------------------------------------

    def write(self, node: Node) -> None:
        source = self.selections.sources.get(node)
        if source is not None:
            layout: Layout = (source.selection.symbol,)
            self.full[node] = self.source(source.selection, node.args[0], source.start)
        elif node in self.selections.positions:
            selection, dim = self.selections.positions[node]
            layout, self.full[node] = (selection.symbol,), self.positions(selection, dim)
        elif str(node.target) in PLACES:
            return
        elif node.target is operator.getitem:
            whole: Any = node.args[0]
            layout = self.layouts[whole]
            self.full[node] = self.call(operator.getitem, self.full[whole], node.args[1])
        elif str(node.target) == "aten.cat.default":
            layout = self.joined(node)
        elif (written := self.written(node)) is not None:
            layout, self.full[node] = self.layouts[node.args[0]], written  # type: ignore[index]
        else:
            layout = self.by_row(node)
        self.layouts[node] = layout
        size = self.selections.size(node)
        if size is not None:
            self.by_size.setdefault(size, layout)

    def source(self, selection: Selection, operand: Any, start: int) -> Node:
        """Return all rows of the operand, the dims of the mask as one, with replacements for unselected rows."""
        rank = len(selection.shape)
        value = self.full.get(operand, operand)
        if not self.is_along(selection, operand, start):
            raise self.mixed(self.at)
        if rank > 1:
            value = self.call(_aten.flatten.using_ints, operand, start, start + rank - 1)
        layout = (selection.symbol,)
        trailing = value_of(value).dim() - start - 1
        if selection.symbol not in self.sharp:
            return self.call(_aten.masked_fill.Scalar, value, self.mask(layout, trailing, inverted=True), 0)
        chosen = self.call(_aten.to.dtype, self.mask(layout), torch.int32)
        first = self.call(_aten.argmax.default, chosen, None, False)
        row = self.call(_aten.index_select.default, value, start, self.call(_aten.unsqueeze.default, first, 0))
        return self.call(_aten.where.self, self.mask(layout, trailing), value, self.call(_aten.detach.default, row))

    def positions(self, selection: Selection, dim: int) -> Node:
        """Return the indices of rows along a dim of the mask; unselected rows have index 0."""
        of, within = selection.shape[dim], count(selection.shape[dim + 1 :])
        places = self.call(_aten.arange.default, selection.num_rows, dtype=torch.int64)
        if within > 1:
            places = self.call(_aten.div.Tensor_mode, places, within, rounding_mode="floor")
        places = self.call(_aten.remainder.Scalar, places, of) if dim else places
        return self.call(_aten.masked_fill.Scalar, places, self.mask((selection.symbol,), inverted=True), 0)

    def joined(self, node: Node) -> Layout:
        """Join rows of unknown number and others, one after another."""
        tensors: Any = node.args[0]
        axis: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        places = {self.selections.dim(tensor) for tensor in tensors if tensor in self.full}
        if places != {axis % len(node.meta["val"].shape)}:
            return self.by_row(node)
        parts: list[Any] = []
        whole = next((tensor for tensor in tensors if tensor not in self.full and value_of(tensor).shape[axis]), None)
        rows = []
        for tensor in tensors:
            parts += self.layouts[tensor] if tensor in self.full else [int(value_of(tensor).shape[axis])]
            rows.append(self.full.get(tensor, tensor))
            if (
                tensor in self.full
                and whole is not None
                and any(symbol in self.sharp for symbol in self.layouts[tensor])
            ):
                rows[-1] = self.like(rows[-1], whole, axis, self.layouts[tensor])
        self.full[node] = self.call(node.target, rows, axis)
        return tuple(parts)

    def like(self, full: Node, others: Node, axis: int, layout: Layout) -> Node:
        """Return rows in which unselected ones are the first of other rows that are sure to exist."""
        row = self.call(_aten.detach.default, self.call(_aten.slice.Tensor, others, axis, 0, 1))
        trailing = -(axis + 1) if axis < 0 else value_of(full).dim() - axis - 1
        row = self.call(_aten.to.dtype, row, value_of(full).dtype)
        return self.call(_aten.where.self, self.mask(layout, trailing), full, row)

    def by_row(self, node: Node) -> Layout:
        """Write a call of the same operator on all rows, which its rule treats each alone; return their layout."""
        layouts = {self.layouts[operand] for operand in node.all_input_nodes if operand in self.full}
        if not layouts:
            layouts = {self.by_size.get(self.selections.size(node), ())}
        (layout, *others) = layouts
        name = ir.base_name(str(node.target)) if isinstance(node.target, torch._ops.OpOverload) else ""
        takes_size = any(self.selections.is_of_size(operand) for operand in node.all_input_nodes)
        is_ready = all(
            operand in self.full or not self.selections.is_unknown(operand) for operand in node.all_input_nodes
        )
        is_sized = name in FINITE_AT_ZERO & SHAPES.keys()
        if others or not layout or not name or not is_ready or (takes_size and not is_sized):
            raise self.mixed(node)
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: self.operand(operand, layout))
        self.full[node] = written = self.call(node.target, *args, **kwargs)
        is_made = name in FILLED_NEW and self.by_size.get(self.selections.size(node)) == layout
        if not is_made and not self.keeps_rows(node, written):
            raise self.mixed(node)
        return layout

    def operand(self, node: Node, layout: Layout) -> Any:
        """Return the operand of a call on all rows for an operand of the original call.

        If no row is selected, an operand without a gradient replaces a trained one.
        """
        if node in self.full:
            return self.full[node]
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return self.selections.number(node) if self.selections.is_of_size(node) else node
        if not any(symbol in self.sharp for symbol in layout) or not value.is_floating_point() or _is_fixed(node):
            return node
        if any(isinstance(part, int) and part > 0 for part in layout):  # some rows exist
            return node
        if (node, layout) in self.kept:
            return self.kept[node, layout]
        if len(layout) > 1:
            raise self.mixed(self.at)
        is_any = self.call(_aten.any.default, self.mask(layout))
        kept = self.call(_aten.where.self, is_any, node, self.call(_aten.detach.default, node))
        if not self.selections.is_changing(node):
            self.kept[node, layout] = kept
        return kept

    def keeps_rows(self, node: Node, written: Node) -> bool:
        """Return whether the call's rule has one loop over the rows, which each result has and no other operand."""
        dims = {made_of: self.selections.dim(operand) for operand, made_of in self.full.items() if operand is not node}
        tensors = {operand: _meta(value_of(operand)) for operand in written.all_input_nodes}
        refs: dict[Node, Any] = {operand: ir.Ref(operand.name) for operand in tensors}
        args, kwargs = map_arg((written.args, written.kwargs), refs.__getitem__)
        results = [value for value in _leaves(written.meta["val"]) if isinstance(value, Tensor)]
        plain = ir.Node(
            name="made",
            op=str(written.target),
            args=_tuples(args),
            kwargs=tuple(kwargs.items()),
            outputs=tuple(map(_meta, results)),
        )
        by_ref = {ref: operand for operand, ref in refs.items()}
        rule = rule_for(plain, tuple(tensors[by_ref[ref]] for ref in plain.inputs))
        if rule is None or "*" in rule.lowerings or len(rule.inputs) != len(plain.inputs):
            return False
        places = [self.selections.dim_of(value) for value in _leaves(node.meta["val"]) if isinstance(value, Tensor)]
        loops = {groups[place] for groups, place in zip(rule.outputs, places, strict=True) if place is not None}
        if None in places or len(loops) != 1 or len(loop := next(iter(loops))) != 1:
            return False
        (factor,) = loop
        for ref, groups in zip(plain.inputs, rule.inputs, strict=True):
            place = dims.get(by_ref[ref])
            if any(factor in group for at, group in enumerate(groups) if at != place):
                return False
            if place is not None and tuple(groups[place]) != (factor,):
                return False
        return factor not in rule.blocked and factor not in rule.lowerings


def _meta(value: Tensor) -> ir.TensorMeta:
    return ir.TensorMeta(tuple(int(size) for size in value.shape), value.dtype, False)


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, (tuple, list)) else value


def _is_fixed(node: Node) -> bool:
    """Return whether a tensor is an input of the graph that nothing trains."""
    return node.op != "call_function" and not node.meta["val"].requires_grad
