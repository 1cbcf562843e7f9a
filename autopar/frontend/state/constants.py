"""The constants that a trace read of a model, as one value: it serves as a key for finding programs again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from autopar.frontend.attributes import is_a
from autopar.frontend.state.values import ByIdentity, Length, PlainValue, SeenTensor, is_equal, is_plain

_LEAVES = (SeenTensor, ByIdentity, PlainValue, Length)


class Constants:
    """Numbers, flags, texts, functions, tensors and modes, by their places."""

    def __init__(self, values: Iterator[tuple[Any, Any]]) -> None:
        self._values: Mapping[Any, Any] = {place: _leaf(value) for place, value in values}

    def compared(self, other: Constants) -> Literal["same", "other numbers", "unlike"]:
        """Return whether two models have the same constants, except perhaps for floats."""
        if self._values.keys() != other._values.keys():
            return "unlike"
        pairs = [(value, other._values[place]) for place, value in self._values.items()]
        unlike = [(one, two) for one, two in pairs if not _are_same(one, two)]
        if not unlike:
            return "same"
        return "other numbers" if all(type(one) is type(two) is float for one, two in unlike) else "unlike"


def _leaf(value: Any) -> Any:
    if is_plain(value) or is_a(value, *_LEAVES):
        return value
    return SeenTensor(value) if is_a(value, Tensor) else ByIdentity(value)


def _are_same(one: Any, two: Any) -> bool:
    return type(one) is type(two) and (bool(one == two) if is_a(one, *_LEAVES) else is_equal(one, two))
