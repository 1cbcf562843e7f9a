"""Build optimizers and schedules from a configuration's sections `optimizer` and `schedule`."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from autopar.costs.updates import DefaultAdamW, OptimizerFactory
from autopar.errors import ConstraintError
from autopar.files.text_files import near
from autopar.training.config import TrainerConfig
from autopar.training.sections import ScheduleSection

Schedule = Callable[[torch.optim.Optimizer], LRScheduler]
"""`optimizer -> scheduler`, any of torch's."""
ONE_DIM = "1d"


def optimizer_factory(config: TrainerConfig) -> OptimizerFactory:
    """Return the factory of the configuration's optimizer.

    Raises ConstraintError for an unknown name, and for no_decay of an optimizer without weight decay.
    """
    section = config.optimizer
    if section.name == "adamw" and not (section.no_decay or section.arguments):
        return DefaultAdamW(config.learning_rate, config.weight_decay)
    factory = _factory_named(section.name)
    parameters = inspect.signature(factory).parameters.values()
    names = {parameter.name for parameter in parameters}
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    rates = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
    settings = {name: rate for name, rate in rates.items() if takes_all or name in names}
    bound = functools.partial(factory, **(settings | dict(section.arguments)))
    if not section.no_decay:
        return bound
    if "weight_decay" not in settings:
        raise ConstraintError(
            "no_decay is for an optimizer that takes weight_decay",
            values=section.name,
            alternatives="leave out no_decay, or choose an optimizer such as adamw",
        )
    return PartlyDecayed(bound, section.no_decay)


@dataclass(frozen=True, slots=True)
class PartlyDecayed:
    """A factory `named_parameters -> optimizer` with up to two groups; the second one has no weight decay.

    optimizer: makes the optimizer from the groups. no_decay: as in the section `optimizer`.
    """

    optimizer: Callable[..., torch.optim.Optimizer]
    no_decay: tuple[str, ...]
    takes_names: bool = True

    def __call__(self, named_parameters: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in named_parameters:
            groups[self._is_still(name, parameter)]["params"].append(parameter)
        return self.optimizer([group for group in groups if group["params"]])

    def _is_still(self, name: str, parameter: Tensor) -> bool:
        return any(
            parameter.ndim <= 1 if pattern == ONE_DIM else fnmatch.fnmatchcase(name, pattern)
            for pattern in self.no_decay
        )


def _factory_named(name: str) -> Callable[..., torch.optim.Optimizer]:
    """Return the class of torch.optim, or import the factory `module:name`."""
    if ":" not in name:
        classes = _torch_optimizers()
        if name not in classes:
            legal = [*near(name, classes), "a factory, module:name"]
            raise ConstraintError("no optimizer has this name", values=f"optimizer.name={name!r}", alternatives=legal)
        return classes[name]
    module, _, path = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for attribute in path.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConstraintError(
            f"the optimizer {name} cannot be imported",
            values=str(error),
            alternatives="module:name of a factory on the import path",
        ) from None
    factory: Callable[..., torch.optim.Optimizer] = value
    return factory


def _torch_optimizers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Return the classes of torch.optim by their names in lower case."""
    classes = {name.lower(): kind for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    return {
        name: kind
        for name, kind in classes.items()
        if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }


# Schedules ------------------------------------------------------------------------------------------------------------


def schedule_of(config: TrainerConfig) -> Schedule | None:
    """Return the schedule of the configuration; None for a constant rate."""
    section = config.schedule
    if section.name == "constant" and not section.warmup_steps:
        return None
    return NamedSchedule(section, config.steps)


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """The schedule of a section, over `steps` steps."""

    section: ScheduleSection
    steps: int

    def __call__(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, self.factor)

    def factor(self, step: int) -> float:
        """Return the factor of the rate in a step, counted from 0.

        With W steps of warm-up of T in all, and the rest r = (step - W) / (T - W) in [0, 1], it is step / W in the
        warm-up; then 1; f + (1 - f) (1 - r); f + (1 - f) (1 + cos(pi r)) / 2; or sqrt(max(W, 1) / max(step, 1)).
        """
        warmup, final = self.section.warmup_steps, self.section.final
        if step < warmup:
            return step / warmup
        rest = min((step - warmup) / max(self.steps - warmup, 1), 1.0)
        match self.section.name:
            case "linear":
                return final + (1 - final) * (1 - rest)
            case "cosine":
                return final + (1 - final) * (1 + math.cos(math.pi * rest)) / 2
            case "inverse-sqrt":
                return math.sqrt(max(warmup, 1) / max(step, 1))
            case _:
                return 1.0
