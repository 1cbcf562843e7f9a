"""What a miniature is trained by: the plan's own optimizer, at a rate at which three steps show in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.compiled import CompiledProgram
from autopar.costs.updates import DefaultAdamW, OptimizerFactory
from autopar.errors import ConstraintError
from autopar.settings.optimizers import examine
from autopar.verify import sgd_with_momentum
from codegen.runtime.optimizers import takes_names

LEAST_RATE, MOST_RATE = 1e-3, 0.1
"""A schedule's first rate may be 0, and one that suits a large model may throw a small one out of its bounds."""


def optimizer_of(compiled: CompiledProgram, model: nn.Module) -> tuple[OptimizerFactory, str]:
    """The factory for a miniature's parameters, and why it is not the plan's, "" where it is."""
    own = compiled.optimizer
    if isinstance(own, DefaultAdamW):
        return own, ""
    try:
        examine(AtAVisibleRate(own), model)
    except ConstraintError as error:
        reason = str(error).splitlines()[0]
        return sgd_with_momentum, f"optimizer, as its factory does not take the miniature's parameters: {reason}"
    return AtAVisibleRate(own), ""


class AtAVisibleRate:
    """A factory whose optimizers have learning rates between LEAST_RATE and MOST_RATE."""

    def __init__(self, factory: OptimizerFactory) -> None:
        self._factory, self.takes_names = factory, takes_names(factory)

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        made = self._factory(parameters)
        for group in made.param_groups:
            rate = group.get("lr")
            if isinstance(rate, torch.Tensor):
                group["lr"] = rate.clamp(LEAST_RATE, MOST_RATE)
            elif isinstance(rate, int | float):
                group["lr"] = min(max(rate, LEAST_RATE), MOST_RATE)
        return made
