"""The scale of the loss in fp16: what its gradients are multiplied by, so that small ones are not rounded to zero.

P. Micikevicius et al., "Mixed precision training" (ICLR 2018), section 3.2; the rule is that of torch.amp.GradScaler,
with its numbers. A backward starts from the scale in place of 1, and fp32 gradients are divided by it once they are
summed, before anything reads them. A scale that is a power of two rounds nothing on either way.

    a gradient is inf or nan    nothing is updated, and scale <- scale * backoff_factor
    growth_interval steps in a row without one          scale <- scale * growth_factor, unless that is inf

The scale is a number of fp32 on the host, equal on all ranks, since all decide by the same norm (`non_finite.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossScale:
    """The first value of the scale, and its changes. Raises ValueError for numbers that torch.amp.GradScaler refuses.

    init_scale: of the first step. growth_factor: above 1. backoff_factor: between 0 and 1. growth_interval: steps.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        for name in ("init_scale", "growth_factor", "backoff_factor"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
                raise ValueError(f"{name} of the loss scale is a finite number, got {value!r}")
        if not 0 < _fp32(self.init_scale) < math.inf:
            raise ValueError(f"init_scale of the loss scale is a number of fp32 above 0, got {self.init_scale!r}")
        if self.growth_factor <= 1:
            raise ValueError(f"growth_factor of the loss scale is above 1, got {self.growth_factor!r}")
        if not 0 < self.backoff_factor < 1:
            raise ValueError(f"backoff_factor of the loss scale is between 0 and 1, got {self.backoff_factor!r}")
        interval = self.growth_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f"growth_interval of the loss scale is a whole number of steps from 1, got {interval!r}")

    def begin(self) -> LossScaling:
        """The scale of a run that begins."""
        return LossScaling(self)


class LossScaling:
    """The scale of one run. value: now, a number of fp32. num_good: steps in a row that did not overflow, since it
    last grew."""

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.value = _fp32(rule.init_scale)
        self.num_good = 0
        self.on_device: tuple[Tensor, Tensor] | None = None
        """The scale and its reciprocal for graphs, which read them anew in every replay."""

    def write(self, device: torch.device) -> None:
        """Write the scale to the device."""
        values = self.value, self._reciprocal
        if self.on_device is None:
            first, second = (torch.tensor(value, device=device) for value in values)
            self.on_device = first, second
        else:
            for tensor, value in zip(self.on_device, values, strict=True):
                tensor.fill_(value)

    @property
    def _reciprocal(self) -> float:
        # In fp32, as torch.amp.GradScaler has it.
        return _fp32(1.0 / self.value) if self.value else math.inf

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divides gradients, in place, by the scale that their backward started from."""
        if self.on_device is not None:
            torch._foreach_mul_(list(gradients), self.on_device[1])
        elif self.value != 1.0 and gradients:
            torch._foreach_mul_(list(gradients), self._reciprocal)

    def update(self, has_overflowed: bool) -> None:
        """A step ended; has_overflowed: one of its gradients, on any rank, was inf or nan."""
        if has_overflowed:
            self.value, self.num_good = _fp32(self.value * self.rule.backoff_factor), 0
            return
        self.num_good += 1
        if self.num_good >= self.rule.growth_interval:
            grown = _fp32(self.value * self.rule.growth_factor)
            self.value, self.num_good = (grown if math.isfinite(grown) else self.value), 0

    def state(self) -> dict[str, float]:
        """Return the state for checkpoints."""
        return {"value": self.value, "num_good": self.num_good}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from what `state` gave; from the beginning where a checkpoint has none."""
        state = state or {"value": _fp32(self.rule.init_scale), "num_good": 0}
        self.value, self.num_good = float(state["value"]), int(state["num_good"])


def _fp32(value: float) -> float:
    """The nearest number of fp32, inf beyond its range."""
    return float(torch.tensor(value, dtype=torch.float64).float())
