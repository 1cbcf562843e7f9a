"""What each block of the model costs under one set of choices: the table that predictions and pipelines are made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.costs.block_costs import BlockCost
from autopar.costs.evaluate import layer_costs
from autopar.costs.price import Pricer
from autopar.costs.stored_costs import StoredCost, stored_costs
from autopar.ir.graph import Graph
from autopar.options.choices import Choices
from autopar.options.strategies import Operator


def block_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, choices: Choices
) -> dict[str, BlockCost]:
    """The cost of every block, by name."""
    activity = layer_costs(graph, operators, pricer, choices)
    return combined(activity, stored_costs(graph, pricer, choices.parameters))


def combined(costs: Mapping[str, BlockCost], stored: Mapping[str, StoredCost]) -> dict[str, BlockCost]:
    """The cost of every block with its parameters."""
    found = {}
    for name, cost in costs.items():
        own = stored.get(name, StoredCost())
        backward = defaultdict(float, cost.backward)
        for kind, value in own.per_micro.items():
            backward[kind] += value
        modes = {n: replace(m, transient_bytes=m.transient_bytes + own.gathered_bytes) for n, m in cost.modes.items()}
        found[name] = replace(
            cost,
            backward=backward,
            step=own.per_step,
            fixed=own.fixed,
            gathered_bytes=own.gathered_bytes,
            slots=tuple(own.slots),
            modes=modes,
        )
    return found
