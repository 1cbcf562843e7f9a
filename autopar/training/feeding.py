"""Iterate over the batches of a run: from a sample on, joined to whole steps, or once through for an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import ConstraintError, DataError
from autopar.program import GeneratedProgram
from autopar.training.config import Batch, Batches, TrainerConfig
from autopar.training.loaders import named_batch, num_rows, peeking, without_worker_iterator
from autopar.training.metrics import LOSS, Metric
from autopar.training.run_state import Stateful
from autopar.training.sections import EvaluationSection


def first_batch(batches: Batches, config: TrainerConfig) -> Any:
    """Return the first step's batch, with the rows of a whole step. Raises ConstraintError, DataError."""
    with peeking(batches):
        first = next(steps_from(batches, 0, config.gradient_accumulation_steps))
    rows = num_rows(first)
    if config.global_batch_size not in (None, rows):
        raise ConstraintError(
            "a batch has the rows of the whole step, over all ranks",
            values=f"{rows} rows, global_batch_size={config.global_batch_size}",
            alternatives=f"global_batch_size={rows}, or batches of {config.global_batch_size} rows in all",
        )
    return first


def steps_from(batches: Batches, start_sample: int, num_joined: int = 1) -> Iterator[Batch]:
    """Yield batches of whole steps without end, from a sample on. num_joined batches make a step."""
    source = (named_batch(batch) for batch in batches_from(batches, start_sample))
    if num_joined == 1:
        yield from source
    while True:
        yield join_batches([next(source) for _ in range(num_joined)])


def batches_from(batches: Batches, start_sample: int) -> Iterator[Batch]:
    """Yield batches without end, from a sample on; a batch that contains the sample comes whole.

    Batches that remember their place (`Stateful`) begin there. Raises ConstraintError if there are none.
    """
    if callable(batches):
        source = batches(start_sample)
        if not isinstance(source, Iterable):
            raise ConstraintError(
                "batches(start) gives no batches", values=type(source).__name__, alternatives="a generator function"
            )
        yield from source
        raise ConstraintError("batches(start) ended", alternatives="an iterator without end, or fewer steps")
    to_skip = 0 if isinstance(batches, Stateful) else start_sample
    again = without_worker_iterator(batches)
    while True:
        count = 0
        for batch in again:
            count += 1
            if to_skip > 0 and (rows := num_rows(batch)) <= to_skip:
                to_skip -= rows
            else:
                to_skip = 0
                yield batch
        if not count:
            raise ConstraintError(
                "there are no batches", values=type(batches).__name__, alternatives="a source with at least one batch"
            )


def check_evaluation(section: EvaluationSection, batches: Batches | None, metrics: Sequence[Metric]) -> None:
    """Raise ConstraintError, before anything starts, for evaluations that are impossible."""
    if batches is None:
        if metrics:
            raise ConstraintError(
                "metrics need eval_batches",
                values=f"{len(metrics)} metrics",
                alternatives="pass eval_batches, or no metrics",
            )
        for name in ("every", "patience"):
            if value := getattr(section, name):
                raise ConstraintError(
                    f"evaluation.{name} needs eval_batches",
                    values=str(value),
                    alternatives=f"pass eval_batches, or leave out evaluation.{name}",
                )
        return
    if section.metric != LOSS and not metrics:  # names that metric functions return show when these are called
        raise ConstraintError(
            "evaluation.metric is none of the metrics",
            values=section.metric,
            alternatives=[LOSS, "metrics=, functions that return it"],
        )
    if callable(batches) and section.num_batches is None:
        raise ConstraintError(
            "eval_batches that is a function has no end",
            alternatives="evaluation.num_batches, a list, or a DataLoader",
        )
    if isinstance(batches, Sequence) and not batches:
        raise ConstraintError(
            "there are no eval_batches",
            values=f"an empty {type(batches).__name__}",
            alternatives="at least one batch, or eval_batches=None",
        )


def evaluation_batches(batches: Batches, num_batches: int | None) -> Iterator[Batch]:
    """Yield the batches of one evaluation that `check_evaluation` accepted. Raises ConstraintError for none."""
    source = batches(0) if callable(batches) else without_worker_iterator(batches)
    count = 0
    for batch in itertools.islice(source, num_batches):
        count += 1
        yield named_batch(batch)
    if not count:
        raise ConstraintError("there are no eval_batches", values=type(batches).__name__)


def check_accumulation(program: GeneratedProgram, steps: int) -> None:
    """Raise ConstraintError for a forward that differs when the batches of `steps` calls are joined to one."""
    if steps == 1:
        return
    numbers = list(program.state.reads.advanced.values()) if program.state is not None else []
    guards = [guard.text for guard in program.program.any.guards]
    for reason, names in (("changes numbers of the model", numbers), ("depends on values of its batch", guards)):
        if names:
            raise ConstraintError(
                f"forward {reason}, and accumulated batches go through one call of it",
                values=", ".join(sorted(names)),
                alternatives=f"gradient_accumulation_steps=1 and {steps} times the rows, which the plan splits anyway",
            )


def join_batches(batches: list[Any]) -> Batch:
    """Join batches to one, row after row. Raises DataError where they do not fit together."""
    first = batches[0]
    if isinstance(first, Mapping):
        if any(not isinstance(batch, Mapping) or batch.keys() != first.keys() for batch in batches):
            raise DataError(
                "the batches of one step have different names",
                values=", ".join(map(str, first)),
                alternatives="the same names in all batches, or gradient_accumulation_steps=1",
            )
        return {name: _joined(str(name), [batch[name] for batch in batches]) for name in first}
    if any(len(batch) != len(first) for batch in batches):
        raise DataError(
            "the batches of one step have different numbers of values",
            values=str(list(map(len, batches))),
            alternatives="as many values in all batches, or gradient_accumulation_steps=1",
        )
    return tuple(_joined(f"value {index}", list(parts)) for index, parts in enumerate(zip(*batches, strict=True)))


def _joined(name: str, parts: list[Any]) -> Any:
    """Join tensors by rows, and containers element by element. A value without rows must be equal in all batches."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: _joined(f"{name}.{key}", [part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(f"{name}[{i}]", list(items)) for i, items in enumerate(zip(*parts, strict=True)))
    if isinstance(first, torch.Tensor) and first.dim():
        shapes = {tuple(part.shape[1:]) for part in parts}
        if len(shapes) > 1:
            raise DataError(
                "the batches of one step differ in more than their rows",
                values=f"{name}: {', '.join(str(tuple(part.shape)) for part in parts)}",
                alternatives="a collate_fn that pads all to one length, or gradient_accumulation_steps=1",
            )
        return torch.cat(parts)
    if any(not _is_same(first, part) for part in parts[1:]):
        raise DataError(
            f"{name} must be the same in all batches of a step",
            values=f"{parts[0]!r}, {parts[1]!r}",
            alternatives="a tensor with rows, or gradient_accumulation_steps=1",
        )
    return first


def _is_same(first: Any, other: Any) -> bool:
    return torch.equal(first, other) if isinstance(first, torch.Tensor) else bool(first == other)
