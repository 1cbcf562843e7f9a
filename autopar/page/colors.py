"""The page's colors by meaning: names of classes in page.css."""

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
"""Colors of neighboring groups of an axis. Further groups repeat them."""


def colors_of(kinds: Iterable[str], assigned: Mapping[str, str]) -> dict[str, str]:
    """Map every kind to a color; kinds without an assigned color take the colors of FURTHER in turn."""
    others = [kind for kind in kinds if kind not in assigned]
    return {kind: assigned[kind] for kind in kinds if kind in assigned} | {
        kind: FURTHER[index % len(FURTHER)] for index, kind in enumerate(others)
    }
