"""Predictions of a source's runs without the constants that were fitted to them (docs/constants.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.published_runs.machines import cluster_of
from benchmarks.published_runs.predictions import Predictions
from benchmarks.published_runs.rows import Row
from benchmarks.published_runs.strategies import profile_of
from cost_models import catalog
from cost_models.frameworks import Framework
from cost_models.machine import Cluster

OWN: Mapping[str, Mapping[str, Any]] = {
    "nanotron": {
        "host_layer_seconds": 0.0,
        "host_collective_seconds": 0.0,
        "host_apart_seconds": 0.0,
        "zero_overlaps": True,
    },
    "internevo": {"overlap": 0.5},
}
"""Framework -> what its figures would be without its own runs: no host, and as much hidden as other profiles have."""
LINKS: Mapping[str, str] = {"efa-400g": "ib-400g"}
"""A link whose contention was fitted to the cluster of a source -> the one that it would be taken from."""


class LeftOut(Predictions):
    """Predictions with every source left out of what it is predicted with."""

    def profile(self, row: Row) -> Framework:
        found = profile_of(row)
        return replace(found, **OWN.get(found.name, {}))

    def cluster(self, row: Row) -> Cluster:
        found = cluster_of(row)
        other = LINKS.get(found.inter_node.name)
        if other is None:
            return found
        contention = catalog.link(other).contention_per_doubling
        return replace(found, inter_node=replace(found.inter_node, contention_per_doubling=contention))
