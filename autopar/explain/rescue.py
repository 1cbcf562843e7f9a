"""Changes that make an infeasible request feasible: one pin less, or more nodes of the same kind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import AutoparError, InfeasibleError
from autopar.explain.decisions import pin_text, pins_of, without
from autopar.plan import Plan
from autopar.planning.candidates import candidate_of
from autopar.planning.pipelines import EqualSearch
from autopar.planning.request import Request
from autopar.planning.solved_layers import SolvedLayers
from autopar.report.plan_words import plan_words
from autopar.units import seconds_text

SECONDS = 5.0
"""Time limit for trying changes."""

MOST_NODES = 64
"""The most nodes that are tried, as a multiple of the request's."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """A changed request that has a plan."""

    words: str
    plan: Plan


def advised(request: Request, error: InfeasibleError, seconds: float = SECONDS) -> InfeasibleError:
    """Return the error with changes that `seconds` are enough to find, after the budget that the error names."""
    if error.needed_bytes is None or request.mixed is not None:
        return error
    try:
        search = EqualSearch(request)
        search.run()
    except AutoparError:
        return error
    solved_layers, limit = search.solved_layers, time.monotonic() + seconds
    remedies = [
        r for r in (cheapest_pin(request, solved_layers, limit), smallest_cluster(request, solved_layers, limit)) if r
    ]
    texts = []
    for remedy in remedies:
        step = seconds_text(remedy.plan.prediction.step_seconds)
        texts.append(f"{remedy.words}: {plan_words(remedy.plan)}, {step} a step")
    alternatives = error.alternatives
    choices = [alternatives] if isinstance(alternatives, str) else list(alternatives or ())
    better = InfeasibleError(error.constraint, values=error.values, alternatives=[*choices[:1], *texts, *choices[1:]])
    better.needed_bytes, better.certainty = error.needed_bytes, error.certainty
    return better


def cheapest_pin(request: Request, solved_layers: SolvedLayers, limit: float) -> Remedy | None:
    """Find the single pin to remove for the fastest plan, or several pins if no single one is enough."""
    pins, remedies = pins_of(request.constraints), list[Remedy]()
    for name in pins:
        remedy = _without(request, (name,), solved_layers) if time.monotonic() < limit else None
        remedies += [remedy] if remedy is not None else []
    if remedies:
        return min(remedies, key=lambda r: r.plan.prediction.step_seconds)
    remedy = _without(request, tuple(pins), solved_layers) if len(pins) > 1 and time.monotonic() < limit else None
    dropped = tuple(pins)
    for name in pins if remedy is not None else ():
        fewer = tuple(other for other in dropped if other != name)
        smaller = _without(request, fewer, solved_layers) if fewer and time.monotonic() < limit else None
        if smaller is not None:
            remedy, dropped = smaller, fewer
    return remedy


def _without(request: Request, names: tuple[str, ...], solved_layers: SolvedLayers) -> Remedy | None:
    limits = request.constraints
    # Solved layers depend on tables of placements, but not on other pins.
    has_table = any(isinstance(getattr(limits, name, None), tuple) for name in names)
    plan = plan_for(replace(request, constraints=without(limits, names)), None if has_table else solved_layers)
    return None if plan is None else Remedy("without " + ", ".join(pin_text(limits, n) for n in names), plan)


def smallest_cluster(request: Request, solved_layers: SolvedLayers, limit: float) -> Remedy | None:
    """Find the fewest nodes of the same kind with a plan: double, then try numbers between the last two."""
    nodes, low, remedy = request.cluster.num_nodes, request.cluster.num_nodes, None
    count = 2 * nodes
    while remedy is None and count <= MOST_NODES * nodes and time.monotonic() < limit:
        remedy = _with_nodes(request, count, solved_layers)
        low, count = (low, count) if remedy else (count, 2 * count)
    if remedy is None:
        return None
    for between in _between(low, count):
        if time.monotonic() > limit:
            break
        smaller = _with_nodes(request, between, solved_layers)
        if smaller is not None:
            return smaller
    return remedy


def _between(low: int, high: int) -> Iterator[int]:
    """Yield about eight numbers between `low` and `high` in ascending order, or all if there are fewer."""
    step = max((high - low) // 8, 1)
    yield from range(low + step, high, step)


def _with_nodes(request: Request, count: int, solved_layers: SolvedLayers) -> Remedy | None:
    cluster = replace(request.cluster, num_nodes=count)
    larger = replace(request, cluster=cluster)
    plan = plan_for(larger, solved_layers.priced_for(larger))
    return None if plan is None else Remedy(f"{cluster} ({cluster.num_devices} devices)", plan)


def plan_for(request: Request, solved_layers: SolvedLayers | None) -> Plan | None:
    """Return the best plan of the search over pipelines, which includes one pipeline rank, or None."""
    try:
        best = EqualSearch(request, solved_layers).run().best
        return None if best is None else candidate_of(best, request).plan
    except AutoparError:
        return None
