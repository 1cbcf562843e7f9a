"""Exchanges between ranks inside a layer, beyond the traced calls, as costs of its unit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.layer_costs import HIDDEN, LayerCost, exposed


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds by kind of one micro-batch's forward and backward of one call or module.

    again: seconds of a forward that is computed again, by recompute mode. hidden: the share of forward and backward
    that other computation hides, if the unit has as much of its own: another micro-batch's, of which a unit computes
    the same.
    """

    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    again: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0


def with_exchanges(costs: Mapping[str, LayerCost], exchanges: Mapping[str, Iterable[Exchange]]) -> dict[str, LayerCost]:
    """The units with what is exchanged in each."""
    unit_costs = dict(costs)
    for name, items in exchanges.items():
        cost, exchanges_of_unit = unit_costs[name], list(items)
        forward, backward = defaultdict(float, cost.forward), defaultdict(float, cost.backward)
        computed = exposed(cost.forward) + exposed(cost.backward)
        for item in exchanges_of_unit:
            sent = exposed(item.forward) + exposed(item.backward)
            hidden = min(item.hidden, computed / sent) if sent else 0.0
            for table, added in ((forward, item.forward), (backward, item.backward)):
                for kind, value in added.items():
                    table[kind] += (1 - hidden) * value
                    table[HIDDEN] += hidden * value
        modes = {
            label: replace(mode, seconds=mode.seconds + sum(item.again.get(label, 0.0) for item in exchanges_of_unit))
            for label, mode in cost.modes.items()
        }
        unit_costs[name] = replace(cost, forward=forward, backward=backward, modes=modes)
    return unit_costs


def again(forward: Mapping[str, float], modes: Iterable[str]) -> dict[str, float]:
    """A forward's exposed seconds, for the modes that repeat it."""
    return dict.fromkeys(modes, exposed(forward))
