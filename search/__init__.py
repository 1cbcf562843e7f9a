"""Choose one option per variable at least total cost, under an optional budget. Exact.

``problem`` holds the frozen input and output types, ``intra_op`` the solver for one stage and ``inter_op`` the solver
for pipelines. The docstrings of the two solvers say how the other modules fit.
"""

from search.problem import (
    Edge,
    InfeasibleError,
    Problem,
    Solution,
    Variable,
    evaluate,
)

__all__ = [
    "Edge",
    "InfeasibleError",
    "Problem",
    "Solution",
    "Variable",
    "evaluate",
]
