"""The input and the output of the search: frozen arrays and ids, without graphs or machines.

Shape legend: n options of a variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

USAGE_TOLERANCE = 1e-12
"""Relative slack when a usage is compared with a limit.

Sums of whole bytes below 2**53 are exact. The slack only keeps the order of summation of fractional usages from
deciding. It is less than one byte for every limit below a terabyte.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A decision: its options, their costs, and the bytes they take from the budget.

    Args:
        name: used in messages only; need not be unique.
        costs: [n] seconds, n >= 1; ``inf`` forbids the option, negative values are allowed.
            usage: [n] bytes, finite and >= 0, that the option takes from the budget.

    Raises:
        ValueError: wrong number of axes, no options, NaN, ``-inf`` cost, negative or infinite usage.
    """

    name: str
    costs: Array
    usage: Array

    def __post_init__(self) -> None:
        owner = f"variable {self.name!r}"
        object.__setattr__(self, "costs", _costs(self.costs, 1, owner))
        object.__setattr__(self, "usage", _usage(self.usage, self.costs.shape, owner))

    @property
    def num_options(self) -> int:
        """Count the options, including forbidden ones."""
        return int(self.costs.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A cost that depends on the options of two variables, for instance the reshard between two operators.

    Args:
        a: index of the first variable.
        b: index of the second; ``a == b`` is allowed and adds the diagonal to the variable's own costs.
        costs: [n_a, n_b] seconds; ``inf`` forbids the pair.

    Raises:
        ValueError: wrong number of axes, NaN or ``-inf`` cost.
    """

    a: int
    b: int
    costs: Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "costs", _costs(self.costs, 2, f"edge ({self.a}, {self.b})"))


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Variables, the edges between them, and the budget they share.

    Several edges between one pair add up. limit: of the total usage, in bytes; ``inf`` means no budget.

    Raises:
        ValueError: an edge names a variable that does not exist, an array does not fit its variables, or the limit is
            NaN.
    """

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...] = ()
    limit: float = float("inf")

    def __post_init__(self) -> None:
        if np.isnan(self.limit):
            raise ValueError("the budget's limit is NaN")
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

    def allows(self, usage: float) -> bool:
        """Whether a total usage is within the limit."""
        return bool(usage <= largest_allowed(self.limit))


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of a solver.

    Args:
        assignment: one option index per variable.
        objective: seconds, as ``evaluate`` gives them for ``assignment``.
        usage: bytes, as ``evaluate`` gives them.
    """

    assignment: tuple[int, ...]
    objective: float
    usage: float


class InfeasibleError(ValueError):
    """No choice satisfies the problem.

    Attributes:
            assignment: the allowed assignment of least usage; empty when infinite costs forbid every choice.
    """

    def __init__(self, message: str, assignment: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.assignment = tuple(assignment)

    @classmethod
    def over_budget(cls, limit: float, smallest_usage: float, assignment: Sequence[int]) -> InfeasibleError:
        """The error for a budget that no choice meets."""
        return cls(
            f"the budget cannot be met: its limit is {limit:.12g}, the smallest achievable usage is "
            f"{smallest_usage:.12g}, {smallest_usage - limit:.6g} too much",
            assignment,
        )

    @classmethod
    def forbidden(cls, names: Sequence[str]) -> InfeasibleError:
        """The error for infinite costs that leave no choice; ``names`` are the variables left without options."""
        listed = ", ".join(repr(name) for name in names)
        return cls(f"infinite costs forbid every choice; no allowed combination of options remains at {listed}")


def largest_allowed(limit: float) -> float:
    """Return the limit plus the rounding slack ``USAGE_TOLERANCE``."""
    return limit if np.isinf(limit) else limit + USAGE_TOLERANCE * abs(limit)


def evaluate(problem: Problem, assignment: Sequence[int]) -> tuple[float, float]:
    """Return cost in seconds and usage in bytes of one choice, summed in the order of the problem.

    Raises:
        ValueError: wrong number of choices or an option that does not exist.
    """
    if len(assignment) != len(problem.variables):
        raise ValueError(f"{len(assignment)} choices for {len(problem.variables)} variables")
    objective = usage = 0.0
    for variable, option in zip(problem.variables, assignment, strict=True):
        if not 0 <= option < variable.num_options:
            raise ValueError(f"variable {variable.name!r} has {variable.num_options} options, no option {option}")
        objective += float(variable.costs[option])
        usage += float(variable.usage[option])
    for edge in problem.edges:
        objective += float(edge.costs[assignment[edge.a], assignment[edge.b]])
    return objective, usage


def _costs(values: npt.ArrayLike, num_axes: int, owner: str) -> Array:
    """Return a checked, read-only float64 copy of ``values``."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != num_axes:
        raise ValueError(f"{owner}: costs must have {num_axes} axes, they have shape {array.shape}")
    if 0 in array.shape:
        raise ValueError(f"{owner}: there must be at least one option, costs have shape {array.shape}")
    if np.isnan(array).any() or np.isneginf(array).any():
        raise ValueError(f"{owner}: costs must be finite or inf, they contain NaN or -inf")
    array.setflags(write=False)
    return array


def _usage(values: npt.ArrayLike, shape: tuple[int, ...], owner: str) -> Array:
    """Return a read-only float64 copy of ``values``, checked against the shape of the costs."""
    array = np.array(values, dtype=np.float64)
    if array.shape != shape:
        raise ValueError(f"{owner}: usage must have shape {shape} as the costs, not {array.shape}")
    if not np.isfinite(array).all() or (array < 0).any():
        raise ValueError(f"{owner}: usage must be finite and >= 0")
    array.setflags(write=False)
    return array
