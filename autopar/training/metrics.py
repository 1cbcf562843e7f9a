"""Metrics of an evaluation: what functions of the user's find in the logits of its batches, as means over the rows."""

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
NO_LOGITS = "metrics are of logits: what the model returns as such, a tensor from which its loss is computed"


def metrics_of(given: Metric | Sequence[Metric] | None) -> tuple[Metric, ...]:
    """The functions. Raises ConstraintError for what is none."""
    several = () if given is None else (given,) if callable(given) else tuple(given)
    for each in several:
        if not callable(each):
            raise ConstraintError(
                "metrics are functions (logits, batch) -> {name: number}",
                values=shown(each),
                alternatives="metrics=accuracy, or metrics=[accuracy, perplexity]",
            )
    return several


class Means:
    """Means over the rows of all batches of one evaluation."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._rows = 0

    def add(self, found: Mapping[str, float], rows: int) -> None:
        """Takes what a batch of so many rows has. Raises ConstraintError for other names than the batches before."""
        if self._rows and found.keys() != self._sums.keys():
            raise ConstraintError(
                "metrics have the same names for all batches of an evaluation",
                values=f"{', '.join(found)} after {', '.join(self._sums)}",
            )
        for name, value in found.items():
            self._sums[name] = self._sums.get(name, 0.0) + rows * value
        self._rows += rows

    @property
    def values(self) -> dict[str, float]:
        return {name: value / self._rows for name, value in self._sums.items()}


def found_by(metrics: Sequence[Metric], logits: torch.Tensor, batch: Any) -> dict[str, float]:
    """What the functions find in one batch, computed by rank 0 and equal on all. Collective.

    batch: as the user's source has it; the functions get it where the logits are, with tuples as they are. Raises
    ConstraintError for what is no metric; what a function raises on rank 0 ends the others with TrainingError.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return _found_by(metrics, logits, batch)
    device = logits.device if dist.get_backend() == "nccl" else torch.device("cpu")
    box: list[Any] = [None]
    try:
        if dist.get_rank() == 0:
            box = [_found_by(metrics, logits, batch)]
    finally:  # what rank 0 raises it raises when the others know that nothing comes
        dist.broadcast_object_list(box, src=0, device=device)
    if box[0] is None:
        raise TrainingError("a metric failed", values="rank 0 says how")
    found: dict[str, float] = box[0]
    return found


def _found_by(metrics: Sequence[Metric], logits: torch.Tensor, batch: Any) -> dict[str, float]:
    moved = tree_map(lambda value: value.to(logits.device) if isinstance(value, torch.Tensor) else value, batch)
    found: dict[str, float] = {}
    for metric in metrics:
        with torch.no_grad():
            given = metric(logits, moved)
        if not isinstance(given, Mapping):
            raise _no_metric(metric, f"it returned {shown(given)}")
        for name, value in given.items():
            if not isinstance(name, str) or name in (*found, LOSS, "step"):
                raise _no_metric(metric, f"the name {shown(name)}, which is taken or no text")
            try:
                found[name] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise _no_metric(metric, f"{name} is {shown(value)}") from None
    return found


def _no_metric(metric: Metric, what: str) -> ConstraintError:
    return ConstraintError(
        f"the metric {getattr(metric, '__name__', type(metric).__name__)} gives names with one number each",
        values=what,
        alternatives='a dict such as {"accuracy": 0.5}, with names of its own beside "loss"',
    )
