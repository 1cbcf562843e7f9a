"""Branch and bound around elimination: exact also when tables or label sets would not fit.

A node is a core (options that remain). It is reduced, bounded and, whenever its tables and label sets fit, solved
outright; otherwise the options of one variable are split into two halves and both are visited, better half first.
Most problems need one node.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from search.budgeted import solve_budgeted
from search.core import Core, Mask
from search.deadline import TimeLimitReachedError
from search.elimination import Plan, decode, eliminate, plan_elimination
from search.problem import Array
from search.reductions import EmptyDomainError, drop_dead_ends, reduce_core
from search.state import Node, Outcome, Search
from search.weak import maximise_weakly, relax_weakly

CHEAP_CELLS = 3e7
"""Below this size (about 0.1 s) elimination is not worth bounding first."""

MAX_MESSAGE_CELLS = 3e7
"""240 MB of messages; a budgeted solve holds up to three such sets (costs, completions, one usage)."""

MAX_TOTAL_CELLS = 3e9
THRESHOLD_FRACTIONS = (1 / 16, 1 / 2)
THRESHOLD_SAVING = 4.0
"""A trial threshold must make the elimination this much smaller, or the trial may cost as much as it saves."""


def branch_and_bound(search: Search, core: Core) -> Outcome:
    """Search all of ``core``; the result is in ``search`` and the proof in the outcome."""
    root_bound = sum(float(unary.min()) for unary in core.costs.unaries)
    root_bound += sum(float(table.min()) for table in core.costs.edges.values())
    stack = [Node(core, root_bound, (0.0,) * len(search.limits))]
    empty: int | None = None
    while stack:
        node = stack[-1]
        try:
            children = _expand(search, node) if node.bound < search.cutoff else []
        except EmptyDomainError as error:
            children, empty = [], error.variable
        except TimeLimitReachedError:
            return Outcome(min(search.best, *(open_node.bound for open_node in stack)), False)
        stack.pop()
        stack.extend(reversed(children))
    return Outcome(search.best, True, empty if search.num_nodes <= 1 else None)


def _expand(search: Search, node: Node) -> list[Node]:
    """Solve a node, or split it."""
    search.check()
    search.num_nodes += 1
    core = reduce_core(node.core, search.check)
    plan = plan_elimination(core.sizes, core.pairs())
    margins: Sequence[Array] = [np.arange(size, dtype=np.float64) for size in core.sizes]
    if plan.total_cells > CHEAP_CELLS:
        if search.limits:
            node.multipliers = maximise_weakly(search, core, node.multipliers)
        tightened = _tighten(search, node, core)
        if tightened is None:
            return []
        core, margins = tightened
        core = drop_dead_ends(core)
        if core.sizes != tuple(len(margin) for margin in margins):
            margins = [np.arange(size, dtype=np.float64) for size in core.sizes]
        plan = plan_elimination(core.sizes, core.pairs())
    if plan.message_cells > MAX_MESSAGE_CELLS or plan.total_cells > MAX_TOTAL_CELLS:
        return _split(node, core, _widest(core, plan), margins)
    search.max_table_cells = max(search.max_table_cells, max(_bag_cells(core, plan), default=0.0))
    if not search.limits:
        _eliminate_into(search, core, plan)
        return []
    node.core = core
    found = solve_budgeted(search, node)
    if found is None:
        return []
    return _split(node, node.core, int(np.argmax([len(margin) for margin in found])), found)


def _eliminate_into(search: Search, core: Core, plan: Plan) -> None:
    """The node's optimum without budgets."""
    search.num_eliminations += 1
    forward = eliminate(core.costs, plan, search.check)
    if np.isfinite(forward.value):
        search.offer(core, decode(forward))


def _tighten(search: Search, node: Node, core: Core) -> tuple[Core, list[Array]] | None:
    """Drop options by the dual bound; None when that settles the node. Also gives margins to split by.

    Without budgets, thresholds between bound and incumbent are tried first: if the optimum of the options that pass one
    lies below it, it is the node's optimum, found in much smaller tables.
    """
    relaxed = relax_weakly(search, core, node.multipliers)
    node.bound = max(node.bound, relaxed.value)
    if not search.limits and np.isfinite(search.best):
        gap = search.cutoff - node.bound
        budget = plan_elimination(core.sizes, core.pairs()).total_cells / THRESHOLD_SAVING
        for fraction in THRESHOLD_FRACTIONS:
            if node.bound >= search.cutoff:
                break
            threshold = relaxed.value + fraction * gap
            if _try_below(search, core, relaxed.margins, threshold, budget):
                return None
    masks = [margin < search.cutoff for margin in relaxed.margins]
    if node.bound >= search.cutoff or not all(mask.any() for mask in masks):
        return None
    margins = [margin[mask] for margin, mask in zip(relaxed.margins, masks, strict=True)]
    return core.keep(masks), margins


def _try_below(search: Search, core: Core, margins: Sequence[Array], threshold: float, max_cells: float) -> bool:
    """Whether the options with a margin up to ``threshold`` contain a choice at or below it (it is then optimal)."""
    masks: list[Mask] = [margin <= threshold for margin in margins]
    if not all(mask.any() for mask in masks):
        return False
    try:
        smaller = drop_dead_ends(core.keep(masks))
    except EmptyDomainError:
        return False
    plan = plan_elimination(smaller.sizes, smaller.pairs())
    if plan.total_cells > max_cells or plan.message_cells > MAX_MESSAGE_CELLS:
        return False
    _eliminate_into(search, smaller, plan)
    return search.best <= threshold


def _bag_cells(core: Core, plan: Plan) -> list[float]:
    """Cells of each variable's bucket table."""
    sizes = core.sizes
    return [
        float(sizes[v]) * float(np.prod([float(sizes[u]) for u in separator]))
        for v, separator in enumerate(plan.separators)
    ]


def _widest(core: Core, plan: Plan) -> int:
    """The variable with more than one option whose bucket tables hold most cells together."""
    weight = np.zeros(len(core.sizes))
    for v, cells in enumerate(_bag_cells(core, plan)):
        weight[[v, *plan.separators[v]]] += cells
    weight[np.array(core.sizes) < 2] = -1.0
    return int(np.argmax(weight))


def _split(node: Node, core: Core, variable: int, margins: Sequence[Array]) -> list[Node]:
    """Two nodes that share out the options of one variable by margin, the promising half first."""
    ranked = np.argsort(margins[variable], kind="stable")
    halves = ranked[: (len(ranked) + 1) // 2], ranked[(len(ranked) + 1) // 2 :]
    nodes: list[Node] = []
    for half in halves:
        masks: list[Mask] = [np.ones(size, dtype=np.bool_) for size in core.sizes]
        masks[variable] = np.zeros(core.sizes[variable], dtype=np.bool_)
        masks[variable][half] = True
        nodes.append(Node(core.keep(masks), node.bound, node.multipliers))
    return nodes
