"""Why a plan: what binds it, what each other decision would cost, and what would make an infeasible request feasible.

    explain(program)       an Explanation, found by planning again under changed conditions    questions.py
    render_explanation     the same as text                                                    render.py
    compare(one, other)    two plans side by side                                              compare.py
    advised(request, ...)  an InfeasibleError that says what would do                          rescue.py

Nothing is inferred from the plan alone: every number is a prediction of a plan that was made or priced for it.
"""

from autopar.explain.compare import Comparison, compare, render_comparison
from autopar.explain.explanation import Alternative, Explanation, WhatIf
from autopar.explain.questions import explain
from autopar.explain.render import render_explanation

__all__ = [
    "Alternative",
    "Comparison",
    "Explanation",
    "WhatIf",
    "compare",
    "explain",
    "render_comparison",
    "render_explanation",
]
