"""Write operators that reduce selected rows, whose number is unknown, to known sizes: sums, means, losses, scatters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from autopar.frontend.selected_rows.values import RowValues, count, value_of
from autopar.ir.graph import base_name
from autopar.operators.schemas import named_arguments
from autopar.operators.traits import CLASS_LOSSES, ELEMENT_LOSSES, FILLED_NEW

_aten = torch.ops.aten


class RowSinks(RowValues):
    """Write calls that take rows of unknown number and make results of known sizes."""

    def sink(self, node: Node) -> Node:
        """Return the call of known size in place of one that takes rows of unknown number."""
        name = base_name(str(node.target)) if isinstance(node.target, torch._ops.OpOverload) else ""
        arguments = named_arguments(node.target, node.args, node.kwargs) if name else {}  # type: ignore[arg-type]
        ways: tuple[tuple[Any, Callable[[Node, str, dict[str, Any]], Node | None]], ...] = (
            ({"sum", "mean"}, self.reduced),
            (ELEMENT_LOSSES, self.loss),
            (CLASS_LOSSES, self.class_loss),
            ({"index_put", "index_copy"}, self.put),
            ({"index_put"}, self.put_elsewhere),
            ({"index_add", "scatter_add"}, self.added),
            ({"scatter_reduce", "scatter"}, self.scattered),
            ({"div", "mul"}, self.scaled),
            ({"max", "amax"}, self.largest),
            (FILLED_NEW, self.like_rows),
        )
        results = (way(node, name, arguments) for names, way in ways if name in names)
        result = next((candidate for candidate in results if candidate is not None), None)
        if result is None:
            raise self.mixed(node)
        return result

    def reduced(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        dims = arguments.get("dim")
        kwargs = {"dtype": arguments["dtype"]} if arguments.get("dtype") else {}
        return self.total(
            self.full[arguments["self"]], arguments["self"], name, dims, arguments.get("keepdim", False), kwargs
        )

    def total(self, full: Node, of: Node, name: str, dims: Any, keepdim: bool, kwargs: dict[str, Any]) -> Node | None:
        """Write the sum or mean of selected rows. of: the tensor of unknown size that `full` replaces."""
        value, place, layout = value_of(full), self.selections.dim(of), self.layouts[of]
        assert place is not None
        over = sorted({dim % value.dim() for dim in dims}) if dims else list(range(value.dim()))
        if place not in over:
            return None
        chosen = self.chosen(full, place, layout)
        summed = self.call(_aten.sum.dim_IntList, chosen, over, keepdim, **kwargs)
        if name == "sum":
            return summed
        rest = count(int(value.shape[dim]) for dim in over if dim != place)
        number = self.call(_aten.sum.default, self.mask(layout))
        return self.call(_aten.div.Tensor, summed, self.call(_aten.mul.Tensor, number, rest) if rest != 1 else number)

    def loss(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write a loss that sums or averages elements."""
        reduction = {1: "mean", 2: "sum"}.get(arguments["reduction"])
        operands = [value for value in arguments.values() if isinstance(value, Node)]
        rows = [value for value in operands if value in self.full]
        if (
            reduction is None
            or len({self.layouts[row] for row in rows}) != 1
            or not isinstance(arguments["self"], Node)
        ):
            return None
        widest = max(operands, key=lambda operand: len(operand.meta["val"].shape))
        if widest not in self.full:
            return None
        args = map_arg(tuple((arguments | {"reduction": 0}).values()), lambda operand: self.full.get(operand, operand))
        losses = self.call(node.target, *args)
        same = all(self.from_end(row) == self.from_end(widest) for row in rows)
        return self.total(losses, widest, reduction, None, False, {}) if same else None

    def class_loss(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write a cross-entropy of selected rows: the classes of other rows become the ignored class."""
        x, target = arguments["self"], arguments["target"]
        both = x in self.full and target in self.full and self.layouts[x] == self.layouts[target]
        if not both or value_of(self.full[target]).is_floating_point():
            return None
        if (self.selections.dim(x), self.selections.dim(target)) != (0, 0):
            return None
        trailing = value_of(self.full[target]).dim() - 1
        invalid = self.mask(self.layouts[target], trailing, inverted=True)
        ignored = self.call(_aten.masked_fill.Scalar, self.full[target], invalid, arguments["ignore_index"])
        values = arguments | {"self": self.full[x], "target": ignored}
        return self.call(node.target, *values.values())

    def written(self, node: Node) -> Node | None:
        """Write a call on rows of unknown number that are put back by a mask; None for any other call."""
        is_put = isinstance(node.target, torch._ops.OpOverload) and base_name(str(node.target)) == "index_put"
        if not is_put or node.args[0] not in self.full:
            return None
        return self.put(node, "index_put", named_arguments(node.target, node.args, node.kwargs))  # type: ignore[arg-type]

    def put(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write rows that are put back where the mask selected them."""
        value = arguments["values" if name == "index_put" else "source"]
        place = self.selections.place(node, arguments)
        if place is None or arguments.get("accumulate") or not self.is_along(place[0], arguments["self"], place[1]):
            return None
        selection, start = place
        target = self.full.get(arguments["self"], arguments["self"])
        rank = len(selection.shape)
        trailing = value_of(target).dim() - start - rank
        if value in self.full:
            if self.layouts[value] != (selection.symbol,) or self.from_end(value) != trailing + 1:
                return None
            full, at = self.full[value], self.selections.dim(value)
            value = self.call(_aten.unflatten.int, full, at, list(selection.shape)) if rank > 1 else full
        elif value.meta["val"].dim() > trailing:  # one row for all, or one per selected row
            return None
        mask = self.mask((selection.symbol,)) if rank == 1 else self.renamed.get(selection.mask, selection.mask)
        if trailing:
            mask = self.call(_aten.view.default, mask, [*selection.shape, *[1] * trailing])
        return self.stored(node, target, self.call(_aten.where.self, mask, value, target))

    def stored(self, node: Node, target: Node, value: Node) -> Node:
        """Return the value, after storing it in the first operand if the call writes."""
        is_written = node.target._schema.is_mutable  # type: ignore[union-attr]
        return self.call(_aten.copy_.default, target, value) if is_written else value

    def put_elsewhere(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write rows that go where an index says: rows that are not selected go behind the end."""
        start = next(at for at, position in enumerate(arguments["indices"]) if position is not None)
        index, value, target = arguments["indices"][start], arguments["values"], arguments["self"]
        fitting = len(arguments["indices"]) == start + 1 and index in self.full and len(index.meta["val"].shape) == 1
        if not fitting or target in self.full:
            return None
        trailing = value_of(target).dim() - start - 1
        if value in self.full:
            if self.layouts[value] != self.layouts[index] or self.from_end(value) != trailing + 1:
                return None
        elif value.meta["val"].dim() > trailing:
            return None
        size = value_of(target).shape[start]
        counted = self.call(_aten.remainder.Scalar, self.full[index], size)  # without negative indices
        behind = self.call(_aten.masked_fill.Scalar, counted, self.mask(self.layouts[index], inverted=True), size)
        indices = [*[None] * start, behind]
        values = self.full.get(value, value)
        put = self.call(
            _aten.index_put.default, self.longer(target, start), indices, values, arguments.get("accumulate", False)
        )
        return self.stored(node, target, self.call(_aten.slice.Tensor, put, start, 0, size))

    def longer(self, target: Node, dim: int) -> Node:
        """Return a tensor with one more row at its end."""
        return self.call(_aten.cat.default, [target, self.call(_aten.slice.Tensor, target, dim, 0, 1)], dim)

    def scattered(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write a scatter of rows: those that are not selected go behind the end."""
        source, index, target = arguments.get("src"), arguments["index"], arguments["self"]
        if not isinstance(source, Node) or not {source, index} <= set(self.full) or target in self.full:
            return None
        dim = arguments["dim"] % value_of(target).dim()
        if self.layouts[source] != self.layouts[index] or {
            self.selections.dim(operand) for operand in (source, index)
        } != {dim}:
            return None
        size = value_of(target).shape[dim]
        trailing = value_of(target).dim() - dim - 1
        invalid = self.mask(self.layouts[index], trailing, inverted=True)
        behind = self.call(_aten.masked_fill.Scalar, self.full[index], invalid, size)
        functional = _aten.scatter_reduce.two if name == "scatter_reduce" else _aten.scatter.src
        extra = {"include_self": arguments["include_self"]} if name == "scatter_reduce" else {}
        reduce = [arguments["reduce"]] if name == "scatter_reduce" else []
        put = self.call(functional, self.longer(target, dim), dim, behind, self.full[source], *reduce, **extra)
        return self.stored(node, target, self.call(_aten.slice.Tensor, put, dim, 0, size))

    def largest(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write the maximum of selected rows, if some are sure to exist."""
        x = arguments["self"]
        place, layout = self.selections.dim(x), self.layouts[x]
        full, is_whole = self.full[x], str(node.target) in ("aten.max.default", "aten.amax.default")
        some = any(isinstance(part, int) and part > 0 for part in layout)
        if not some or place is None or not is_whole or not value_of(full).is_floating_point():
            return None
        trailing = value_of(full).dim() - place - 1
        least = self.call(_aten.masked_fill.Scalar, full, self.mask(layout, trailing, inverted=True), float("-inf"))
        return self.call(node.target, *(arguments | {"self": least}).values())

    def like_rows(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Return a tensor of known size, with the dtype of rows."""
        if self.selections.is_unknown(node) or any(isinstance(operand, Node) for operand in arguments["size"]):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda operand: self.full.get(operand, operand))
        return self.call(node.target, *args, **kwargs)

    def added(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write rows that are added to rows of a table: unselected rows add zeros."""
        source = arguments["source" if name == "index_add" else "src"]
        index = arguments["index"]
        if not isinstance(source, Node) or source not in self.full or index not in self.full:
            return None
        place = self.selections.dim(source)
        fitting = arguments["self"] not in self.full and self.layouts[source] == self.layouts[index]
        along = arguments["dim"] % value_of(self.full[source]).dim() == place
        if not fitting or not along or (name == "scatter_add" and self.selections.dim(index) != place):
            return None
        assert place is not None
        chosen = self.chosen(self.full[source], place, self.layouts[source])
        values = arguments | {"index": self.full[index], "source" if name == "index_add" else "src": chosen}
        extra = {key: values.pop(key) for key in ("alpha",) if key in values}
        return self.call(node.target, *values.values(), **extra)

    def scaled(self, node: Node, name: str, arguments: dict[str, Any]) -> Node | None:
        """Write a number times or divided by the number of selected rows."""
        layout = (
            self.by_size.get(arguments["other"].meta["val"].node.expr) if isinstance(arguments["other"], Node) else None
        )
        if layout is None or arguments["self"] in self.full or arguments.get("rounding_mode"):
            return None
        number = self.call(_aten.sum.default, self.mask(layout))
        return self.call(node.target, arguments["self"], number)
