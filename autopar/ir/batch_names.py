"""Names of the batch's inputs in a graph: the batch's own, marked where a parameter or buffer has the same name."""

from __future__ import annotations

from collections.abc import Container

_OF_BATCH = "@batch"


def input_name(key: str, parameters: Container[str]) -> str:
    """Return the graph's name for an input of the batch, distinct from the model's parameters and buffers."""
    return key + _OF_BATCH if key in parameters else key


def batch_key(name: str) -> str:
    """Return the batch's name for an input of a graph."""
    return name.removesuffix(_OF_BATCH)
