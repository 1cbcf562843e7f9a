"""Nodes made by hand: an operator's name and its arguments, tensors written as `T(shape)`."""

from __future__ import annotations

from benchmarks.operator_calls import T, bools, f, ints, make_node

__all__ = ["T", "bools", "f", "ints", "make_node"]
