"""Sets of operators by trait, as base names (`base_name` of ir/graph.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autopar.operators.record import Creation, Finite, Layout, Loss, Operator, Product
from autopar.operators.records import RECORDS


def _where(has_trait: Callable[[Operator], object]) -> frozenset[str]:
    """Return the names of the operators with a trait."""
    return frozenset(name for name, record in RECORDS.items() if has_trait(record))


VIEWS = _where(lambda operator: operator.is_view)
"""Operators whose result shares memory with their first input (reshape: when it can)."""

MOVING = _where(lambda operator: operator.layout)
"""Operators that move elements and compute nothing."""
SAME_PLACES = _where(lambda operator: operator.layout is Layout.SAME)
RESHAPES = _where(lambda operator: operator.layout is Layout.RESHAPED)
"""Operators that change the dims of a tensor and keep the order of its elements."""
PERMUTATIONS = _where(lambda operator: operator.layout is Layout.PERMUTED)
PARTS = _where(lambda operator: operator.layout is Layout.PART)
REPEATS = _where(lambda operator: operator.layout is Layout.REPEATED)
JOINS = _where(lambda operator: operator.layout is Layout.JOINED)

SAME_VALUES = _where(lambda operator: operator.layout is Layout.SAME and not operator.is_constant)
"""Operators of one tensor that leave every element, and its gradient, in its place."""

SHAPES = {name: record.shape for name, record in RECORDS.items() if record.shape}
"""Operator -> the argument that is the shape of the result."""
SIZES = SHAPES | {name: record.sizes for name, record in RECORDS.items() if record.sizes}
"""Operator -> the argument that says nothing but the shape of the result, or a part of it."""

PRODUCTS = _where(lambda operator: operator.product)
CONVOLUTIONS = _where(lambda operator: operator.product is Product.CONVOLUTION)
MATMULS = _where(lambda operator: operator.product not in (None, Product.VECTORS))
"""Products that compute more than once with what they read, so that their time follows from their FLOPs."""
LINEAR_PRODUCTS = MATMULS - CONVOLUTIONS - _where(lambda operator: operator.product is Product.EXPERTS)
ONE_DTYPE = PRODUCTS - _where(lambda operator: operator.product is Product.EXPERTS)
"""Products whose kernels take operands of one dtype."""
BATCHED_PRODUCTS = _where(lambda operator: operator.product is Product.BATCHED)
"""Products of a pair of matrices for every index of their leading dims, where both operands have such."""
ADDED: Mapping[str, str] = {name: record.added for name, record in RECORDS.items() if record.added}
"""Product -> the argument that it adds to its result."""
DEFERRABLE: Mapping[str, int] = {name: record.weight for name, record in RECORDS.items() if record.weight is not None}
"""Product whose weight gradient can be deferred (codegen/runtime/deferred.py) -> which input is the weight."""

ATTENTION = _where(lambda operator: operator.is_attention)

DRAWN = _where(lambda operator: operator.is_drawn)
"""Random operators whose numbers a program draws by the position of an element in the whole tensor."""
RECURRENT = _where(lambda operator: operator.is_recurrent)
"""Operators that run several layers over padded sequences."""
CHOSEN_BY_DEVICE = _where(lambda operator: operator.is_chosen_by_device)
"""Operators that torch implements otherwise on another device, and that keep other tensors for backward there."""

CREATED_FROM_SIZES = _where(lambda operator: operator.creation in (Creation.SIZES, Creation.NEW))
CREATED_LIKE = _where(lambda operator: operator.creation is Creation.LIKE)
CREATED = CREATED_FROM_SIZES | CREATED_LIKE
CONSTANT = CREATED | _where(lambda operator: operator.is_constant)
"""Operators whose results are constants to backward, whatever they take."""
FILLED_NEW = _where(lambda operator: operator.creation is Creation.NEW and operator.fill is not None)
"""Operators that fill a tensor, and take no more than a dtype and a device from their operand."""
FILLED_FROM_OPERAND = FILLED_NEW | {name for name in CREATED_LIKE if RECORDS[name].fill is not None}
"""Operators that fill a tensor, and read no element of their operand."""
FILLS: Mapping[str, float | str] = {name: record.fill for name, record in RECORDS.items() if record.fill is not None}
"""Operator -> the number that all elements of the tensor that it creates are, or the argument that gives it."""

ELEMENT_LOSSES = _where(lambda operator: operator.loss is Loss.ELEMENTS)
CLASS_LOSSES = _where(lambda operator: operator.loss is Loss.CLASSES)

FINITE_EVERYWHERE = _where(lambda operator: operator.finite is Finite.EVERYWHERE)
"""Operators that compute, whose values and derivatives are finite at all finite numbers."""
FINITE_AT_ZERO = MOVING | PRODUCTS | FILLS.keys() | _where(lambda operator: operator.finite)
"""Operators whose values and derivatives are finite where their floating operands are zero."""

INDICES: Mapping[str, int] = {name: record.indices for name, record in RECORDS.items() if record.indices is not None}
"""Operator -> the position of the result that is indices along a dim of its operand."""
GATHERS = _where(lambda operator: operator.is_gather)
"""Operators that return elements of their first operand, at indices."""

SPECIALS: Mapping[str, tuple[float, float]] = {
    name: record.specials for name, record in RECORDS.items() if any(record.specials)
}
"""Operator -> special functions per element, forward and backward."""

SHORT_NAMES: Mapping[str, str] = {name: record.short_name for name, record in RECORDS.items() if record.short_name}
"""Operator -> a name for its result, where the operator's own is taken or long."""
ROLES: Mapping[str, tuple[str, ...]] = {name: record.roles for name, record in RECORDS.items() if record.roles}
"""Operator -> names for its operands."""
