"""The input and the output of the search: frozen arrays and ids, nothing of graphs or machines.

Shape legend: n options of a variable, K budgets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

USAGE_TOLERANCE = 1e-12
"""Relative slack when a usage is compared with a limit.

Sums of whole bytes below 2**53 are exact; this only keeps the order of summation of fractional usages from deciding.
It is less than one byte for every limit below a terabyte.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """One thing to decide: its options with their costs and what they take from each budget.

    Args:
        name: used in messages only; need not be unique.
        costs: [n] seconds, n >= 1; ``inf`` forbids the option, negative values are allowed.
        usage: [K, n] bytes, finite and >= 0: what the option takes from each budget.

    Raises:
        ValueError: wrong number of axes, no options, NaN, ``-inf`` cost, negative or infinite usage.
    """

    name: str
    costs: Array
    usage: Array

    def __post_init__(self) -> None:
        what = f"variable {self.name!r}"
        object.__setattr__(self, "costs", _costs(self.costs, 1, what))
        object.__setattr__(self, "usage", _usage(self.usage, self.costs.shape, what))

    @property
    def num_options(self) -> int:
        """Number of options, forbidden ones included."""
        return int(self.costs.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A cost that depends on the options of two variables (for instance the reshard between two operators).

    Args:
        a: index of the first variable.
        b: index of the second; ``a == b`` is allowed and adds the diagonal to the variable's own costs.
        costs: [n_a, n_b] seconds; ``inf`` forbids the pair.
        usage: [K, n_a, n_b] bytes, finite and >= 0; None means zero.

    Raises:
        ValueError: wrong number of axes, NaN, ``-inf`` cost, negative or infinite usage.
    """

    a: int
    b: int
    costs: Array
    usage: Array | None = None

    def __post_init__(self) -> None:
        what = f"edge ({self.a}, {self.b})"
        object.__setattr__(self, "costs", _costs(self.costs, 2, what))
        if self.usage is not None:
            object.__setattr__(self, "usage", _usage(self.usage, self.costs.shape, what))


@dataclass(frozen=True, slots=True)
class Budget:
    """An upper limit on the total usage, in the unit of the usage arrays (bytes).

    Raises:
        ValueError: the limit is NaN.
    """

    name: str
    limit: float

    def __post_init__(self) -> None:
        if np.isnan(self.limit):
            raise ValueError(f"budget {self.name!r}: the limit is NaN")

    @property
    def largest_allowed(self) -> float:
        """The limit plus the rounding slack ``USAGE_TOLERANCE``."""
        if np.isinf(self.limit):
            return self.limit
        return self.limit + USAGE_TOLERANCE * abs(self.limit)

    def allows(self, usage: float) -> bool:
        """Whether a total usage keeps within the limit."""
        return bool(usage <= self.largest_allowed)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Variables, the edges between them, and the budgets all of them share.

    Several edges between one pair are allowed and add up.

    Raises:
        ValueError: an edge names a variable that does not exist, or an array does not fit its variables or budgets.
    """

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...] = ()
    budgets: tuple[Budget, ...] = ()

    def __post_init__(self) -> None:
        for field in ("variables", "edges", "budgets"):
            object.__setattr__(self, field, tuple(getattr(self, field)))
        num_budgets = len(self.budgets)
        for index, variable in enumerate(self.variables):
            if variable.usage.shape[0] != num_budgets:
                raise ValueError(
                    f"variable {index} {variable.name!r}: usage has {variable.usage.shape[0]} rows, "
                    f"the problem has {num_budgets} budgets"
                )
        for index, edge in enumerate(self.edges):
            self._check_edge(index, edge)

    def _check_edge(self, index: int, edge: Edge) -> None:
        for end in (edge.a, edge.b):
            if not 0 <= end < len(self.variables):
                raise ValueError(f"edge {index}: no variable {end}, there are {len(self.variables)}")
        a, b = self.variables[edge.a], self.variables[edge.b]
        if edge.costs.shape != (a.num_options, b.num_options):
            raise ValueError(
                f"edge {index} between {a.name!r} and {b.name!r}: costs have shape {edge.costs.shape}, "
                f"the variables have {a.num_options} and {b.num_options} options"
            )
        if edge.usage is not None and edge.usage.shape[0] != len(self.budgets):
            raise ValueError(
                f"edge {index} between {a.name!r} and {b.name!r}: usage has {edge.usage.shape[0]} rows, "
                f"the problem has {len(self.budgets)} budgets"
            )


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of a solver.

    Args:
        assignment: one option index per variable.
        objective: seconds, as ``evaluate`` gives them for ``assignment``.
        usage: bytes per budget, as ``evaluate`` gives them.
    """

    assignment: tuple[int, ...]
    objective: float
    usage: tuple[float, ...]


class InfeasibleError(ValueError):
    """No choice satisfies the problem.

    Attributes:
        budget: name of the budget that cannot be met by itself; None when infinite costs forbid every choice or
            when only the combination of budgets fails.
        limit: that budget's limit; NaN without a budget.
        smallest_usage: the least usage of that budget alone over all allowed assignments; NaN without a budget.
        assignment: the assignment that attains ``smallest_usage``; empty without a budget.
    """

    def __init__(
        self,
        message: str,
        *,
        budget: str | None = None,
        limit: float = float("nan"),
        smallest_usage: float = float("nan"),
        assignment: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.budget = budget
        self.limit = limit
        self.smallest_usage = smallest_usage
        self.assignment = tuple(assignment)

    @classmethod
    def over_budget(cls, budget: Budget, smallest_usage: float, assignment: Sequence[int]) -> InfeasibleError:
        """The error for a budget that no choice meets, whatever the other budgets say."""
        return cls(
            f"budget {budget.name!r} cannot be met: its limit is {budget.limit:.12g}, the smallest achievable usage "
            f"is {smallest_usage:.12g}, {smallest_usage - budget.limit:.6g} too much",
            budget=budget.name,
            limit=budget.limit,
            smallest_usage=smallest_usage,
            assignment=assignment,
        )

    @classmethod
    def jointly(cls, budgets: Sequence[Budget]) -> InfeasibleError:
        """The error for budgets that can each be met, but not by one choice."""
        names = ", ".join(f"{budget.name!r} (limit {budget.limit:.12g})" for budget in budgets)
        return cls(f"each of the budgets {names} can be met alone, but no choice meets them jointly")

    @classmethod
    def forbidden(cls, names: Sequence[str]) -> InfeasibleError:
        """The error for infinite costs that leave no choice; ``names`` are the variables it was noticed at."""
        listed = ", ".join(repr(name) for name in names)
        return cls(f"infinite costs forbid every choice; no allowed combination of options remains at {listed}")


def evaluate(problem: Problem, assignment: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """Cost in seconds and usage in bytes per budget of one choice, summed in the order of the problem.

    Raises:
        ValueError: wrong number of choices or an option that does not exist.
    """
    if len(assignment) != len(problem.variables):
        raise ValueError(f"{len(assignment)} choices for {len(problem.variables)} variables")
    objective, usage = 0.0, np.zeros(len(problem.budgets))
    for variable, option in zip(problem.variables, assignment, strict=True):
        if not 0 <= option < variable.num_options:
            raise ValueError(f"variable {variable.name!r} has {variable.num_options} options, no option {option}")
        objective += float(variable.costs[option])
        usage += variable.usage[:, option]
    for edge in problem.edges:
        pair = assignment[edge.a], assignment[edge.b]
        objective += float(edge.costs[pair])
        if edge.usage is not None:
            usage += edge.usage[:, pair[0], pair[1]]
    return objective, tuple(float(value) for value in usage)


def _costs(values: npt.ArrayLike, num_axes: int, what: str) -> Array:
    """A read-only float64 copy of ``values``, checked."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != num_axes:
        raise ValueError(f"{what}: costs must have {num_axes} axes, they have shape {array.shape}")
    if 0 in array.shape:
        raise ValueError(f"{what}: there must be at least one option, costs have shape {array.shape}")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ValueError(f"{what}: costs must be finite or inf, they contain NaN or -inf")
    array.setflags(write=False)
    return array


def _usage(values: npt.ArrayLike, shape: tuple[int, ...], what: str) -> Array:
    """A read-only float64 copy of ``values``, checked against the shape of the costs."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != len(shape) + 1 or array.shape[1:] != shape:
        raise ValueError(
            f"{what}: usage must have shape [num_budgets, {', '.join(map(str, shape))}], not {array.shape}"
        )
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{what}: usage must be finite and >= 0")
    array.setflags(write=False)
    return array
