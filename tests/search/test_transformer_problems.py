"""Transformer-sized problems: memory, and agreement of independent routes to one number."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from search import evaluate, intra_op
from tests.search.marginals import min_marginals
from tests.search.transformer_problems import transformer


def test_one_layer_agrees_with_its_marginals_and_its_budget() -> None:
    """min_marginals reduces and bounds nothing, so it is a second opinion on solve; so is a budget just met."""
    free = transformer(3, num_layers=1, structured=True)
    best = intra_op.solve(free)
    margins = min_marginals(free)
    for margin, choice in zip(margins, best.assignment, strict=True):
        assert margin.min() == pytest.approx(best.objective, rel=1e-9)
        assert margin[choice] == pytest.approx(best.objective, rel=1e-9)
    tight = transformer(3, num_layers=1, structured=True, budget_fraction=0.3)
    bounded = intra_op.solve(tight)
    assert bounded.objective > best.objective
    assert bounded.usage <= tight.limit
    # Independent optimality check: no change of one or two neighboring variables is cheaper within the budget.
    for edge in tight.edges[:10]:
        for a in range(0, tight.variables[edge.a].num_options, 7):
            for b in range(0, tight.variables[edge.b].num_options, 7):
                assignment = list(bounded.assignment)
                assignment[edge.a], assignment[edge.b] = a, b
                objective, usage = evaluate(tight, assignment)
                assert objective >= bounded.objective - 1e-12 or usage > tight.limit


@pytest.mark.slow
@pytest.mark.parametrize("budget_fraction", [None, 0.9, 0.6, 0.3])
def test_twelve_layers(budget_fraction: float | None) -> None:
    """147 variables of 40 to 80 options, width 3: some seconds each."""
    problem = transformer(0, structured=True, budget_fraction=budget_fraction)
    solution = intra_op.solve(problem)
    if budget_fraction is None:
        # The unreduced elimination is an independent route to the optimum.
        least = min(float(margin.min()) for margin in min_marginals(problem))
        assert least == pytest.approx(solution.objective, rel=1e-9)
    else:
        assert solution.usage <= problem.limit


@pytest.mark.slow
def test_twelve_layers_in_memory() -> None:
    """Random costs without structure, which hardly any option can be dropped from: under 1 GiB in a fresh process."""
    code = (
        f"import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parents[2])!r})\n"
        "import pathlib; from tests.search.transformer_problems import transformer; from search import intra_op\n"
        "intra_op.solve(transformer(0, structured=False, budget_fraction=0.6))\n"
        # Not ru_maxrss, which begins with that of the process that was forked.
        "print(pathlib.Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 2**30
