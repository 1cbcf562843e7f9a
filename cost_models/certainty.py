"""How sure a prediction of memory is: the spread of measured by predicted bytes on rows like it.

The spreads are in ``machines/memory_spread.toml``. Where the ratio of nine rows in ten is within [low, high], a
prediction of p bytes stands for p x low to p x high. What the device's driver and NCCL take ("workspace") is in hardly
any row, so it is taken off p first and added as it is.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Literal

Fit = Literal["yes", "no", "within the error"]
OWN, OWN_ON_CPU = "autopar", "autopar on a CPU"
"""Rows of autopar's own programs, on GPUs and on CPUs."""
WORKSPACE = "workspace"


@dataclass(frozen=True, slots=True)
class Certainty:
    """Bytes between which nine of ten predictions like one were measured, and whether they fit: "yes" or "no" where
    the whole interval says so."""

    low_bytes: float
    high_bytes: float
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """5th and 95th percentile of measured by predicted bytes. rows: how many it is of; source: which."""

    low: float
    high: float
    rows: int
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"a spread must have 0 < low <= high, got {self.low} and {self.high}")

    def interval(self, num_bytes: float) -> tuple[float, float]:
        """The bytes between which nine of ten like it were measured."""
        return num_bytes * self.low, num_bytes * self.high

    def certainty(self, num_bytes: Mapping[str, float], capacity_bytes: float) -> Certainty:
        """Of predicted bytes by kind, if they are as far off as those of like rows."""
        fixed = num_bytes.get(WORKSPACE, 0.0)
        low, high = (fixed + size for size in self.interval(sum(num_bytes.values()) - fixed))
        fit: Fit = "yes" if high <= capacity_bytes else "no" if low > capacity_bytes else "within the error"
        return Certainty(low, high, fit)


@cache
def spreads() -> Mapping[str, Spread]:
    """By what was predicted: OWN and OWN_ON_CPU, the name of another framework's profile, or "megatron-core" and a
    family of models."""
    text = resources.files("cost_models").joinpath("machines", "memory_spread.toml").read_text(encoding="utf-8")
    return MappingProxyType({name: Spread(**table) for name, table in tomllib.loads(text).items()})


def spread(kind: str, is_on_cpu: bool = False) -> Spread:
    """The spread of rows of this kind; of kinds without rows the widest that is known."""
    known = spreads()
    kind = OWN_ON_CPU if kind == OWN and is_on_cpu else kind
    if kind in known:
        return known[kind]
    widest = min(known.values(), key=lambda each: each.low).low, max(known.values(), key=lambda each: each.high).high
    return Spread(low=widest[0], high=widest[1], rows=0, source="the widest of those that are known")
