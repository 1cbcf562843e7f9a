"""The record of an operator: the traits that several passes need."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Layout(Enum):
    """The places of the first operand's elements in the result of an operator that only moves them."""

    SAME = "in the same places"
    RESHAPED = "in the same order, under other dims"
    PERMUTED = "with dims in another order"
    PART = "some of them"
    REPEATED = "several times"
    JOINED = "behind those of other operands"


class Product(Enum):
    """The form in which an operator multiplies and sums."""

    MATRICES = "two matrices"
    BATCHED = "a pair of matrices for every index of leading dims"
    EINSUM = "by an equation"
    VECTORS = "with a vector: one operation per element read"
    CONVOLUTION = "a window of positions with a kernel"
    EXPERTS = "rows with the matrix of their expert"


class Creation(Enum):
    """The source of the shape of a tensor that an operator creates."""

    SIZES = "from sizes"
    NEW = "from sizes; dtype and device from an operand"
    LIKE = "from an operand"


class Loss(Enum):
    """The operands that a loss compares."""

    ELEMENTS = "elements with elements"
    CLASSES = "scores of classes with the index of the right one"


class Finite(Enum):
    """The values at which an operator and its derivatives are finite."""

    AT_ZERO = "where floating operands are zero"
    EVERYWHERE = "at all finite numbers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator: all overloads, private and in-place forms of one base name.

    is_view: the result may share the operand's memory, and does so wherever strides allow it.
    is_constant: the result is a constant to backward.
    shape: the argument that is the shape of the result. sizes: the argument that is a part of that shape.
    added: the argument that a product adds to its result.
    weight: the position of the weight of a product whose weight gradient can be deferred (codegen/runtime/deferred.py).
    is_drawn: the operator draws numbers by the position of an element in the whole tensor, so that every plan draws
        what one process does.
    is_recurrent: the operator runs several layers over padded sequences.
    is_chosen_by_device: torch chooses the implementation by device, and with it what is kept for backward.
    fill: the number that all elements of a created tensor are, or the argument that gives it.
    indices: the position of the result that is indices along a dim of the operand. is_gather: the result has elements
        of the first operand, at indices.
    specials: special functions per element, forward and backward (costs/specials.py).
    short_name: a name for the result, where the operator's own is taken or long.
    roles: names for the operands.
    """

    name: str
    layout: Layout | None = None
    is_view: bool = False
    is_constant: bool = False
    shape: str = ""
    sizes: str = ""
    product: Product | None = None
    added: str = ""
    weight: int | None = None
    is_attention: bool = False
    creation: Creation | None = None
    fill: float | str | None = None
    loss: Loss | None = None
    finite: Finite | None = None
    is_drawn: bool = False
    is_recurrent: bool = False
    is_chosen_by_device: bool = False
    indices: int | None = None
    is_gather: bool = False
    specials: tuple[float, float] = (0.0, 0.0)
    short_name: str = ""
    roles: tuple[str, ...] = ()
