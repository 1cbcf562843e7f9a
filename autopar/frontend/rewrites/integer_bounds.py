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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autopar.frontend.fx_import import FlatGraph
from autopar.ir.graph import Node, Ref, TensorMeta, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import GATHERS, INDICES, MOVING, SAME_PLACES


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
_TRUTH = Bounds(0, 1)


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
    for node in flat.nodes if bounds else ():
        operand = _returned(node, bounds)
        # What is left out may be trained: its gradient is zero then, which an optimizer with weight decay sees.
        is_trained = any(ref != operand and metas[ref].requires_grad for ref in node.inputs)
        if isinstance(operand, Ref) and (metas[operand],) == node.outputs and not is_trained:
            renamed[Ref(node.name)] = operand
    flat.nodes = [node for node in flat.nodes if Ref(node.name) not in renamed]
    flat.substitute(renamed)


def _returned(node: Node, bounds: Mapping[Ref, Bounds]) -> Any:
    """Return the operand that a call returns unchanged; None if there is none."""
    arguments = arguments_of(node)
    match base_name(node.op):
        case "masked_fill":
            return arguments["self"] if bounds.get(arguments["mask"]) == (0, 0) else None
        case "where":
            condition = bounds.get(arguments["condition"], _ANY)
            return arguments.get("self" if condition.low else "other") if condition.is_constant else None
        case "clamp":
            source, limits = bounds.get(arguments["self"]), _limits(arguments)
            is_inside = source is not None and limits is not None and limits.contains(source)
            return arguments["self"] if is_inside else None
    return None


# --- bounds of results ------------------------------------------------------------------------------------------------


def _bounds(node: Node, index: int, bounds: Mapping[Ref, Bounds], metas: Mapping[Ref, TensorMeta]) -> Bounds | None:
    name, arguments, dtype = base_name(node.op).strip("_"), arguments_of(node), node.outputs[index].dtype
    if INDICES.get(name) == index:
        shape, dim = metas[node.inputs[0]].shape, arguments.get("dim")
        return Bounds(0, (math.prod(shape) if dim is None else shape[dim] if shape else 1) - 1)
    if name in GATHERS or (name in INDICES and len(node.inputs) == 1):
        return bounds.get(node.inputs[0])
    if name in MOVING and not _makes_others(name, arguments):
        is_cast = name in SAME_PLACES and torch.bool in {metas[ref].dtype for ref in node.inputs} ^ {
            node.outputs[index].dtype
        }
        return None if is_cast else _of_all([bounds.get(ref) for ref in node.inputs])
    if name == "clamp":
        source, limits = bounds.get(node.inputs[0]), _limits(arguments)
        if source is None or limits is None or limits.low > limits.high:
            return None
        return Bounds(*(min(max(end, limits.low), limits.high) for end in source))
    if dtype != torch.bool:
        return None
    first, second = (_of_value(arguments.get(key, 0), bounds, metas) for key in ("self", "other"))
    return None if first is None or second is None else _truth(name, first, second)


def _makes_others(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a call of a name that moves values makes others: positions, or another reading of the bits."""
    return (name == "repeat_interleave" and "self" not in arguments) or (name == "view" and "dtype" in arguments)


def _of_all(sources: Sequence[Bounds | None]) -> Bounds | None:
    """Return bounds of the numbers of several tensors; None if one of them has none."""
    bounded = [source for source in sources if source is not None]
    if not bounded or len(bounded) < len(sources):
        return None
    return Bounds(min(source.low for source in bounded), max(source.high for source in bounded))


def _limits(arguments: Mapping[str, Any]) -> Bounds | None:
    """Return the bounds within which a call clamps; None if they are tensors."""
    limits = [arguments.get("min"), arguments.get("max")]
    if any(isinstance(limit, Ref) for limit in limits):
        return None
    return Bounds(*(end if limit is None else limit for end, limit in zip(_ANY, limits, strict=True)))


def _representable(dtype: torch.dtype) -> Bounds:
    """Return the range of a dtype of integers; an empty one of others, whose casts round."""
    if dtype == torch.bool:
        return Bounds(0, 1)
    if dtype.is_complex or dtype.is_floating_point:
        return Bounds(math.inf, -math.inf)
    return Bounds(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _of_value(value: Any, bounds: Mapping[Ref, Bounds], metas: Mapping[Ref, TensorMeta]) -> Bounds | None:
    """Return the bounds of an operand: a tensor, or a number."""
    if isinstance(value, Ref):
        return bounds.get(value, Bounds(0, 1) if metas[value].dtype == torch.bool else None)
    return Bounds(value, value) if isinstance(value, (bool, int, float)) else None


def _truth(name: str, first: Bounds, second: Bounds) -> Bounds | None:
    """Return 0, 1, or both, for a comparison or a connective of all numbers of two ranges; None for other calls."""
    is_connective = name not in ("lt", "le", "gt", "ge", "eq", "ne")
    if is_connective and not (_TRUTH.contains(first) and _TRUTH.contains(second)):
        return None
    match name:
        case "lt":
            return Bounds(first.high < second.low, first.low < second.high)
        case "le":
            return Bounds(first.high <= second.low, first.low <= second.high)
        case "gt":
            return _truth("lt", second, first)
        case "ge":
            return _truth("le", second, first)
        case "eq":
            is_always = first.is_constant and first == second
            return Bounds(is_always, first.low <= second.high and second.low <= first.high)
        case "ne":
            low, high = _truth("eq", first, second) or _ANY
            return Bounds(1 - high, 1 - low)
        case "logical_not" | "bitwise_not":
            return Bounds(1 - first.high, 1 - first.low)
        case "logical_and" | "bitwise_and" | "and":
            return Bounds(min(first.low, second.low), min(first.high, second.high))
        case "logical_or" | "bitwise_or" | "or":
            return Bounds(max(first.low, second.low), max(first.high, second.high))
    return None
