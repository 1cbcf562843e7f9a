"""The certainty of a memory prediction: the spread of measured by predicted bytes on similar rows.

The spreads are in ``machines/memory_spread.toml``. If the ratio of nine rows in ten is within [low, high], the
interval of a prediction of p bytes is p x low to p x high. The memory of the device's driver and NCCL ("workspace") is
missing from most rows, so it is subtracted from p first and added back unscaled.
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
    """The interval that nine of ten similar predictions were measured in, and whether it fits.

    fit: "yes" or "no" where the whole interval agrees.
    """

    low_bytes: float
    high_bytes: float
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """5th and 95th percentile of measured by predicted bytes. rows: number of rows; source: their origin."""

    low: float
    high: float
    rows: int
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high:
            raise ValueError(f"a spread must have 0 < low <= high, got {self.low} and {self.high}")

    def interval(self, num_bytes: float) -> tuple[float, float]:
        """Return the interval, in bytes, in which nine of ten similar rows were measured."""
        return num_bytes * self.low, num_bytes * self.high

    def certainty(self, num_bytes: Mapping[str, float], capacity_bytes: float) -> Certainty:
        """Return the certainty of predicted bytes by kind, assuming the errors of similar rows."""
        fixed = num_bytes.get(WORKSPACE, 0.0)
        low, high = (fixed + size for size in self.interval(sum(num_bytes.values()) - fixed))
        fit: Fit = "yes" if high <= capacity_bytes else "no" if low > capacity_bytes else "within the error"
        return Certainty(low, high, fit)


@cache
def spreads() -> Mapping[str, Spread]:
    """Return the spreads by kind: OWN and OWN_ON_CPU, another framework's profile, or "megatron-core" and a family of
    models."""
    text = resources.files("cost_models").joinpath("machines", "memory_spread.toml").read_text(encoding="utf-8")
    return MappingProxyType({name: Spread(**table) for name, table in tomllib.loads(text).items()})


def spread(kind: str, is_on_cpu: bool = False) -> Spread:
    """Return the spread of rows of this kind, or the widest known spread for kinds without rows."""
    all_spreads = spreads()
    kind = OWN_ON_CPU if kind == OWN and is_on_cpu else kind
    if kind in all_spreads:
        return all_spreads[kind]
    widest = (
        min(all_spreads.values(), key=lambda item: item.low).low,
        max(all_spreads.values(), key=lambda item: item.high).high,
    )
    return Spread(low=widest[0], high=widest[1], rows=0, source="the widest of those that are known")
