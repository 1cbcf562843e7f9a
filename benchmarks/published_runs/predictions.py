"""Rows that can be predicted, and their predictions; each model is traced once."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autopar.errors import AutoparError
from autopar.frontend.rebatch import BatchedTrace
from autopar.ir.plan_data import Prediction
from autopar.strategies import Predictor
from benchmarks.published_runs.machines import cluster_of, device_of, precision_of
from benchmarks.published_runs.models import build, built_as, graph_of, model_key
from benchmarks.published_runs.rows import NEEDED, Row, SkippedError
from benchmarks.published_runs.strategies import profile_of, strategy_of
from cost_models.framework_profiles import Framework
from cost_models.machine import Cluster

Skipped = tuple[Row, str]
"""A row, and why it is not predicted."""


ARCHITECTURES = (
    ("v100", "volta"),
    ("rtx8000", "volta"),
    ("h100", "hopper"),
    ("h200", "hopper"),
    ("l4", "ada"),
    ("rtx4090", "ada"),
    ("rtx6000-ada", "ada"),
    ("a10", "ampere"),
    ("a6000", "ampere"),
    ("rtx3090", "ampere"),
)
"""The first whose beginning a device's name has tells the generation of its kernels."""


def architecture(device_name: str) -> str:
    """The generation of a device, "" if it is none of ARCHITECTURES."""
    return next((name for start, name in ARCHITECTURES if device_name.startswith(start)), "")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One predicted row."""

    row: Row
    prediction: Prediction
    architecture: str

    @property
    def seconds(self) -> float:
        return self.prediction.step_seconds

    @property
    def error(self) -> float:
        """Signed, relative."""
        return self.seconds / float(self.row["iter_time_s"]) - 1


@dataclass
class Predictions:
    """All rows of a file, each model traced once."""

    predictors: dict[Any, Predictor] = field(default_factory=dict)
    trace_seconds: float = 0.0
    score_seconds: float = 0.0

    def outcome(self, row: Row) -> Outcome:
        """Raises SkippedError."""
        check(row)
        cluster, strategy, profile = self.cluster(row), strategy_of(row), self.profile(row)
        predictor = self.predictor(row)
        started = time.perf_counter()
        try:
            found = predictor.predict(
                cluster, strategy, global_batch_size=row["global_batch"], framework=profile,
                precision=precision_of(row),
            )  # fmt: skip
        except AutoparError as error:
            raise SkippedError(str(error).splitlines()[0]) from None
        self.score_seconds += time.perf_counter() - started
        return Outcome(row, found, architecture(cluster.device.name))

    def cluster(self, row: Row) -> Cluster:
        """Where the row ran. Raises SkippedError."""
        return cluster_of(row)

    def profile(self, row: Row) -> Framework:
        """Of the row's framework."""
        return profile_of(row)

    def predictor(self, row: Row) -> Predictor:
        """Of the row's model."""
        key = model_key(row)
        if key not in self.predictors:
            started = time.perf_counter()
            if built_as(row):
                model, batch = build(row)
                self.predictors[key] = Predictor(model, example_inputs=batch, precision=precision_of(row))
            else:
                traced = BatchedTrace(partial(graph_of, row))
                self.predictors[key] = Predictor.of_trace(traced, 2, precision_of(row))
            self.trace_seconds += time.perf_counter() - started
        return self.predictors[key]


def predict_rows(
    rows: Iterable[Row], predictions: Predictions | None = None
) -> tuple[list[Outcome], list[Skipped], Predictions]:
    """(predicted rows, skipped rows with the reason)."""
    outcomes, skipped = list[Outcome](), list[Skipped]()
    predictions = predictions or Predictions()
    for row in rows:
        try:
            outcomes.append(predictions.outcome(row))
        except SkippedError as error:
            skipped.append((row, str(error)))
    return outcomes, skipped, predictions


def check(row: Row) -> None:
    """Raises SkippedError for rows without what is needed, and for runs that failed."""
    missing = [name for name in NEEDED if row.get(name) is None]
    if missing:
        raise SkippedError(f"missing {', '.join(missing)}")
    if row.get("status", "ok") != "ok":
        raise SkippedError(f"status {row['status']}")
    if not row.get("iter_time_s"):
        raise SkippedError("missing iter_time_s")
    if utilisation(row) > 1:
        raise SkippedError("more FLOP/s than the device has")


def utilisation(row: Row) -> float:
    """Least floating-point operations of the row, by the peak of its GPUs."""
    h, s, gates = row["hidden"], row["seq_len"], 2 if row.get("ffn_gated") else 1
    weights = (
        row["layers"] * h * (h * (2 + 2 * row.get("kv_heads", row["heads"]) / row["heads"]) + row["ffn"] * (gates + 1))
    )
    flops = 6 * row["global_batch"] * s * (weights + row["layers"] * s * h)
    peak = device_of(row).peak(precision_of(row)) * row["gpus_total"]
    return float(flops / peak / row["iter_time_s"])
