"""What ranks exchange inside a layer beyond the traced calls, added to what its unit costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.costs.layer_costs import HIDDEN, LayerCost, Mode, exposed
from autopar.costs.liveness import Liveness


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds by kind of one micro-batch's forward and backward of one call or module.

    again: seconds of a forward that is computed again, by recompute mode. forward_bytes, backward_bytes: buffers that
    are alive meanwhile, beside what the unit itself has. hidden: the share of forward and backward that other
    computation hides, if the unit has as much of its own: another micro-batch's, of which a unit computes the same.
    host: what the host needs to issue it, forward and backward.
    """

    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)
    again: Mapping[str, float] = field(default_factory=dict)
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    hidden: float = 0.0
    host: tuple[float, float] = (0.0, 0.0)


def with_exchanges(costs: Mapping[str, LayerCost], exchanges: Mapping[str, Iterable[Exchange]]) -> dict[str, LayerCost]:
    """The units with what is exchanged in each. Buffers of several exchanges of a unit are not alive together, and
    are counted as if they were alive at the unit's peak, which is never too little."""
    found = dict(costs)
    for name, items in exchanges.items():
        cost, own = found[name], list(items)
        forward, backward = defaultdict(float, cost.forward), defaultdict(float, cost.backward)
        computed = exposed(cost.forward) + exposed(cost.backward)
        for item in own:
            sent = exposed(item.forward) + exposed(item.backward)
            hidden = min(item.hidden, computed / sent) if sent else 0.0
            for table, added in ((forward, item.forward), (backward, item.backward)):
                for kind, value in added.items():
                    table[kind] += (1 - hidden) * value
                    table[HIDDEN] += hidden * value
        held = max((item.forward_bytes for item in own), default=0.0)
        back = max((item.backward_bytes for item in own), default=0.0)
        modes = {}
        for label, mode in cost.modes.items():
            seconds = mode.seconds + sum(item.again.get(label, 0.0) for item in own)
            modes[label] = Mode(seconds, mode.kept_bytes, mode.transient_bytes + back, _held(mode.live, held, back))
        issued = [
            one + sum(each) for one, each in zip(cost.host, zip(*(i.host for i in own), strict=True), strict=True)
        ]
        found[name] = replace(
            cost,
            forward=forward,
            backward=backward,
            modes=modes,
            live=_held(cost.live, held, back),
            host=(issued[0], issued[1]),
        )
    return found


def again(forward: Mapping[str, float], modes: Iterable[str]) -> dict[str, float]:
    """A forward's exposed seconds, for the modes that repeat it."""
    return dict.fromkeys(modes, exposed(forward))


def _held(live: Liveness, forward: float, backward: float) -> Liveness:
    return replace(
        live,
        forward=live.forward + forward,
        again=live.again + forward,
        backward=live.backward + backward,
        waiting=live.waiting + backward,
        deferring=live.deferring + backward,
    )
