"""Build a program from a loop's own model, optimizer and DataLoader."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.compile import compile_with
from autopar.errors import ConstraintError
from autopar.frontend.inputs import name_inputs
from autopar.running.process_state import kept_random_states
from autopar.settings.compile_options import CompileOptions
from autopar.training.config import TrainerConfig
from autopar.training.feeding import join_batches
from autopar.training.learners import RankLearner
from autopar.training.loaders import kept_generators, num_rows
from autopar.training.loop import resolve_cluster
from autopar.training.shapes import plan_for_rows

NamedFactory = Callable[[Iterable[tuple[str, Tensor]]], torch.optim.Optimizer]


def config_of(cluster: Any, seed: int, options: Mapping[str, Any]) -> TrainerConfig:
    """Return the configuration of a program. options: the fields of PlanOptions, loss_scale, and first_step_check.

    Raises ConstraintError for other options, among them those that the loop sets itself.
    """
    names = {*TrainerConfig(cluster="1 cpu").common, "loss_scale", "first_step_check"}
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ConstraintError(
            "parallelize takes options of the plan", values=", ".join(unknown), alternatives=sorted(names)
        )
    # A step whose gradients are not finite trains on, as in the loop of one process.
    return TrainerConfig(cluster=cluster, seed=seed, non_finite="ignore", **options)


def build_learner(model: nn.Module, config: TrainerConfig, optimizer: NamedFactory, example: Any) -> RankLearner:
    """Build this rank's step of a program for the example's shapes. Collective.

    Raises subclasses of AutoparError where no program can be planned, WorldSizeError unless the plan's ranks run.
    """
    half = {str(p.dtype) for p in model.parameters() if p.requires_grad and p.itemsize < 4}
    if half and config.precision == "fp32":
        raise ConstraintError(
            "the model's parameters are in half precision, and one process would update them in it",
            values=", ".join(sorted(half)),
            alternatives=["from_pretrained(..., dtype=torch.float32)", 'precision="bf16", with fp32 masters'],
        )
    options = CompileOptions(example_inputs=example, optimizer=optimizer, **config.common)
    return RankLearner(compile_with(model, resolve_cluster(config.cluster), options), config)


def check_rows(learner: RankLearner, sizes: Iterable[int]) -> None:
    """Raise DataError for numbers of rows that the data-parallel ranks cannot share evenly."""
    for rows in sorted({size for size in sizes if size > 0}):
        plan_for_rows(learner.program.plan, rows)


def rows_of_steps(loader: Any, num_joined: int, most_steps: int | None = None) -> set[int]:
    """Return the numbers of rows of an epoch's steps, as far as the loader tells. most_steps: of the whole run."""
    try:
        size, total = loader.batch_size, len(loader.batch_sampler.sampler)
    except (AttributeError, TypeError):
        return set()
    if not size or not total:
        return set()
    if loader.batch_sampler.drop_last:
        total -= total % size
    whole, rest = divmod(total, size * num_joined)
    is_reached = most_steps is None or most_steps > whole
    return ({size * num_joined} if whole else set()) | ({rest} if is_reached else set())


def first_step(loader: Any, num_joined: int) -> Any:
    """Return the batch of the first step, joined from a loader's first batches. Restores random states, also those of
    the loader's generators.

    Raises ConstraintError for a loader without batches, or one that cannot begin again.
    """
    for part in parts_of(loader):
        if iter(dataset := getattr(part, "dataset", ())) is dataset if _is_iterable(part) else False:
            raise ConstraintError(
                "the data must be able to start again, since autopar plans with its first batch",
                values=type(dataset).__name__,
                alternatives="a dataset whose __iter__ makes a new iterator",
            )
    with contextlib.ExitStack() as kept:
        kept.enter_context(kept_random_states())
        for part in parts_of(loader):
            kept.enter_context(kept_generators(part))
        first = []
        batches = iter(loader)
        for batch in batches:
            first.append(plain(batch))
            if len(first) == num_joined:
                break
        del batches
        if callable(getattr(loader, "end", None)):  # Accelerate's loader counts as read only after its end
            loader.end()
    if not first:
        raise ConstraintError("there are no batches", values=type(loader).__name__)
    return join_batches(first)


def parts_of(loader: Any) -> list[Any]:
    """Return the loaders that a combined loader draws from; of any other loader, itself."""
    return list(getattr(loader, "parts", [loader]))


def _is_iterable(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)


def plain(batch: Any) -> Any:
    """Return a batch as name_inputs takes it: mappings of other types as dicts."""
    return dict(batch) if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, list) else batch


_FROZEN = object()
"""Replaces a frozen parameter while an optimizer is copied."""


class SameOptimizer:
    """A factory `named_parameters -> optimizer` that makes a script's optimizer again.

    It copies the optimizer with stand-ins in the places of the model's parameters. So groups, settings and further
    attributes of its class are the script's. Frozen parameters have no gradients, and no optimizer of torch updates
    them: they are left out. Raises ConstraintError for an optimizer that has trained, or of other parameters.
    """

    takes_names = True

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if any(optimizer.state.values()):
            raise ConstraintError(
                "the optimizer has trained before there was a program",
                values=f"{type(optimizer).__name__} with state",
                alternatives="a new optimizer, or a checkpoint of the program's",
            )
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if strange := sum(id(parameter) not in self._names for parameter in parameters):
            raise ConstraintError(
                "the optimizer has parameters that are not the model's",
                values=f"{strange} of {len(parameters)}",
                alternatives="an optimizer of model.parameters()",
            )
        self._parameters = parameters

    def __call__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        stand_ins = dict(named_parameters)
        memo: dict[int, Any] = {}
        for parameter in self._parameters:
            memo[id(parameter)] = stand_ins.get(self._names[id(parameter)], _FROZEN)
        optimizer = copy.deepcopy(self._optimizer, memo)
        for group in optimizer.param_groups:
            kept = [parameter is not _FROZEN for parameter in group["params"]]
            if "param_names" in group:
                group["param_names"] = list(itertools.compress(group["param_names"], kept))
            group["params"][:] = itertools.compress(list(group["params"]), kept)  # in place: wrappers share the lists
        for name, value in vars(self._optimizer).items():
            # torch copies the attributes of all optimizers. A schedule's wrapper around `step` belongs to the original.
            if name not in vars(optimizer) and name != "step":
                setattr(optimizer, name, copy.deepcopy(value, memo))
        return optimizer


def move_schedule(scheduler: Any, before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> Any:
    """Move a scheduler, in place, from one optimizer to another with the same groups; return it."""
    for part in (scheduler, *getattr(scheduler, "_schedulers", ())):
        if part is not scheduler:
            move_schedule(part, before, after)
        if getattr(part, "optimizer", None) is before:
            part.optimizer = after

    # torch's schedules look for these; otherwise they warn that their optimizer took no step.
    def step(closure: Any = None) -> Any:
        return type(after).step(after, closure)

    after.step, after._opt_called = step, True  # type: ignore[method-assign, attr-defined]
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return scheduler


def named(model: nn.Module, positional: tuple[Any, ...], keyword: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the model by name."""
    return {**(dict(name_inputs(model, positional)) if positional else {}), **keyword}


def rows_of(batch: Any) -> int:
    """Return the number of rows of a batch."""
    return num_rows(plain(batch))
