"""The solver against brute force on random problems: objective, feasibility, errors, determinism."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search import Edge, InfeasibleError, Problem, Solution, Variable, evaluate, intra_op
from tests.search import exhaustive
from tests.search.marginals import min_marginals

SHAPES = {
    "chain": lambda n: [(i, i + 1) for i in range(n - 1)],
    "skips": lambda n: [(i, i + 1) for i in range(n - 1)] + [(i, i + 2) for i in range(0, n - 2, 2)],
    "cycle": lambda n: [(i, (i + 1) % n) for i in range(n)],
    "diamonds": lambda n: (
        [(i, j) for i in range(0, n - 3, 3) for j in (i + 1, i + 2)]
        + [(j, i + 3) for i in range(0, n - 3, 3) for j in (i + 1, i + 2)]
    ),
    "two parts": lambda n: [(i, i + 1) for i in range(n - 1) if i != n // 2],
    "dense": lambda n: list(itertools.combinations(range(n), 2)),
    "parallel and loops": lambda n: [(i, i + 1) for i in range(n - 1)] * 2 + [(i, i) for i in range(n)],
    "none": lambda n: [],
}


def random_problem(seed: int, shape: str, has_budget: bool, *, whole: bool, forbidden: float) -> Problem:
    """At most 7 variables of at most 4 options; ``whole`` numbers make many ties."""
    rng = np.random.default_rng(seed)
    num_variables = int(rng.integers(1, 8))
    sizes = [int(size) for size in rng.integers(1, 5, size=num_variables)]

    def costs(*shape: int) -> np.ndarray:
        values = rng.integers(-1, 3, size=shape).astype(float) if whole else rng.random(shape) * 1e-3
        values[rng.random(shape) < forbidden] = np.inf
        return values

    variables = [
        Variable(f"v{i}", costs(size), np.rint(rng.random(size) * (4 if whole else 4e10)))
        for i, size in enumerate(sizes)
    ]
    edges = []
    for a, b in SHAPES[shape](num_variables):
        if b >= num_variables:
            continue
        if rng.random() < 0.3:
            a, b = b, a
        edges.append(Edge(a, b, costs(sizes[a], sizes[b])))
    unlimited = Problem(tuple(variables), tuple(edges))
    if not has_budget:
        return unlimited
    least = min(evaluate(unlimited, [int(rng.integers(s)) for s in sizes])[1] for _ in range(3))
    return Problem(tuple(variables), tuple(edges), least * float(rng.choice([0.6, 0.9, 1.0, 1.0])))


def solve_or_error(solver, problem: Problem) -> Solution | InfeasibleError:
    try:
        return solver(problem)
    except InfeasibleError as error:
        return error


def assert_agree(problem: Problem) -> None:
    """Compare with brute force."""
    expected = solve_or_error(exhaustive.solve, problem)
    result = solve_or_error(intra_op.solve, problem)
    if isinstance(expected, InfeasibleError):
        assert isinstance(result, InfeasibleError)
        assert str(result) == str(expected) or "infinite costs" in str(result) and "infinite costs" in str(expected)
        if expected.assignment:
            objective, usage = evaluate(problem, result.assignment)
            assert np.isfinite(objective) and usage == evaluate(problem, expected.assignment)[1]
        return
    assert isinstance(result, Solution), str(result)
    assert (result.objective, result.usage) == evaluate(problem, result.assignment)
    assert result.objective == pytest.approx(expected.objective, rel=1e-9, abs=1e-15)
    assert problem.allows(result.usage)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32 - 1),
    has_budget=st.booleans(),
    whole=st.booleans(),
    forbidden=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_equals_exhaustive(shape: str, seed: int, has_budget: bool, whole: bool, forbidden: float) -> None:
    assert_agree(random_problem(seed, shape, has_budget, whole=whole, forbidden=forbidden))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), shape=st.sampled_from(sorted(SHAPES)), forbidden=st.sampled_from([0.0, 0.2]))
def test_min_marginals_and_least_usage_equal_enumeration(seed: int, shape: str, forbidden: float) -> None:
    problem = random_problem(seed, shape, True, whole=False, forbidden=forbidden)
    sizes = [variable.num_options for variable in problem.variables]
    expected = [np.full(size, np.inf) for size in sizes]
    least = np.inf
    for assignment in itertools.product(*map(range, sizes)):
        objective, usage = evaluate(problem, assignment)
        if np.isfinite(objective):
            least = min(least, usage)
        for variable, option in enumerate(assignment):
            expected[variable][option] = min(expected[variable][option], objective)
    for computed, wanted in zip(min_marginals(problem), expected, strict=True):
        np.testing.assert_allclose(computed, wanted, rtol=1e-9, atol=1e-15)
    nothing = Problem(problem.variables, problem.edges, -1.0)
    with pytest.raises(InfeasibleError, match="infinite costs" if np.isinf(least) else "cannot be met") as caught:
        intra_op.solve(nothing)
    assert np.isinf(least) or evaluate(problem, caught.value.assignment)[1] == least


@pytest.mark.parametrize("has_budget", [False, True])
def test_integer_programs_equal_exhaustive(monkeypatch: pytest.MonkeyPatch, has_budget: bool) -> None:
    """Without room for the tables of any elimination, all that is searched is an integer program."""
    monkeypatch.setattr("search.elimination.MAX_TOTAL_CELLS", 0.0)
    for seed in range(90):
        shape = sorted(SHAPES)[seed % len(SHAPES)]
        assert_agree(random_problem(seed, shape, has_budget, whole=seed % 2 == 0, forbidden=0.05))


def test_rising_thresholds_equal_exhaustive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every threshold from the lowest, however small the programs are."""
    monkeypatch.setattr("search.budgeted.FEW_COLUMNS", 0)
    calls = []
    solve_budgeted = intra_op.solve_budgeted
    monkeypatch.setattr(
        intra_op, "solve_budgeted", lambda *arguments: calls.append(arguments) or solve_budgeted(*arguments)
    )
    for seed in range(180):
        shape = sorted(SHAPES)[seed % len(SHAPES)]
        assert_agree(random_problem(seed, shape, True, whole=seed % 2 == 0, forbidden=0.05))
    assert len(calls) > 30


