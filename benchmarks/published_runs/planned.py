"""A published plan and autopar's own for the same model, GPUs, batch and precision, priced by the same walk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError, InfeasibleError
from autopar.planning.make_request import request_of
from autopar.planning.planner import padded_search
from autopar.settings.compile_options import CompileOptions
from autopar.sharding.assignment import Candidate
from benchmarks.published_runs.machines import cluster_of, precision_of
from benchmarks.published_runs.models import build
from benchmarks.published_runs.predictions import check
from benchmarks.published_runs.rows import Row, SkippedError
from benchmarks.published_runs.strategies import strategy_of

CONFIGURATION = ("model", "gpu", "gpus_total", "global_batch", "seq_len")
"""What rows share that are planned for once, beside the precision that is computed in."""

PINNED = (
    "pp",
    "ddp",
    "dp",
    "tp",
    "cp",
    "ep",
    "etp",
    "zero",
    "micro_batches",
    "recompute",
    "schedule",
    "chunks",
    "offload",
)
"""Of a published strategy, what a searched plan can be pinned to."""

FP8 = ("fp8", "mxfp8")
"""Precisions in whose place autopar's programs have fp8."""

ROOM = "4096GiB"
"""Memory under which a published plan is priced that does not fit as autopar's program."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """row: the fastest of its configuration. published: its plan as autopar's program. own: what autopar chooses.

    fits: whether the published plan fits as autopar's program.
    """

    row: Row
    published: Candidate
    own: Candidate
    fits: bool

    @property
    def ratio(self) -> float:
        """Predicted seconds of the published plan by those of autopar's: above 1 where autopar's is faster."""
        return self.published.plan.prediction.step_seconds / self.own.plan.prediction.step_seconds


def configuration_of(row: Row) -> tuple[Any, ...]:
    """Raises SkippedError."""
    check(row)
    return (*(row[name] for name in CONFIGURATION), precision_of(row))


def fastest(rows: Iterable[Row]) -> tuple[list[Row], list[tuple[Row, str]]]:
    """(the row of each configuration that was measured fastest, skipped rows with the reason)."""
    found: dict[tuple[Any, ...], Row] = {}
    skipped = list[tuple[Row, str]]()
    for row in rows:
        try:
            key = configuration_of(row)
        except SkippedError as error:
            skipped.append((row, str(error)))
            continue
        if key not in found or row["iter_time_s"] < found[key]["iter_time_s"]:
            found[key] = row
    return list(found.values()), skipped


def pins_of(row: Row) -> dict[str, Any]:
    """The constraints under which autopar's search has only the published plan. Raises SkippedError."""
    strategy = strategy_of(row)
    pins = {name: value for name, value in strategy.items() if name in PINNED}
    pins.setdefault("offload", "none")
    tp, ep = pins["tp"], pins.get("ep", 1)
    if ep > 1 and tp > 1 and "etp" not in strategy:  # whole experts on the ranks of tp, too
        if ep % tp:
            raise SkippedError("tp does not divide ep")
        pins |= {"ep": ep // tp, "etp": 1}
    return pins


def compare(row: Row) -> Comparison:
    """Both plans of a row. Raises SkippedError."""
    try:
        own = _searched(row, {})
        try:
            return Comparison(row, _searched(row, pins_of(row)), own, True)
        except InfeasibleError:
            return Comparison(row, _searched(row, {**pins_of(row), "memory": ROOM}), own, False)
    except AutoparError as error:
        raise SkippedError(str(error).splitlines()[0]) from None


def _searched(row: Row, constraints: Mapping[str, Any]) -> Candidate:
    precision, model_and_batch = precision_of(row), build(row)
    model, batch = model_and_batch
    whole = {
        name: torch.zeros(row["global_batch"], *each.shape[1:], dtype=each.dtype, device="meta")
        for name, each in batch.items()
    }
    options = CompileOptions(
        example_inputs=whole,
        precision="bf16" if precision in FP8 else precision,
        fp8=precision in FP8,
        global_batch_size=row["global_batch"],
        constraints=constraints,
    )
    return padded_search(request_of(model, cluster_of(row), options)).best
