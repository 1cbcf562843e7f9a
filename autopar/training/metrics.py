"""Metrics of an evaluation: means over the rows of what the user's functions compute from logits and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from autopar.errors import ConstraintError, TrainingError
from autopar.files.text_files import shown

Metric = Callable[[torch.Tensor, Any], Mapping[str, Any]]
"""`(logits, batch) -> {name: number}`, a number being the mean over the batch's rows."""

LOSS = "loss"
NO_LOGITS = "metrics need logits: the model returns a tensor from which its loss is computed"


def metrics_of(metrics: Metric | Sequence[Metric] | None) -> tuple[Metric, ...]:
    """Return the metric functions. Raises ConstraintError for a value that is no function."""
    functions = () if metrics is None else (metrics,) if callable(metrics) else tuple(metrics)
    for function in functions:
        if not callable(function):
            raise ConstraintError(
                "metrics are functions (logits, batch) -> {name: number}",
                values=shown(function),
                alternatives="metrics=accuracy, or metrics=[accuracy, perplexity]",
            )
    return functions


class Means:
    """Means over the rows of all batches of one evaluation."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._rows = 0

    def add(self, values: Mapping[str, float], rows: int) -> None:
        """Add a batch's values, weighted by its rows. Raises ConstraintError for other names than in earlier
        batches."""
        if self._rows and values.keys() != self._sums.keys():
            raise ConstraintError(
                "metrics have the same names for all batches of an evaluation",
                values=f"{', '.join(values)} after {', '.join(self._sums)}",
                alternatives="return the same names for every batch",
            )
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + rows * value
        self._rows += rows

    @property
    def values(self) -> dict[str, float]:
        return {name: value / self._rows for name, value in self._sums.items()}


def metric_values(metrics: Sequence[Metric], logits: torch.Tensor, batch: Any) -> dict[str, float]:
    """Compute the metrics of one batch on rank 0 and return them on every rank. Collective.

    batch: as the user's source yields it. The functions get it on the logits' device, with tuples kept. Raises
    ConstraintError for a bad result. An error of a function on rank 0 ends the others with TrainingError.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _metric_values(metrics, logits, batch)
    device = logits.device if dist.get_backend() == "nccl" else torch.device("cpu")
    box: list[Any] = [None]
    try:
        if dist.get_rank() == 0:
            box = [_metric_values(metrics, logits, batch)]
    finally:  # rank 0 raises after the others know that no values come
        dist.broadcast_object_list(box, src=0, device=device)
    if box[0] is None:
        raise TrainingError("a metric failed", values="the error of rank 0")
    values: dict[str, float] = box[0]
    return values


def _metric_values(metrics: Sequence[Metric], logits: torch.Tensor, batch: Any) -> dict[str, float]:
    moved = tree_map(lambda value: value.to(logits.device) if isinstance(value, torch.Tensor) else value, batch)
    values: dict[str, float] = {}
    for metric in metrics:
        with torch.no_grad():
            result = metric(logits, moved)
        if not isinstance(result, Mapping):
            raise _no_metric(metric, f"it returned {shown(result)}")
        for name, value in result.items():
            if not isinstance(name, str) or name in (*values, LOSS, "step"):
                raise _no_metric(metric, f"the name {shown(name)}, which is taken or no text")
            try:
                values[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise _no_metric(metric, f"{name} is {shown(value)}") from None
    return values


def _no_metric(metric: Metric, fault: str) -> ConstraintError:
    return ConstraintError(
        f"the metric {getattr(metric, '__name__', type(metric).__name__)} gives names with one number each",
        values=fault,
        alternatives='return a dict such as {"accuracy": 0.5}, with names other than "loss" and "step"',
    )
