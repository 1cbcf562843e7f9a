"""Choose one option per variable at least total cost, under an optional budget. Exact.

``problem`` holds the frozen input and output types, ``intra_op`` the solver. The other modules are the solvers' parts;
the docstrings of ``intra_op`` and ``inter_op`` (stages of pipelines) say how they fit.
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
