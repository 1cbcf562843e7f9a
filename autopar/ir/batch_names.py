"""Names of the batch's inputs in a graph: those of the batch, marked where a parameter or buffer has the same."""

from __future__ import annotations

from collections.abc import Container

_OF_BATCH = "@batch"


def input_name(key: str, parameters: Container[str]) -> str:
    """Return the name in a graph of an input of the batch, beside the model's parameters and buffers."""
    return key + _OF_BATCH if key in parameters else key


def batch_key(name: str) -> str:
    """Return the name in the batch of an input of a graph."""
    return name.removesuffix(_OF_BATCH)
