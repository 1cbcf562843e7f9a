"""Predictions of a source's runs without the constants that were fitted to them (docs/constants.md), and of large runs
with constants that were fitted to small ones."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.published_runs.machines import cluster_of
from benchmarks.published_runs.predictions import Outcome, Predictions, predict_rows
from benchmarks.published_runs.rows import Row
from benchmarks.published_runs.strategies import profile_of
from cost_models import catalog
from cost_models.framework_profiles import Framework
from cost_models.machine import Cluster

OWN: Mapping[str, Mapping[str, Any]] = {
    "nanotron": {
        "host_layer_seconds": 0.0,
        "host_collective_seconds": 0.0,
        "host_apart_seconds": 0.0,
        "host_far_seconds": 0.0,
        "host_step_seconds": 0.0,
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


GRIDS: Mapping[str, Sequence[float]] = {
    "host_apart_seconds": (0.0, 1e-3, 1.5e-3, 2e-3, 2.5e-3, 3e-3),
    "host_far_seconds": (0.0, 0.1e-3, 0.2e-3, 0.3e-3, 0.4e-3),
    "host_step_seconds": (0.0, 25e-3, 50e-3, 75e-3, 100e-3),
}
"""What of a framework is fitted to runs of some sizes, in this order, and the values that are tried."""
SPLITS = ((16, 64), (64, 128))
"""(most GPUs of the runs that are fitted to, fewest of those that are predicted)."""
FAR_OFF = 0.5
"""A logarithm of predicted by measured beyond this counts no more than this."""


@dataclass
class Replaced(Predictions):
    """Predictions with other figures of one framework. Models are traced once for all figures that are tried."""

    name: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def profile(self, row: Row) -> Framework:
        found = profile_of(row)
        return replace(found, **self.figures) if found.name == self.name else found

    def loss_with(self, rows: Sequence[Row], key: str, value: float) -> float:
        """The mean of |log(predicted / measured)|, each at most FAR_OFF, with another value of one figure."""
        self.figures[key] = value
        off = [abs(math.log(outcome.seconds / outcome.row["iter_time_s"])) for outcome in self.of(rows)]
        return statistics.fmean(min(each, FAR_OFF) for each in off)

    def of(self, rows: Sequence[Row]) -> list[Outcome]:
        return predict_rows(rows, self)[0]


def sizes_left_out(
    rows: Sequence[Row], name: str = "nanotron"
) -> Iterator[tuple[int, int, Mapping[str, float], list[Outcome]]]:
    """Of SPLITS, (most GPUs fitted to, fewest predicted, the figures that fit best, the predicted runs).

    rows: all; those of other frameworks are passed over. Figures are fitted one after another, from none at all, until
    none changes, to runs with a pipeline or a tensor-parallel group over nodes: no other run has them.
    """
    own = [row for row in rows if profile_of(row).name == name]
    predictions = Replaced(name=name)
    for most, fewest in SPLITS:
        predictions.figures = dict.fromkeys(GRIDS, 0.0)
        small = [row for row in own if row["gpus_total"] <= most]
        bearing = [row for row in small if row["pp"] > 1 or row["tp"] > row["gpus_per_node"]]
        before: Mapping[str, float] = {}
        while before != predictions.figures:
            before = dict(predictions.figures)
            for key in GRIDS:
                predictions.figures[key] = min(GRIDS[key], key=partial(predictions.loss_with, bearing, key))
        large = [row for row in own if row["gpus_total"] >= fewest]
        yield most, fewest, dict(predictions.figures), predictions.of(large)
