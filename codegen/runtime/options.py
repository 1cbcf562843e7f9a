"""The ranges of a run's numbers, for the Trainer, the step and a saved program's main.py."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch

from .precision import PRECISIONS


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least`, which belongs to them unless it is_open, to `most`, None if is_optional, and never nan."""

    least: float
    most: float = sys.float_info.max
    is_whole: bool = False
    is_open: bool = False
    is_optional: bool = False

    def __contains__(self, value: object) -> bool:
        if value is None:
            return self.is_optional
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else (int, float)):
            return False
        return self.least <= value <= self.most and not (self.is_open and value == self.least)

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number" if self.most == math.inf else "a finite number"
        limit = f"above {self.least}" if self.is_open else f"of at least {self.least}"
        return f"{kind} {limit}" + (f" and at most {self.most:g}" if self.most < sys.float_info.max else "")


RANGES = {
    "steps": Range(0, math.inf, is_whole=True),
    "checkpoint_every": Range(0, math.inf, is_whole=True),
    "keep_checkpoints": Range(2, math.inf, is_whole=True),
    "log_every": Range(0, math.inf, is_whole=True),
    "seed": Range(0, math.inf, is_whole=True),
    "global_batch_size": Range(1, math.inf, is_whole=True, is_optional=True),
    "num_processes": Range(1, math.inf, is_whole=True, is_optional=True),
    "learning_rate": Range(0),
    "weight_decay": Range(0),
    "max_grad_norm": Range(0, math.inf, is_open=True, is_optional=True),  # inf only computes the norm
    "collective_seconds": Range(0, 1e9, is_open=True, is_optional=True),  # clocks count nanoseconds in 64 bits
    "tolerance": Range(0, is_optional=True),
    "batch": Range(1, 1e12, is_whole=True, is_optional=True),
    "seq": Range(1, 1e12, is_whole=True, is_optional=True),
    "processes": Range(1, 1e6, is_whole=True, is_optional=True),
    "seconds": Range(0, 1e9),
    "plans": Range(1, 1e6, is_whole=True),
    "rounds": Range(1, 1e6, is_whole=True),
}
"""The ranges of numbers, by the names of TrainerConfig's fields and of the command line's options."""


def problem(name: str, value: object) -> str:
    """Say in one clause what is wrong with a number of that name; "" if nothing is."""
    return "" if value in RANGES[name] else f"{name} is {RANGES[name]}"


def require(name: str, value: object) -> None:
    """Raise ValueError for a number that is none of that name."""
    if wrong := problem(name, value):
        raise ValueError(f"{wrong}, got {value!r}")


def require_argument(name: str, value: object, said: str) -> None:
    """Raise ValueError where a method's argument is no number of that name, or None. said: what the method calls it."""
    if value is None or value not in RANGES[name]:
        raise ValueError(f"{said} is {RANGES[name]}, got {value!r}")


def check_rates(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a learning rate that a script set and no option takes."""
    for group in optimizer.param_groups:
        if not isinstance(rate := group.get("lr"), (torch.Tensor, type(None))):
            require_argument("learning_rate", rate, "the learning rate of an optimizer's group")


def check_step(
    num_micro_batches: int, precision: str, max_grad_norm: float | None, seed: int, *, has_loss_scale: bool
) -> None:
    """Raises ValueError for options that no step can be made with."""
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches must be at least 1, got {num_micro_batches}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, got {precision!r}")
    if has_loss_scale != (precision == "fp16"):
        wrong = "needs loss_scaling=LossScale()" if precision == "fp16" else "has no loss_scaling, which is for 'fp16'"
        raise ValueError(f"precision {precision!r} {wrong}")
    require("max_grad_norm", max_grad_norm)
    require("seed", seed)


def number(name: str) -> Callable[[str], float]:
    """The `type=` of an argparse option for a number of that name."""

    def read(text: str) -> float:
        try:
            value = int(text) if RANGES[name].is_whole else float(text)
        except ValueError:
            value = math.nan
        if wrong := problem(name, value):
            raise argparse.ArgumentTypeError(f"{wrong}, got {text!r}")
        return value

    return read


class Parser(argparse.ArgumentParser):
    """A parser whose errors only the first rank prints."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        super().error(message)
