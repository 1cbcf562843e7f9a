"""Costs of storing, updating and synchronizing parameters where experts are on other ranks than the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from autopar.costs.price import Pricer
from autopar.costs.stored_costs import StoredCost, StoredParameters, stored_costs
from autopar.ir.placement import Stored
from autopar.strategies.experts import Key, expert_mesh, expert_stored
from autopar.strategies.share import Share
from autopar.strategies.strategy import Strategy


def stored_shares(
    share: Share, pricer: Pricer, parameters: Mapping[Key, Stored], wanted: Strategy
) -> dict[str, StoredCost]:
    """`stored_costs` of all parameters. Under ep those of experts are priced on `expert_mesh`, in buffers of their
    own."""
    homes, scopes = share.homes, share.scopes
    if wanted.ep == 1:
        return stored_costs(share.graph, pricer, StoredParameters.of(parameters, homes, scopes))
    mesh = expert_mesh(wanted.mesh, wanted.ep)
    expert_parameters = share.experts.parameters
    dense = {key: stored for key, stored in parameters.items() if key not in expert_parameters}
    experts = {
        key: expert_stored(stored, wanted.mesh, mesh, wanted.zero)
        for key, stored in parameters.items()
        if key in expert_parameters
    }
    other = replace(pricer, rates=replace(pricer.rates, mesh=mesh))
    unit_costs = stored_costs(share.graph, pricer, StoredParameters.of(dense, homes, scopes))
    of_experts = StoredParameters.of(experts, homes, scopes)
    own_costs = stored_costs(share.graph, other, of_experts, counts_unread=False)
    for name, cost in own_costs.items():
        unit_costs[name] = _sum(unit_costs[name], cost)
    return unit_costs


def _sum(one: StoredCost, other: StoredCost) -> StoredCost:
    return StoredCost(
        per_micro=_added(one.per_micro, other.per_micro),
        per_step=_added(one.per_step, other.per_step),
        fixed=_added(one.fixed, other.fixed),
        gathered_bytes=one.gathered_bytes + other.gathered_bytes,
        make_slots=lambda: [*one.slots, *other.slots],
    )


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    summed = defaultdict(float, one)
    for kind, value in other.items():
        summed[kind] += value
    return summed
