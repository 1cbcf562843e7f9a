"""What one search carries along: the best choice so far and the bound that is proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from search.core import Core
from search.lagrangian import Plane

RELATIVE_CUTOFF = 1e-12
"""A choice must be better than the best known one by this fraction to be of interest: less is rounding."""


@dataclass(slots=True)
class Search:
    """The state of one search.

    Args:
        objective: maps an assignment (original option indices) to their objective, ``inf`` over budget.
        limit: of the core's budget.

    ``bound`` is the best lower bound proven so far, and ``planes`` are those of ``lagrangian``.
    """

    objective: Callable[[tuple[int, ...]], float]
    limit: float = np.inf
    planes: list[Plane] = field(default_factory=list)
    best: float = np.inf
    assignment: tuple[int, ...] | None = None
    bound: float = -np.inf

    @property
    def cutoff(self) -> float:
        """The objective below which a choice is still of interest."""
        return self.best - RELATIVE_CUTOFF * abs(self.best) if np.isfinite(self.best) else np.inf

    def offer(self, core: Core, assignment: Sequence[int]) -> float:
        """Consider a choice among the options of ``core``; returns the cutoff."""
        self.consider(core.original(assignment))
        return self.cutoff

    def consider(self, assignment: tuple[int, ...]) -> None:
        """Consider a choice; the first of equal ones stays."""
        value = self.objective(assignment)
        if value < self.best:
            self.best, self.assignment = value, assignment

    def learn(self, bound: float) -> None:
        """No choice costs less than ``bound``, or than the best one known."""
        self.bound = max(self.bound, min(bound, self.best))
