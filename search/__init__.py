"""Choose one option per variable at least total cost, under optional budgets. Exact.

``problem`` holds the frozen input and output types, ``intra_op`` the solver, ``exhaustive`` the oracle that tests
compare with. The other modules are the solver's parts; ``intra_op``'s docstring says how they fit.
"""

from search.problem import (
    Budget,
    Edge,
    InfeasibleError,
    Problem,
    Solution,
    TimeLimitError,
    Variable,
    evaluate,
)

__all__ = [
    "Budget",
    "Edge",
    "InfeasibleError",
    "Problem",
    "Solution",
    "TimeLimitError",
    "Variable",
    "evaluate",
]
