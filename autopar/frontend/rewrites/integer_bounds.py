"""Masks that are the same for all elements, by the bounds of the integers that they compare.

An index along a dim of size E is at most E - 1. So a test for experts beyond the last one is false, and whatever it
masks is unchanged (transformers masks rows of experts on other ranks, also where there are no other ranks).

    topk, sort, argmax, ... along a dim of size E       indices from 0 to E - 1, and values within those sorted
    views, copies, parts, joins and gathers             the bounds of their source
    clamp(i, low, high)                                 i, if all of it lies within; else bounds within low and high
    i >= n, i < n, i == n, ...                          constant, if the bounds decide it; so are `not`, `and`, `or`

    masked_fill(x, mask, value)     x, where the mask is false
    where(mask, x, y)               x or y, where the mask is constant

Bounds hold for any values of a batch and of the parameters, also for nan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import torch

from autopar.frontend.fx_import import FlatGraph
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import MOVING, SAME_PLACES

_INDICES: Final[Mapping[str, int]] = {
    "topk": 1,
    "sort": 1,
    "max": 1,
    "min": 1,
    "argmax": 0,
    "argmin": 0,
    "argsort": 0,
}
"""Operators that return indices along a dim, and the position of these among their results."""

_GATHERS: Final = frozenset({"index", "index_select", "gather", "take_along_dim"})
"""Operators that return elements of their first operand."""


class Bounds(NamedTuple):
    """The least and the greatest number that a tensor may have; of booleans 0 and 1."""

    low: float
    high: float

    @property
    def is_constant(self) -> bool:
        """Return whether all elements are the same number."""
        return self.low == self.high

    def contains(self, other: Bounds) -> bool:
        """Return whether the other bounds are within these."""
        return self.low <= other.low and other.high <= self.high


_ANY = Bounds(-math.inf, math.inf)


def integer_bounds(flat: FlatGraph) -> dict[Ref, Bounds]:
    """Return the bounds of the integers and booleans of a graph that follow from its calls alone."""
    metas, bounds = flat.metas(), dict[Ref, Bounds]()
    for node in flat.nodes:
        for index, meta in enumerate(node.outputs):
            of_result = _bounds(node, index, bounds, metas)
            if of_result is not None and _representable(meta.dtype).contains(of_result):
                bounds[Ref(node.name, index)] = of_result
    return bounds


def drop_constant_masks(flat: FlatGraph) -> None:
    """Replace calls by the operand that they return, as the module docstring describes."""
    bounds, metas = integer_bounds(flat), flat.metas()
    renamed: dict[Ref, Ref] = {}
    for node in flat.nodes:
        select = _SELECTIONS.get(base_name(node.op))
        source = select(arguments_of(node), bounds) if select is not None and bounds else None
        if isinstance(source, Ref) and metas[source] == node.meta:
            renamed[Ref(node.name)] = source
    flat.nodes = [node for node in flat.nodes if Ref(node.name) not in renamed]
    flat.substitute(renamed)


# --- bounds of results ------------------------------------------------------------------------------------------------


def _bounds(node: Node, index: int, bounds: Mapping[Ref, Bounds], metas: Mapping[Ref, TensorMeta]) -> Bounds | None:
    name, arguments = base_name(node.op).strip("_"), arguments_of(node)
    if _INDICES.get(name) == index:
        shape, dim = metas[node.inputs[0]].shape, arguments.get("dim")
        return Bounds(0, (math.prod(shape) if dim is None else shape[dim] if shape else 1) - 1)
    if name in _GATHERS or (name in _INDICES and len(node.inputs) == 1):
        return bounds.get(node.inputs[0])
    if name in MOVING:
        sources = [bounds.get(ref) for ref in node.inputs]
        is_cast = name in SAME_PLACES and torch.bool in {metas[ref].dtype for ref in node.inputs} ^ {node.meta.dtype}
        known = [source for source in sources if source is not None]
        if is_cast or not known or len(known) < len(sources):
            return None
        return Bounds(min(source.low for source in known), max(source.high for source in known))
    if name == "clamp":
        limits = [arguments.get("min"), arguments.get("max")]
        low, high = (default if limit is None else limit for default, limit in zip(_ANY, limits, strict=True))
        source = bounds.get(node.inputs[0])
        is_cut = source is not None and not isinstance(low, Ref) and not isinstance(high, Ref) and low <= high
        return None if source is None or not is_cut else Bounds(*(min(max(end, low), high) for end in source))
    if name in _COMPARISONS or (name in _CONNECTIVES and node.meta.dtype == torch.bool):
        first, second = (_of_value(arguments.get(key, 0), bounds, metas) for key in ("self", "other"))
        if first is None or second is None:
            return None
        return _CONNECTIVES[name](first, second) if name in _CONNECTIVES else _compared(name, first, second)
    return None


def _representable(dtype: torch.dtype) -> Bounds:
    """Return the range in which a dtype has every integer."""
    if dtype == torch.bool:
        return Bounds(0, 1)
    if dtype.is_complex:
        return Bounds(math.inf, -math.inf)
    if dtype.is_floating_point:
        greatest = 2.0 / torch.finfo(dtype).eps
        return Bounds(-greatest, greatest)
    return Bounds(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _of_value(value: Any, bounds: Mapping[Ref, Bounds], metas: Mapping[Ref, TensorMeta]) -> Bounds | None:
    """Return the bounds of an operand: a tensor, or a number."""
    if isinstance(value, Ref):
        return bounds.get(value, Bounds(0, 1) if metas[value].dtype == torch.bool else None)
    return Bounds(value, value) if isinstance(value, (bool, int, float)) else None


def _compared(name: str, first: Bounds, second: Bounds) -> Bounds:
    """Return 0, 1, or both, for a comparison of all numbers of two ranges."""
    if name in ("ge", "gt"):
        return _compared({"ge": "le", "gt": "lt"}[name], second, first)
    if name == "ne":
        return _not(_compared("eq", first, second), second)
    if name == "eq":
        is_always = first.is_constant and first == second
        return Bounds(is_always, first.low <= second.high and second.low <= first.high)
    holds: Callable[[float, float], bool] = operator.lt if name == "lt" else operator.le
    return Bounds(holds(first.high, second.low), holds(first.low, second.high))


def _not(first: Bounds, _: Bounds) -> Bounds:
    return Bounds(1 - first.high, 1 - first.low)


def _and(first: Bounds, second: Bounds) -> Bounds:
    return Bounds(min(first.low, second.low), min(first.high, second.high))


def _or(first: Bounds, second: Bounds) -> Bounds:
    return Bounds(max(first.low, second.low), max(first.high, second.high))


_COMPARISONS: Final = frozenset({"ge", "gt", "le", "lt", "eq", "ne"})
_CONNECTIVES: Final[Mapping[str, Callable[[Bounds, Bounds], Bounds]]] = {
    "logical_not": _not,
    "bitwise_not": _not,
    "logical_and": _and,
    "bitwise_and": _and,
    "and": _and,
    "logical_or": _or,
    "bitwise_or": _or,
    "or": _or,
}

# --- the operand that a call returns ----------------------------------------------------------------------------------


def _unmasked(arguments: Mapping[str, Any], bounds: Mapping[Ref, Bounds]) -> Any:
    return arguments["self"] if bounds.get(arguments["mask"]) == (0, 0) else None


def _chosen(arguments: Mapping[str, Any], bounds: Mapping[Ref, Bounds]) -> Any:
    condition = bounds.get(arguments["condition"])
    if condition is None or not condition.is_constant:
        return None
    return arguments.get("self" if condition.low else "other")


def _unclamped(arguments: Mapping[str, Any], bounds: Mapping[Ref, Bounds]) -> Any:
    limits = (arguments.get("min"), arguments.get("max"))
    if any(isinstance(limit, Ref) for limit in limits):
        return None
    cut = Bounds(*(default if limit is None else limit for default, limit in zip(_ANY, limits, strict=True)))
    source = bounds.get(arguments["self"])
    return arguments["self"] if source is not None and cut.contains(source) else None


_SELECTIONS: Final[Mapping[str, Callable[[Mapping[str, Any], Mapping[Ref, Bounds]], Any]]] = {
    "masked_fill": _unmasked,
    "where": _chosen,
    "clamp": _unclamped,
}
