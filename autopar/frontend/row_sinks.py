"""Where rows of unknown number come together to something of known size: sums, means, losses, rows put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import Node, map_arg

from autopar.frontend.row_values import RowValues, count, value_of
from autopar.ir.graph import base_name
from autopar.operators.schemas import named_arguments
from autopar.operators.traits import CLASS_LOSSES, ELEMENT_LOSSES, FILLED_NEW

_aten = torch.ops.aten


class RowSinks(RowValues):
    """Writes calls that take rows of unknown number and make results of known sizes."""

    def sink(self, node: Node) -> Node:
        """The call of known size in the place of one that takes rows of unknown number."""
        name = base_name(str(node.target)) if isinstance(node.target, torch._ops.OpOverload) else ""
        given = named_arguments(node.target, node.args, node.kwargs) if name else {}  # type: ignore[arg-type]
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
        found = (way(node, name, given) for names, way in ways if name in names)
        made = next((each for each in found if each is not None), None)
        if made is None:
            raise self.mixed(node)
        return made

    def reduced(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        dims = given.get("dim")
        kwargs = {"dtype": given["dtype"]} if given.get("dtype") else {}
        return self.total(self.full[given["self"]], given["self"], name, dims, given.get("keepdim", False), kwargs)

    def total(self, full: Node, of: Node, name: str, dims: Any, keepdim: bool, kwargs: dict[str, Any]) -> Node | None:
        """The sum or mean of selected rows; `of`: the tensor of unknown size whose place `full` has."""
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

    def loss(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """A loss that adds up or averages elements."""
        reduction = {1: "mean", 2: "sum"}.get(given["reduction"])
        operands = [value for value in given.values() if isinstance(value, Node)]
        rows = [value for value in operands if value in self.full]
        if reduction is None or len({self.layouts[each] for each in rows}) != 1 or not isinstance(given["self"], Node):
            return None
        widest = max(operands, key=lambda each: len(each.meta["val"].shape))
        if widest not in self.full:
            return None
        args = map_arg(tuple((given | {"reduction": 0}).values()), lambda each: self.full.get(each, each))
        each = self.call(node.target, *args)
        same = all(self.from_end(row) == self.from_end(widest) for row in rows)
        return self.total(each, widest, reduction, None, False, {}) if same else None

    def class_loss(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """Cross-entropy of selected rows: the classes of others are to be ignored."""
        x, target = given["self"], given["target"]
        both = x in self.full and target in self.full and self.layouts[x] == self.layouts[target]
        if not both or value_of(self.full[target]).is_floating_point():
            return None
        if (self.selections.dim(x), self.selections.dim(target)) != (0, 0):
            return None
        trailing = value_of(self.full[target]).dim() - 1
        invalid = self.mask(self.layouts[target], trailing, inverted=True)
        ignored = self.call(_aten.masked_fill.Scalar, self.full[target], invalid, given["ignore_index"])
        values = given | {"self": self.full[x], "target": ignored}
        return self.call(node.target, *values.values())

    def written(self, node: Node) -> Node | None:
        """Rows of unknown number, of which a mask selects some that are put back; None for any other call."""
        is_put = isinstance(node.target, torch._ops.OpOverload) and base_name(str(node.target)) == "index_put"
        if not is_put or node.args[0] not in self.full:
            return None
        return self.put(node, "index_put", named_arguments(node.target, node.args, node.kwargs))  # type: ignore[arg-type]

    def put(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """Rows that are put back where the mask selected them."""
        value = given["values" if name == "index_put" else "source"]
        place = self.selections.place(node, given)
        if place is None or given.get("accumulate") or not self.is_along(place[0], given["self"], place[1]):
            return None
        selection, start = place
        target = self.full.get(given["self"], given["self"])
        rank = len(selection.shape)
        trailing = value_of(target).dim() - start - rank
        if value in self.full:
            if self.layouts[value] != (selection.symbol,) or self.from_end(value) != trailing + 1:
                return None
            full, at = self.full[value], self.selections.dim(value)
            value = self.call(_aten.unflatten.int, full, at, list(selection.shape)) if rank > 1 else full
        elif value.meta["val"].dim() > trailing:  # one row for all, or as many as are selected
            return None
        mask = self.mask((selection.symbol,)) if rank == 1 else self.renamed.get(selection.mask, selection.mask)
        if trailing:
            mask = self.call(_aten.view.default, mask, [*selection.shape, *[1] * trailing])
        return self.stored(node, target, self.call(_aten.where.self, mask, value, target))

    def stored(self, node: Node, target: Node, value: Node) -> Node:
        """The value, which a call that writes stores in its first operand."""
        is_written = node.target._schema.is_mutable  # type: ignore[union-attr]
        return self.call(_aten.copy_.default, target, value) if is_written else value

    def put_elsewhere(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """Rows that are put where an index says: those that are not selected are put behind the end."""
        start = next(at for at, each in enumerate(given["indices"]) if each is not None)
        index, value, target = given["indices"][start], given["values"], given["self"]
        fitting = len(given["indices"]) == start + 1 and index in self.full and len(index.meta["val"].shape) == 1
        if not fitting or target in self.full:
            return None
        trailing = value_of(target).dim() - start - 1
        if value in self.full:
            if self.layouts[value] != self.layouts[index] or self.from_end(value) != trailing + 1:
                return None
        elif value.meta["val"].dim() > trailing:
            return None
        size = value_of(target).shape[start]
        counted = self.call(_aten.remainder.Scalar, self.full[index], size)  # from the front on
        behind = self.call(_aten.masked_fill.Scalar, counted, self.mask(self.layouts[index], inverted=True), size)
        indices = [*[None] * start, behind]
        values = self.full.get(value, value)
        put = self.call(
            _aten.index_put.default, self.longer(target, start), indices, values, given.get("accumulate", False)
        )
        return self.stored(node, target, self.call(_aten.slice.Tensor, put, start, 0, size))

    def longer(self, target: Node, dim: int) -> Node:
        """A tensor with one more row behind."""
        return self.call(_aten.cat.default, [target, self.call(_aten.slice.Tensor, target, dim, 0, 1)], dim)

    def scattered(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """Rows that are scattered: those that are not selected go behind the end."""
        source, index, target = given.get("src"), given["index"], given["self"]
        if not isinstance(source, Node) or not {source, index} <= set(self.full) or target in self.full:
            return None
        dim = given["dim"] % value_of(target).dim()
        if self.layouts[source] != self.layouts[index] or {self.selections.dim(each) for each in (source, index)} != {
            dim
        }:
            return None
        size = value_of(target).shape[dim]
        trailing = value_of(target).dim() - dim - 1
        invalid = self.mask(self.layouts[index], trailing, inverted=True)
        behind = self.call(_aten.masked_fill.Scalar, self.full[index], invalid, size)
        functional = _aten.scatter_reduce.two if name == "scatter_reduce" else _aten.scatter.src
        extra = {"include_self": given["include_self"]} if name == "scatter_reduce" else {}
        reduce = [given["reduce"]] if name == "scatter_reduce" else []
        put = self.call(functional, self.longer(target, dim), dim, behind, self.full[source], *reduce, **extra)
        return self.stored(node, target, self.call(_aten.slice.Tensor, put, dim, 0, size))

    def largest(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """The largest of selected rows, some of which are sure to be there."""
        x = given["self"]
        place, layout = self.selections.dim(x), self.layouts[x]
        full, is_whole = self.full[x], str(node.target) in ("aten.max.default", "aten.amax.default")
        some = any(isinstance(part, int) and part > 0 for part in layout)
        if not some or place is None or not is_whole or not value_of(full).is_floating_point():
            return None
        trailing = value_of(full).dim() - place - 1
        least = self.call(_aten.masked_fill.Scalar, full, self.mask(layout, trailing, inverted=True), float("-inf"))
        return self.call(node.target, *(given | {"self": least}).values())

    def like_rows(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """A tensor of known size, of the dtype of rows."""
        if self.selections.is_unknown(node) or any(isinstance(each, Node) for each in given["size"]):
            return None
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: self.full.get(each, each))
        return self.call(node.target, *args, **kwargs)

    def added(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """Rows that are added to those of a table: of the others zeros are."""
        source = given["source" if name == "index_add" else "src"]
        index = given["index"]
        if not isinstance(source, Node) or source not in self.full or index not in self.full:
            return None
        place = self.selections.dim(source)
        fitting = given["self"] not in self.full and self.layouts[source] == self.layouts[index]
        along = given["dim"] % value_of(self.full[source]).dim() == place
        if not fitting or not along or (name == "scatter_add" and self.selections.dim(index) != place):
            return None
        assert place is not None
        chosen = self.chosen(self.full[source], place, self.layouts[source])
        values = given | {"index": self.full[index], "source" if name == "index_add" else "src": chosen}
        extra = {key: values.pop(key) for key in ("alpha",) if key in values}
        return self.call(node.target, *values.values(), **extra)

    def scaled(self, node: Node, name: str, given: dict[str, Any]) -> Node | None:
        """A number by the number of selected rows."""
        layout = self.by_size.get(given["other"].meta["val"].node.expr) if isinstance(given["other"], Node) else None
        if layout is None or given["self"] in self.full or given.get("rounding_mode"):
            return None
        number = self.call(_aten.sum.default, self.mask(layout))
        return self.call(node.target, given["self"], number)
