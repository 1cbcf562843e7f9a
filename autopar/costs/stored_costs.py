"""What the parameters of every unit cost to store, synchronise and update, whatever the batch.

On one rank, per micro-batch: gathered weights and scattered gradients of ZeRO; per step: what is left of the exchange
of gradients, and the optimizer. A share h of gradient traffic hides behind the backward: where x seconds of it show,
h x / (1 - h) do not. Bytes that stay are weights, gradients and the optimizer's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch

from autopar.costs.layer_costs import ACCUMULATION, FIXED_KINDS, HIDDEN, QUANTISING, ROUNDING, SYNCHRONISATION
from autopar.costs.peak import Slot, slot_of
from autopar.costs.price import Pricer
from autopar.ir.chain import home_of_unread, homes_of, last_readers
from autopar.ir.graph import Graph, Ref, TensorMeta, unread
from autopar.ir.placement import Stored
from autopar.options.scopes import Scope, scopes_of


@dataclass
class StoredCost:
    """The parameters of one unit: seconds per micro-batch and per step, bytes that stay and that are gathered, and the
    buffers of each trained one, found when they are asked for: bounds ask for seconds only."""

    per_micro: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    per_step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    fixed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    gathered_bytes: float = 0.0
    make_slots: Callable[[], list[Slot]] = list

    @cached_property
    def slots(self) -> list[Slot]:
        """The buffers of each trained parameter."""
        return self.make_slots()


def stored_costs(
    graph: Graph,
    pricer: Pricer,
    chosen: Mapping[tuple[str, str], Stored],
    homes: Mapping[str, str] | None = None,
    scopes: tuple[Scope, ...] | None = None,
    counts_unread: bool = True,
) -> dict[str, StoredCost]:
    """Synchronisation, updates and storage of every unit's parameters; they do not depend on the batch.

    homes: unit of each top-level parameter, by default that of its first use. scopes: of the graph, if they are known.
    counts_unread: also what no call reads, which every rank of one stage holds whole.
    """
    home, hidden = homes or homes_of(graph), pricer.hidden_fraction
    metas = {scope.name: scope.metas for scope in scopes or scopes_of(graph)}
    found: dict[str, StoredCost] = defaultdict(StoredCost)
    trained: dict[str, list[Trained]] = defaultdict(list)
    alike: dict[tuple[str, str, Stored, torch.dtype, bool], int] = defaultdict(int)
    units: dict[str, int] = defaultdict(int)
    for (scope, name), stored in chosen.items():
        meta, where = metas[scope][Ref(name)], scope or home[name]
        if meta.requires_grad:
            units[scope] += meta.num_bytes
            trained[where].append(("" if scope else name, meta, stored))
        alike[scope, where, stored, meta.dtype, meta.requires_grad] += meta.numel
    # All prices are linear in the elements of parameters that share buffers: those stored alike are priced as one.
    for (scope, where, stored, dtype, requires_grad), elements in alike.items():
        unit, meta = found[where], TensorMeta((elements,), dtype, requires_grad)
        per_micro, per_step = pricer.sync_parts(meta, stored, units[scope])
        for table, exposed in ((unit.per_micro, per_micro), (unit.per_step, per_step)):
            table[SYNCHRONISATION] += exposed
            table[HIDDEN] += exposed * hidden / (1.0 - hidden)
        unit.per_micro[ACCUMULATION] += pricer.accumulation_seconds(meta, stored)
        if rounding := pricer.rounding_seconds(meta, stored):
            unit.per_micro[ROUNDING] += rounding
        for table, quantising in zip(
            (unit.per_micro, unit.per_step), pricer.quantising_parts(meta, stored, units[scope]), strict=True
        ):
            if quantising:
                table[QUANTISING] += quantising
        unit.per_step["optimizer"] += pricer.optimizer_seconds(meta, stored)
        for kind, size in zip(FIXED_KINDS, pricer.parameter_bytes(meta, stored), strict=True):
            unit.fixed[kind] += size
        unit.gathered_bytes += pricer.gathered_bytes(meta, stored)
    for where, parameters in trained.items():
        found[where].make_slots = partial(_slots, graph, pricer, parameters)
    if counts_unread:
        found[home_of_unread(graph)].fixed[FIXED_KINDS[0]] += unread_bytes(graph)
    return found


def unread_bytes(graph: Graph) -> int:
    """Bytes of the parameters and buffers that no call reads."""
    return sum(parameter.meta.num_bytes for parameter in unread(graph))


Trained = tuple[str, TensorMeta, Stored]
"""A trained parameter: its name if it is a top-level one, what it is, how it is stored."""


def _slots(graph: Graph, pricer: Pricer, parameters: list[Trained]) -> list[Slot]:
    last = last_readers(graph)
    return [slot_of(pricer, meta, stored, last.get(name, "")) for name, meta, stored in parameters]
