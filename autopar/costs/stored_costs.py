"""Costs to store, synchronize and update the parameters of every unit, independent of the batch.

On one rank, per micro-batch: gathered weights and scattered gradients of ZeRO; per step: the rest of the exchange of
gradients, and the optimizer. A share h of gradient traffic is hidden behind the backward: with x exposed seconds, h
x / (1 - h) are hidden. Constant bytes are weights, gradients and the optimizer's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from autopar.costs import host_calls
from autopar.costs.layer_costs import ACCUMULATION, FIXED_KINDS, HIDDEN, HOST, QUANTISING, ROUNDING, SYNCHRONISATION
from autopar.costs.peak import Slot, slot_of
from autopar.costs.price import Pricer
from autopar.ir.chain import home_of_unread, last_readers
from autopar.ir.graph import UPDATE_BUFFER, Graph, Ref, TensorMeta, unread
from autopar.ir.mesh import ZERO_AXES
from autopar.ir.placement import Placements, Stored
from autopar.sharding.scopes import Scope


@dataclass
class StoredCost:
    """Costs of one unit's parameters: seconds per micro-batch and per step, host seconds for forward and backward,
    constant and gathered bytes, and the buffers of each trained one. These are computed on demand: bounds need
    seconds only."""

    per_micro: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    per_step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fixed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gathered_bytes: float = 0.0
    host: tuple[float, float] = (0.0, 0.0)
    make_slots: Callable[[], list[Slot]] = list

    @cached_property
    def slots(self) -> list[Slot]:
        """Return the buffers of each trained parameter."""
        return self.make_slots()


Alike = tuple[str, str, Stored, torch.dtype, bool]
"""Key of parameters that are priced as one: their scope and unit, how they are stored, dtype, whether they are
trained."""

Trained = tuple[str, TensorMeta, Stored]
"""A trained parameter: its name if it is a top-level one, its tensor, how it is stored."""


@dataclass(frozen=True, slots=True)
class StoredParameters:
    """Parameters as they are stored on some axes.

    elements: of all equal ones; numbers: how many these are. trained: by unit. shared_bytes: of the trained ones that
    share buffers, by their scope and the data-parallel axes that shard them.
    """

    elements: Mapping[Alike, int]
    numbers: Mapping[Alike, int]
    trained: Mapping[str, list[Trained]]
    axes: tuple[str, ...]
    shared_bytes: Mapping[tuple[str, tuple[int, ...]], int]

    @classmethod
    def of(
        cls,
        chosen: Mapping[tuple[str, str], Stored],
        homes: Mapping[str, str],
        scopes: tuple[Scope, ...],
        axes: tuple[str, ...],
    ) -> StoredParameters:
        """Group parameters. homes: unit of each top-level parameter. scopes: of the graph. axes: of the placements."""
        metas = {scope.name: scope.metas for scope in scopes}
        updated = {(scope.name, n.inputs[0].node) for scope in scopes for n in scope.nodes if n.op == UPDATE_BUFFER}
        trained: dict[str, list[Trained]] = defaultdict(list)
        elements: dict[Alike, int] = defaultdict(int)
        numbers: dict[Alike, int] = defaultdict(int)
        shared_bytes: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        for (scope, name), stored in chosen.items():
            meta, where = metas[scope][Ref(name)], scope or homes[name]
            if meta.requires_grad:
                shared_bytes[scope, sharding_axes(axes, stored.placements)] += meta.num_bytes
                trained[where].append(("" if scope else name, meta, stored))
            copies = 2 if (scope, name) in updated else 1  # a buffer's next value waits for the step's end
            alike = scope, where, stored, meta.dtype, meta.requires_grad
            elements[alike] += meta.numel * copies
            numbers[alike] += 1
        return cls(elements, numbers, trained, axes, shared_bytes)


def stored_costs(
    graph: Graph, pricer: Pricer, parameters: StoredParameters, counts_unread: bool = True
) -> dict[str, StoredCost]:
    """Price synchronization, updates and storage of every unit's parameters, independent of the batch.

    counts_unread: also parameters that no call reads, which every rank of one stage stores unsharded.
    """
    hidden, prices = pricer.rates.hidden_fraction, pricer.parameters
    gathered: dict[str, set[int]] = defaultdict(set)
    costs: dict[str, StoredCost] = defaultdict(StoredCost)
    # All prices are linear in the elements of parameters that share buffers, but for launches: those stored alike are
    # priced as one.
    for alike, elements in parameters.elements.items():
        (scope, where, stored, dtype, requires_grad), number = alike, parameters.numbers[alike]
        unit, meta = costs[where], TensorMeta((elements,), dtype, requires_grad)
        unit_bytes = parameters.shared_bytes.get((scope, sharding_axes(parameters.axes, stored.placements)), 0)
        if stored.zero == 3 and requires_grad:
            gathered[where].add(prices.zero_size(stored))
        per_micro, per_step = prices.sync_parts(meta, stored, unit_bytes)
        for table, exposed in ((unit.per_micro, per_micro), (unit.per_step, per_step)):
            table[SYNCHRONISATION] += exposed
            table[HIDDEN] += exposed * hidden / (1.0 - hidden)
        unit.per_micro[ACCUMULATION] += prices.accumulation_seconds(meta, stored, number)
        if rounding := prices.rounding_seconds(meta, stored):
            unit.per_micro[ROUNDING] += rounding
        for table, quantising in zip(
            (unit.per_micro, unit.per_step), prices.quantising_parts(meta, stored, unit_bytes), strict=True
        ):
            if quantising:
                table[QUANTISING] += quantising
        unit.per_step["optimizer"] += prices.optimizer_seconds(meta, stored, number)
        for kind, size in zip(FIXED_KINDS, prices.parameter_bytes(meta, stored), strict=True):
            unit.fixed[kind] += size
        unit.gathered_bytes += prices.gathered_bytes(meta, stored)
    for where, trained in parameters.trained.items():
        costs[where].make_slots = partial(_slots, graph, pricer, trained)
        _issue(costs[where], pricer, len(trained), len(gathered[where] - {1}))
    if counts_unread:
        costs[home_of_unread(graph)].fixed[FIXED_KINDS[0]] += unread_bytes(graph)
    return costs


def sharding_axes(axes: tuple[str, ...], placements: Placements) -> tuple[int, ...]:
    """Return the data-parallel axes that shard a parameter, such as experts. Parameters with equal ones share
    buffers."""
    named = zip(axes, placements, strict=True)
    return tuple(number for number, (axis, placement) in enumerate(named) if axis in ZERO_AXES and placement.is_shard)


def _issue(unit: StoredCost, pricer: Pricer, num_trained: int, num_gathered: int) -> None:
    """Add the host's seconds for trained parameters, in that many groups that ZeRO-3 gathers. An update waits for
    values read of the gradients, so nothing hides the calls that issue it."""
    one = pricer.rates.host_call_seconds
    if not one:
        return
    forward, backward = (num_gathered * calls for calls in host_calls.GATHERED)
    unit.host = one * forward, one * (backward + host_calls.TRAINED * num_trained)
    if not pricer.parameters.writes_copies and not pricer.training.offload:
        unit.per_step[HOST] += one * host_calls.UPDATED * num_trained


def unread_bytes(graph: Graph) -> int:
    """Return the bytes of the parameters and buffers that no call reads."""
    return sum(parameter.meta.num_bytes for parameter in unread(graph))


def _slots(graph: Graph, pricer: Pricer, parameters: list[Trained]) -> list[Slot]:
    last = last_readers(graph)
    return [slot_of(pricer, meta, stored, last.get(name, "")) for name, meta, stored in parameters]
