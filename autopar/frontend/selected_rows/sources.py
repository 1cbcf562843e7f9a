"""Find where an exported graph selects rows by a mask, and which of its calls have one row per selected row."""

from __future__ import annotations

import operator
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.node import Node, map_arg

from autopar.ir.graph import base_name
from autopar.operators.schemas import may_be_view, named_arguments

_CHECKS = ("assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size", "assert_tensor_metadata")


PLACES = frozenset({"aten.nonzero.default", "aten.nonzero_numpy.default", "aten.where.default"})
"""Operators that return the indices of true elements."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A mask and the symbol for the number of its true elements. shape: the mask's."""

    symbol: Any
    mask: Node
    shape: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return int(torch.Size(self.shape).numel())


class Source(NamedTuple):
    """An index into a call's first operand by the mask of a selection, whose dims begin at `start`."""

    selection: Selection
    start: int


class Selections:
    """The selections of a graph, by symbol.

    sources: calls that select rows. positions: tensors of indices along a dim of the mask. Empty where any size comes
    from elsewhere.
    """

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.by_symbol: dict[Any, Selection] = {}
        self.sources: dict[Node, Source] = {}
        self.positions: dict[Node, tuple[Selection, int]] = {}
        self.fake: Any = None
        self._masks: dict[Any, Selection] = {}  # by their computation
        self._nodes = list(graph.nodes)
        if not any(map(self.is_unknown, self._nodes)):
            return
        self._changing: set[Node] = set()  # tensors that a later call writes to
        self._ids = self._numbered()
        for node in self._nodes:
            if not self._read(node):
                self.by_symbol.clear()
                return

    def _numbered(self) -> dict[Node, int]:
        """Return a number for each call; calls that compute the same from the same operands share one."""
        numbers: dict[Node, int] = {}
        number_of: dict[Any, int] = {}
        for node in self._nodes:
            is_call = isinstance(node.target, torch._ops.OpOverload)
            shares = (
                is_call and may_be_view(str(node.target)) and any(x in self._changing for x in node.all_input_nodes)
            )
            if shares or _is_written(node):
                self._changing.add(node)
            drawn = is_call and torch.Tag.nondeterministic_seeded in node.target.tags
            is_pure = is_call and not node.target._schema.is_mutable and not drawn
            key: Any = node
            if is_pure and not any(operand in self._changing for operand in (node, *node.all_input_nodes)):
                of = tuple(numbers[operand] for operand in node.all_input_nodes)
                key = node.target, of, str(map_arg((node.args, node.kwargs), lambda operand: numbers[operand]))
            numbers[node] = number_of.setdefault(key, len(number_of))
        return numbers

    def _read(self, node: Node) -> bool:
        """Note a call; return False for one that makes a size of values other than a mask's."""
        if not self.is_unknown(node):
            return True
        if self.fake is None:
            self.fake = next(v for v in _leaves(node.meta["val"]) if isinstance(v, Tensor)).fake_mode  # type: ignore[attr-defined]
        if node.target is operator.getitem:
            whole: Any = node.args[0]
            if str(whole.target) in PLACES:
                self.positions[node] = self._of(whole, whole.args[0]), node.args[1]  # type: ignore[assignment]
            return True
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        name = base_name(str(node.target))
        if str(node.target) in PLACES:
            return self._of(node, node.args[0]) is not None
        if name in ("view", "reshape", "squeeze", "select", "flatten"):
            whole = node.args[0]
            is_list = isinstance(whole, Node) and base_name(str(whole.target)) == "nonzero"
            if is_list and len(whole.args[0].meta["val"].shape) == 1 and len(node.meta["val"].shape) == 1:
                self.positions[node] = self._of(whole, whole.args[0]), 0  # type: ignore[assignment]
                return True
        place = self._source(node, name)
        if place is not None:
            self.sources[node] = place
            return True
        symbols_read = set(self.by_symbol)
        return all(symbols <= symbols_read for symbols in map(_symbols, _sizes(node)))

    def _source(self, node: Node, name: str) -> Source | None:
        arguments: dict[str, Any] = named_arguments(node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        if name == "masked_select":
            mask, operand = arguments["mask"], arguments["self"]
            same = mask.meta["val"].shape == operand.meta["val"].shape
            selection = self._of(node, mask) if same else None
            return Source(selection, 0) if selection is not None else None
        if name not in ("index", "index_select"):
            return None
        if name == "index":
            used = [position for position in arguments["indices"] if position is not None]
            if len(used) == 1 and used[0].meta["val"].dtype == torch.bool and self._of(node, used[0]) is None:
                return None
        place = self.place(node, arguments)
        return Source(*place) if place is not None else None

    def place(self, node: Node, arguments: dict[str, Any]) -> tuple[Selection, int] | None:
        """Return the selection by which a call indexes its first operand, and the first dim of the mask."""
        indices = arguments.get("indices")
        if indices is None:
            index, dim = arguments["index"], arguments["dim"] % len(arguments["self"].meta["val"].shape)
            indices = [*[None] * dim, index]
        used = [position for position in indices if position is not None]
        start = next((at for at, position in enumerate(indices) if position is not None), 0)
        if any(position is None for position in indices[start : start + len(used)]):
            return None
        if len(used) == 1 and used[0].meta["val"].dtype == torch.bool:
            masked = self._masks.get(self._ids[used[0]])
            return (masked, start) if masked is not None else None
        places = [self.positions.get(position) for position in used]
        if None in places or len({position[0] for position in places if position is not None}) != 1:
            return None
        selection = places[0][0]  # type: ignore[index]
        dims = [position[1] for position in places if position is not None]
        return (selection, start) if dims == list(range(len(selection.shape))) else None

    def _of(self, node: Node, mask: Any) -> Selection | None:
        """Return the selection by a mask that a call makes, or uses; None where the mask may change, or is none."""
        symbols = set().union(*map(_symbols, _sizes(node)))
        if len(symbols) != 1 or not isinstance(mask, Node) or mask.meta["val"].dtype != torch.bool:
            return None
        (symbol,) = symbols
        sizes = mask.meta["val"].shape
        is_part = any(map(_symbols, sizes))  # of rows that another mask selects
        is_known = set().union(*map(_symbols, sizes)) <= set(self.by_symbol)
        if not sizes or mask in self._changing or not is_known or (is_part and len(sizes) > 1):
            return None
        shape = tuple(map(self.padded, sizes))
        same = self._masks.setdefault(self._ids[mask], Selection(symbol, mask, shape))
        selection = self.by_symbol.setdefault(symbol, same)
        return selection if selection is same else None

    # --- sizes -------------------------------------------------------------------------------------------------

    def is_unknown(self, node: Node) -> bool:
        """Return whether a call makes tensors with a dim whose size depends on values."""
        return any(isinstance(v, Tensor) and any(map(_symbols, v.shape)) for v in _leaves(node.meta.get("val")))

    def is_of_size(self, node: Node) -> bool:
        """Return whether a call makes such a size, or computes with it, or checks it."""
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return bool(_symbols(value))
        is_check = isinstance(node.target, torch._ops.OpOverload) and base_name(str(node.target)) in _CHECKS
        return is_check and any(
            self.is_of_size(operand) or self.is_unknown(operand) for operand in node.all_input_nodes
        )

    def size(self, node: Node) -> Any:
        """Return the size of the dim that depends on values, as torch writes it."""
        value = node.meta["val"]
        dim = self.dim(node)
        return None if dim is None else value.shape[dim].node.expr

    def dim(self, node: Node) -> int | None:
        """Return the dim whose size depends on values, if there is one."""
        return self.dim_of(node.meta["val"])

    @staticmethod
    def dim_of(value: Any) -> int | None:
        dims = [at for at, size in enumerate(value.shape) if _symbols(size)] if isinstance(value, Tensor) else []
        return dims[0] if len(dims) == 1 else None

    def number(self, node: Node) -> int:
        """Return a size where all rows are counted."""
        return self.padded(node.meta["val"])

    def padded(self, size: Any) -> int:
        """Return a size of the trace where all rows are counted."""
        sizes = {symbol: selection.num_rows for symbol, selection in self.by_symbol.items()}
        return int(size.node.expr.subs(sizes)) if _symbols(size) else int(size)

    def is_changing(self, node: Node) -> bool:
        """Return whether a later call writes to a tensor."""
        return node in self._changing

    def of_other_operators(self, names: Container[str]) -> set[Any]:
        """Return symbols in sizes of operands of operators that are not among `names`."""
        symbols: set[Any] = set()
        for node in self._nodes:
            if not isinstance(node.target, torch._ops.OpOverload) or self.is_of_size(node):
                continue
            name = base_name(str(node.target)).strip("_")
            by_number = name == "div" or (name == "pow" and isinstance(node.args[1], int) and node.args[1] > 0)
            is_linear = by_number and not (isinstance(node.args[1], Node) and self.is_unknown(node.args[1]))
            if name not in names and not is_linear:
                for operand in (*node.all_input_nodes, node):
                    symbols |= set().union(*map(_symbols, _sizes(operand)))
        return symbols


def _symbols(size: Any) -> set[Any]:
    """Return symbols without a known number in a size, or in a condition on one."""
    node = getattr(size, "node", None)
    if node is None or node.is_constant():
        return set()
    return set(node.expr.free_symbols)


def _sizes(node: Node) -> list[Any]:
    return [size for v in _leaves(node.meta.get("val")) if isinstance(v, Tensor) for size in v.shape]


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_written(mask: Node) -> bool:
    """Return whether a call writes to a mask, or to a view of it, after it was made."""
    for user in mask.users:
        if not isinstance(user.target, torch._ops.OpOverload):
            continue
        if user.target._schema.is_mutable and user.args[0] is mask:
            return True
        if may_be_view(str(user.target)) and _is_written(user):
            return True
    return False
