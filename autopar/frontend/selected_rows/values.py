"""Values that replace rows of unknown number in a graph, and which of their rows are selected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from autopar.errors import TraceError
from autopar.frontend.selected_rows.sources import Selection, Selections
from autopar.frontend.user_line import user_line

_aten = torch.ops.aten
Layout = tuple[Any, ...]
"""The order of rows along a dim of unknown size: symbols of selections, and known numbers of rows."""


class RowValues:
    """full: a node of unknown size -> its value for all rows. layouts: the rows along its dim of unknown size."""

    def __init__(self, graph: torch.fx.Graph, selections: Selections, sharp: set[Any]) -> None:
        self.graph = graph
        self.selections = selections
        self.full: dict[Node, Node] = {}
        self.layouts: dict[Node, Layout] = {}
        self.by_size: dict[Any, Layout] = {}
        self.renamed: dict[Node, Node] = {}
        self.masks: dict[tuple[Layout, bool], Node] = {}
        self.kept: dict[tuple[Node, Layout], Node] = {}
        self.sharp = sharp  # symbols of rows that go through operators that may not be finite at zero
        self.at: Node = next(iter(graph.nodes))

    def from_end(self, node: Node) -> int:
        dim = self.selections.dim(node)
        assert dim is not None
        return len(node.meta["val"].shape) - dim

    def is_along(self, selection: Selection, operand: Node, start: int) -> bool:
        """Return whether the mask of a selection matches the rows of an operand."""
        if selection.mask not in self.full:
            return operand not in self.full
        same = operand in self.full and self.layouts[operand] == self.layouts[selection.mask]
        return same and self.selections.dim(operand) == start

    def chosen(self, full: Node, place: int, layout: Layout) -> Node:
        """Return the selected rows, and zeros elsewhere."""
        trailing = value_of(full).dim() - place - 1
        return self.call(_aten.masked_fill.Scalar, full, self.mask(layout, trailing, inverted=True), 0)

    def mask(self, layout: Layout, trailing: int = 0, inverted: bool = False) -> Node:
        """Return which rows are selected (or are not), with so many dims of size one at the end."""
        if (layout, inverted) not in self.masks:
            parts = [self.part(section) for section in layout] if not inverted else []
            flat = parts[0] if len(parts) == 1 else None
            if inverted:
                flat = self.call(_aten.bitwise_not.default, self.mask(layout))
            self.masks[layout, inverted] = flat or self.call(_aten.cat.default, parts)
        flat = self.masks[layout, inverted]
        return self.call(_aten.view.default, flat, [*value_of(flat).shape, *[1] * trailing]) if trailing else flat

    def part(self, of: Any) -> Node:
        selection = self.selections.by_symbol.get(of)
        if selection is None:
            return self.call(_aten.ones.default, [of], dtype=torch.bool)
        mask = self.renamed.get(selection.mask, selection.mask)
        if mask in self.full:
            return self.call(_aten.bitwise_and.Tensor, self.full[mask], self.mask(self.layouts[mask]))
        return mask if len(selection.shape) == 1 else self.call(_aten.flatten.using_ints, mask)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the present node, with its result as fake tensors give it."""
        with self.graph.inserting_before(self.at):
            call = self.graph.call_function(target, args, kwargs)
        values, named = map_arg((args, kwargs), lambda operand: operand.meta["val"])
        try:
            with self.selections.fake, torch.no_grad():
                call.meta = {"val": target(*values, **named)}
        except Exception as error:  # torch refuses it for all rows, as with a mask of another shape
            raise self.mixed(self.at) from error
        call.meta |= {key: self.at.meta[key] for key in ("nn_module_stack", "stack_trace") if key in self.at.meta}
        return call

    def mixed(self, node: Node) -> TraceError:
        """Return the error for a call that mixes rows of unknown number."""
        line = user_line(node.meta.get("stack_trace"))
        return TraceError(
            "the shape of a result depends on values, and a later call mixes rows that a mask selects",
            values=f"{node.target}" + (f" at {line}" if line else ""),
            alternatives="use torch.where, or a product with the mask, not an index by it (nonzero, unique, "
            "masked_select)",
        )


def value_of(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def count(sizes: Any) -> int:
    return int(torch.Size([int(size) for size in sizes]).numel())
