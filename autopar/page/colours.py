"""Colours of the page by what they stand for: names of classes in page.css."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

SECONDS: Mapping[str, str] = {
    "forward compute": "c0",
    "backward compute": "c4",
    "recomputation": "c3",
    "gradient accumulation": "c6",
    "local resharding": "c9",
    "optimizer": "c2",
    "pipeline bubble": "idle",
    "waiting for the host": "idle",
    "gradient and parameter synchronisation": "c1",
}
BYTES: Mapping[str, str] = {
    "parameters": "c0",
    "gradients": "c1",
    "optimizer state": "c2",
    "activations": "c4",
    "transient": "c6",
    "workspace": "idle",
}
FURTHER = ("c5", "c7", "c8", "c3", "c9", "c6")
AXES = ("c0", "c1", "c2", "c4", "c3", "c6", "c7", "c5")
"""Of neighbouring groups of an axis; there may be more groups than colours."""


def colours_of(kinds: Iterable[str], known: Mapping[str, str]) -> dict[str, str]:
    """A colour for every kind; what has none of its own takes further ones in turn."""
    others = [kind for kind in kinds if kind not in known]
    return {kind: known[kind] for kind in kinds if kind in known} | {
        kind: FURTHER[index % len(FURTHER)] for index, kind in enumerate(others)
    }