def test_what_only_the_tolerance_allows_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice a trillionth over budget is within HiGHS's tolerance, and no answer."""
    monkeypatch.setattr("search.elimination.MAX_TOTAL_CELLS", 0.0)
    over = 1e10 * (1 + 1e-11)
    variables = tuple(Variable(f"v{i}", np.array([1.0, 2.0]), np.array([over / 2, 0.0])) for i in range(2))
    solution = intra_op.solve(Problem(variables, (), 1e10))
    assert solution.objective == 3.0 and sum(solution.assignment) == 1


def test_fractional_usage_exactly_at_the_limit() -> None:
    """0.1 + 0.2 + 0.3 depends on the order of summation; a limit equal to either sum is met."""
    usages = (0.1, 0.2, 0.3)
    variables = tuple(Variable(f"v{i}", np.array([1.0, 5.0]), np.array([used, 0.0])) for i, used in enumerate(usages))
    for order in itertools.permutations(usages):
        limit = order[0] + order[1] + order[2]
        assert intra_op.solve(Problem(variables, (), limit)).assignment == (0, 0, 0)


DETERMINISM = """
import json, sys
sys.path[:0] = sys.argv[1:]
from test_search_oracle import SHAPES, random_problem, solve_or_error
from search import intra_op
found = [solve_or_error(intra_op.solve, random_problem(seed, shape, seed % 3 > 0, whole=True, forbidden=0.1))
         for seed in range(12) for shape in sorted(SHAPES)]
print(json.dumps([list(getattr(f, "assignment", ())) for f in found]))
"""


@pytest.mark.slow
def test_equal_problems_give_equal_choices_in_other_processes() -> None:
    """Whole-number costs tie often; hash seeds differ between the processes, the order of solving too."""
    import pathlib

    here = pathlib.Path(__file__).parent
    paths = [str(here), str(here.parents[1])]
    expected = [
        list(solve_or_error(intra_op.solve, random_problem(s, k, s % 3 > 0, whole=True, forbidden=0.1)).assignment)
        for s, k in reversed([(s, k) for s in range(12) for k in sorted(SHAPES)])
    ][::-1]
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", DETERMINISM, *paths],
            env={"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout) == expected
