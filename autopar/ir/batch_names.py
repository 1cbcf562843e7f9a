"""Names of the batch's inputs in a graph: those of the batch, marked where a parameter or buffer has the same."""

from __future__ import annotations

from collections.abc import Container

_OF_BATCH = "@batch"


def input_name(key: str, parameters: Container[str]) -> str:
    """What a graph calls an input of the batch, beside the model's parameters and buffers."""
    return key + _OF_BATCH if key in parameters else key


def batch_key(name: str) -> str:
    """What the batch calls an input of a graph."""
    return name.removesuffix(_OF_BATCH)
