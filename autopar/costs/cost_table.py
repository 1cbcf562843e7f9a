"""The cost of each unit of the model under one assignment: the table behind predictions and pipelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.costs.evaluate import layer_costs
from autopar.costs.layer_costs import FIRST_PASS, HIDDEN, HOST, SUMS, SYNCHRONISATION, LayerCost, exposed
from autopar.costs.price import Pricer
from autopar.costs.stored_costs import StoredCost, StoredParameters, stored_costs
from autopar.ir.chain import chain, homes_of, segments
from autopar.ir.graph import Graph
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, num_local
from autopar.sharding.scopes import scopes_of


def unit_costs(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, assignment: Assignment
) -> dict[str, LayerCost]:
    """Return the cost of every unit, by name."""
    calls = layer_costs(graph, operators, pricer, assignment)
    parameters = StoredParameters.of(assignment.parameters, homes_of(graph), scopes_of(graph), pricer.mesh.axes)
    costs = combined(calls, stored_costs(graph, pricer, parameters), pricer.rates.num_forwards)
    for name, num_bytes in _summed_bytes(graph, pricer, assignment).items():
        costs[name].fixed[SUMS] += num_bytes
    return costs


def _summed_bytes(graph: Graph, pricer: Pricer, assignment: Assignment) -> dict[str, float]:
    """Return by unit the bytes of the batch sums that a first pass computes, in at least fp32. They stay until the
    next first pass."""
    metas, homes, last = {scope.name: scope.metas for scope in scopes_of(graph)}, segments(graph), chain(graph)[-1]
    bytes_of: dict[str, float] = defaultdict(float)
    for scope, ref in graph.accumulation.summed if graph.accumulation is not None else ():
        meta, option = metas[scope][ref], assignment.operators.get((scope, ref.node))
        # The result of a run of layers has no option.
        part = meta.numel if option is None else num_local(meta, option.outputs[ref.index], pricer.mesh)
        bytes_of[scope or homes.get(ref.node, last)] += part * max(meta.dtype.itemsize, 4)
    return bytes_of


def combined(
    costs: Mapping[str, LayerCost], stored: Mapping[str, StoredCost], num_forwards: int = 1
) -> dict[str, LayerCost]:
    """Return the cost of every unit with its parameters, and with its host's seconds beyond its device's
    (host_calls.py).

    num_forwards: of a micro-batch in a step. The first of two is a separate kind, and keeps nothing.
    """
    combined_costs = {}
    for name, cost in costs.items():
        stored_cost = stored.get(name, StoredCost())
        behind = defaultdict(float, cost.backward)
        for kind, value in stored_cost.per_micro.items():
            behind[kind] += value
        issued = cost.host[0] + stored_cost.host[0], cost.host[1] + stored_cost.host[1]
        forward = _waiting(cost.forward, issued[0])
        backward = _waiting(behind, issued[1])
        if num_forwards > 1:
            forward = defaultdict(float, forward) | {FIRST_PASS: (num_forwards - 1) * exposed(forward)}
        modes = {
            n: replace(m, transient_bytes=m.transient_bytes + stored_cost.gathered_bytes) for n, m in cost.modes.items()
        }
        combined_costs[name] = replace(
            cost,
            forward=forward,
            backward=backward,
            step=_beside(stored_cost.per_step, backward.get(HOST, 0.0)),
            fixed=stored_cost.fixed,
            gathered_bytes=stored_cost.gathered_bytes,
            slots=tuple(stored_cost.slots),
            overlapped=_beyond(cost.overlapped, backward.get(HOST, 0.0)),
            modes=modes,
            host=issued,
        )
    return combined_costs


def _waiting(seconds: dict[str, float], issued: float) -> dict[str, float]:
    """Return the seconds of a stretch: the device's work and its waiting for the host."""
    late = issued - exposed(seconds)
    return defaultdict(float, seconds) | {HOST: late} if issued and late > 0 else seconds


def _beside(seconds: dict[str, float], late: float) -> dict[str, float]:
    """Price the work done once per step. Its gradients are sent while the last backward waits for its host for
    `late`."""
    sent = min(late, seconds.get(SYNCHRONISATION, 0.0))
    if not sent:
        return seconds
    shown, hidden = seconds[SYNCHRONISATION] - sent, seconds.get(HIDDEN, 0.0) + sent
    return defaultdict(float, seconds) | {SYNCHRONISATION: shown, HIDDEN: hidden}


def _beyond(overlapped: dict[str, float], late: float) -> dict[str, float]:
    """Return the seconds that waiting sums add to a backward that already waits for its host for `late`."""
    whole = sum(overlapped.values())
    if not late or not whole:
        return overlapped
    return defaultdict(float, {kind: value * max(1.0 - late / whole, 0.0) for kind, value in overlapped.items()})
