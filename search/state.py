"""What one solve carries along: the best choice so far, the open nodes, the proof."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from search.core import Core
from search.elimination import Check
from search.lagrangian import Plane

RELATIVE_CUTOFF = 1e-12
"""A choice must be better than the best known one by this fraction to be of interest: less is rounding."""


@dataclass(slots=True)
class Search:
    """The state of one solve: the best choice so far, and counts.

    Args:
        objective: maps choices (original option indices) to their objective, ``inf`` if they break a budget.
        limits: limit per budget of the core.
        check: may raise ``TimeLimitReachedError``.
    """

    objective: Callable[[tuple[int, ...]], float]
    limits: tuple[float, ...]
    check: Check
    planes: list[Plane] = field(default_factory=list)
    best: float = np.inf
    choices: tuple[int, ...] | None = None
    num_nodes: int = 0
    num_labels: int = 0
    num_eliminations: int = 0
    core_options: int = 0
    max_table_cells: float = 0.0

    @property
    def cutoff(self) -> float:
        """Only objectives below this are of interest."""
        return self.best - RELATIVE_CUTOFF * abs(self.best) if np.isfinite(self.best) else np.inf

    def offer(self, core: Core, choices: Sequence[int]) -> float:
        """Consider a choice among the options of ``core``; returns the cutoff."""
        self.consider(core.original(choices))
        return self.cutoff

    def consider(self, choices: tuple[int, ...]) -> None:
        """Consider a choice; the first of equal ones stays."""
        value = self.objective(choices)
        if value < self.best:
            self.best, self.choices = value, choices


@dataclass(slots=True)
class Node:
    """An open part of the search and the best lower bound known for it."""

    core: Core
    bound: float
    multipliers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``lower_bound`` holds whether or not ``proven``; ``empty`` is a variable that ran out of options at the root."""

    lower_bound: float
    proven: bool
    empty: int | None = None
