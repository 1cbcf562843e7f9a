"""Explanations of a plan: its bottleneck, the cost of each other decision, and the changes that make an infeasible
request feasible.

    explain(program)       an Explanation, from planning again under changed conditions        questions.py
    render_explanation     the explanation as text                                             terminal.py
    compare(first, second) two plans side by side                                              compare.py
    advised(request, ...)  an InfeasibleError with changes that make the request feasible      rescue.py

Every number is a prediction of a plan that was chosen or priced for it. Nothing is extrapolated from the plan alone.
"""

from autopar.explain.compare import Comparison, compare, render_comparison
from autopar.explain.explanation import Alternative, Explanation, WhatIf
from autopar.explain.questions import explain
from autopar.explain.terminal import render_explanation

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
