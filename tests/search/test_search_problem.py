"""Validation, error messages, hand-checked answers."""

from __future__ import annotations

import numpy as np
import pytest

from search import Edge, InfeasibleError, Problem, Variable, evaluate, intra_op
from tests.search import exhaustive

NO_USAGE = np.zeros(2)


def two(costs_a=(0.0, 0.0), costs_b=(0.0, 0.0)) -> tuple[Variable, Variable]:
    return Variable("a", np.array(costs_a), NO_USAGE), Variable("b", np.array(costs_b), NO_USAGE)


def with_bytes(name: str, costs: list[float], usage: list[float]) -> Variable:
    return Variable(name, np.array(costs), np.array(usage))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Variable("a", np.array([np.nan]), np.zeros(1)), "'a'.*NaN"),
        (lambda: Variable("a", np.array([-np.inf]), np.zeros(1)), "'a'.*-inf"),
        (lambda: Variable("a", np.zeros(0), np.zeros(0)), "at least one option"),
        (lambda: Variable("a", np.zeros(2), np.zeros(3)), r"\(2,\) as the costs"),
        (lambda: Variable("a", np.zeros(2), np.full(2, -1.0)), ">= 0"),
        (lambda: Variable("a", np.zeros(2), np.full(2, np.inf)), "finite"),
        (lambda: Edge(0, 1, np.zeros(2)), "2 axes"),
        (lambda: Problem(two(), (), float("nan")), "limit is NaN"),
        (lambda: Problem(two(), (Edge(0, 2, np.zeros((2, 2))),)), "no variable 2"),
        (lambda: Problem(two(), (Edge(0, 1, np.zeros((2, 3))),)), r"'a' and 'b'.*\(2, 3\)"),
    ],
)
def test_malformed_input_is_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_evaluate_counts_loops_and_parallel_edges() -> None:
    loop = Edge(0, 0, np.array([[1.0, 100.0], [100.0, 2.0]]))
    edges = (loop, Edge(0, 1, np.array([[0.0, 10.0], [20.0, 30.0]])), Edge(1, 0, np.array([[0.0, 5.0], [7.0, 9.0]])))
    problem = Problem(two((0.5, 0.25), (0.0, 0.125)), edges)
    assert evaluate(problem, (1, 1))[0] == 0.25 + 0.125 + 2.0 + 30.0 + 9.0
    assert evaluate(problem, (0, 1))[0] == 0.5 + 0.125 + 1.0 + 10.0 + 7.0
    with pytest.raises(ValueError, match="no option 2"):
        evaluate(problem, (2, 0))
    with pytest.raises(ValueError, match="1 choices"):
        evaluate(problem, (0,))


def test_arrays_are_copied_and_read_only() -> None:
    costs = np.array([1.0, 2.0])
    variable = Variable("a", costs, NO_USAGE)
    costs[0] = 9.0
    assert variable.costs[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        variable.costs[0] = 3.0


def test_empty_problem_costs_nothing() -> None:
    solution = intra_op.solve(Problem((), (), 0.0))
    assert (solution.assignment, solution.objective, solution.usage) == ((), 0.0, 0.0)


def test_ties_take_the_lowest_option() -> None:
    assert intra_op.solve(Problem(two((3.0, 3.0), (1.0, 1.0)), (Edge(0, 1, np.full((2, 2), 2.0)),))).assignment == (
        0,
        0,
    )


def test_a_budget_picks_the_knapsack_optimum() -> None:
    """Three items, capacity 5: (2, gain 3), (3, gain 4), (4, gain 5); the best pair is the first two, gain 7."""
    items = tuple(
        with_bytes(f"item{i}", [0.0, -gain], [0.0, size]) for i, (size, gain) in enumerate([(2, 3), (3, 4), (4, 5)])
    )
    solution = intra_op.solve(Problem(items, (), 5.0))
    assert (solution.assignment, solution.objective, solution.usage) == ((1, 1, 0), -7.0, 5.0)


def test_an_infinite_limit_is_no_limit() -> None:
    assert intra_op.solve(Problem((with_bytes("a", [2.0, 1.0], [0.0, 9.0]),))).assignment == (1,)


def test_over_budget_says_by_how_much() -> None:
    variables = (with_bytes("a", [1.0, 2.0], [30.0, 20.0]), with_bytes("b", [1.0, np.inf], [40.0, 0.0]))
    with pytest.raises(InfeasibleError, match=r"limit is 50,.*usage is 60, 10 too much") as caught:
        intra_op.solve(Problem(variables, (), 50.0))
    assert caught.value.assignment == (1, 0)


def test_forbidden_problems_name_variables() -> None:
    edge = Edge(0, 1, np.full((2, 2), np.inf))
    with pytest.raises(InfeasibleError, match="infinite costs.*'[ab]'") as caught:
        intra_op.solve(Problem(two(), (edge,)))
    assert not caught.value.assignment
    odd_cycle = tuple(Edge(a, b, np.array([[np.inf, 0.0], [0.0, np.inf]])) for a, b in ((0, 1), (1, 2), (2, 0)))
    three = tuple(Variable(name, np.zeros(2), NO_USAGE) for name in "abc")
    with pytest.raises(InfeasibleError, match="infinite costs.*'a', 'b', 'c'"):
        intra_op.solve(Problem(three, odd_cycle))


def test_exhaustive_refuses_large_problems() -> None:
    variables = tuple(Variable(f"v{i}", np.zeros(10), np.zeros(10)) for i in range(7))
    with pytest.raises(ValueError, match="refuses 10000000 combinations"):
        exhaustive.solve(Problem(variables))
