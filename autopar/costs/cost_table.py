"""What each unit of the model costs under one assignment: the table that predictions and pipelines are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.costs.evaluate import layer_costs
from autopar.costs.layer_costs import FIRST_PASS, LayerCost
from autopar.costs.price import Pricer
from autopar.costs.stored_costs import StoredCost, StoredParameters, stored_costs
from autopar.ir.chain import homes_of
from autopar.ir.graph import Graph
from autopar.options.assignment import Assignment
from autopar.options.scopes import scopes_of
from autopar.options.strategies import Operator


def unit_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, assignment: Assignment
) -> dict[str, LayerCost]:
    """The cost of every unit, by name."""
    calls = layer_costs(graph, operators, pricer, assignment)
    parameters = StoredParameters.of(assignment.parameters, homes_of(graph), scopes_of(graph))
    return combined(calls, stored_costs(graph, pricer, parameters), pricer.num_forwards)


def combined(
    costs: Mapping[str, LayerCost], stored: Mapping[str, StoredCost], num_forwards: int = 1
) -> dict[str, LayerCost]:
    """The cost of every unit with its parameters. num_forwards: of a micro-batch in a step; what the first of two
    takes is a kind of its own, and it keeps nothing."""
    found = {}
    for name, cost in costs.items():
        own = stored.get(name, StoredCost())
        forward = cost.forward
        if num_forwards > 1:
            forward = defaultdict(float, forward) | {FIRST_PASS: (num_forwards - 1) * cost.forward_seconds}
        backward = defaultdict(float, cost.backward)
        for kind, value in own.per_micro.items():
            backward[kind] += value
        modes = {n: replace(m, transient_bytes=m.transient_bytes + own.gathered_bytes) for n, m in cost.modes.items()}
        found[name] = replace(
            cost,
            forward=forward,
            backward=backward,
            step=own.per_step,
            fixed=own.fixed,
            gathered_bytes=own.gathered_bytes,
            slots=tuple(own.slots),
            modes=modes,
        )
    return found
