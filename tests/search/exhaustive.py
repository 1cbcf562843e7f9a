"""Brute force: the oracle that tests compare ``intra_op`` with. Shares no code with it but the problem types."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from search.problem import Array, InfeasibleError, Problem, Solution, evaluate, largest_allowed

MAX_COMBINATIONS = 5_000_000
CHUNK = 1 << 16


def solve(problem: Problem) -> Solution:
    """Try every combination; of equal ones the first in lexicographic order wins.

    Raises:
        ValueError: more than ``MAX_COMBINATIONS`` combinations.
        InfeasibleError: as ``intra_op.solve``.
    """
    sizes = tuple(variable.num_options for variable in problem.variables)
    total = math.prod(sizes)
    if total > MAX_COMBINATIONS:
        raise ValueError(f"exhaustive search refuses {total} combinations, more than {MAX_COMBINATIONS}")
    best, best_index = np.inf, -1
    least, least_index = np.inf, -1
    for start in range(0, total, CHUNK):
        index = np.arange(start, min(start + CHUNK, total))
        costs, usage = _evaluate_all(problem, _options(index, sizes))
        allowed = np.isfinite(costs)
        place = int(np.argmin(np.where(allowed, usage, np.inf)))
        if allowed[place] and usage[place] < least:
            least, least_index = float(usage[place]), start + place
        fits = allowed & (usage <= largest_allowed(problem.limit))
        place = int(np.argmin(np.where(fits, costs, np.inf)))
        if fits[place] and costs[place] < best:
            best, best_index = float(costs[place]), start + place
    if least_index < 0:
        raise InfeasibleError.forbidden([variable.name for variable in problem.variables])
    if best_index < 0:
        raise InfeasibleError.over_budget(problem.limit, least, _assignments(least_index, sizes))
    assignment = _assignments(best_index, sizes)
    return Solution(assignment, *evaluate(problem, assignment))


def _options(index: npt.NDArray[np.int64], sizes: tuple[int, ...]) -> list[npt.NDArray[np.int64]]:
    """The option of each variable for each combination number."""
    options: list[npt.NDArray[np.int64]] = []
    for size in reversed(sizes):
        index, option = np.divmod(index, size)
        options.append(option)
    return options[::-1]


def _assignments(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The combination with a given number."""
    return tuple(int(option[0]) for option in _options(np.array([index]), sizes))


def _evaluate_all(problem: Problem, options: list[npt.NDArray[np.int64]]) -> tuple[Array, Array]:
    """Costs [m] and usage [m] of m combinations."""
    count = len(options[0]) if options else 1
    costs, usage = np.zeros(count), np.zeros(count)
    for variable, option in zip(problem.variables, options, strict=True):
        costs += variable.costs[option]
        usage += variable.usage[option]
    for edge in problem.edges:
        costs += edge.costs[options[edge.a], options[edge.b]]
    return costs, usage
