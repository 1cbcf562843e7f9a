"""The gradients of tied weights, which several stages of a pipeline hold: summed over the copies once per step.

Where the copies lie on equal meshes, ranks of the same index sum theirs in a process group. Else whole gradients are
exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from . import collectives
from .collectives import Group
from .flat import Bucket
from .mesh import Mesh
from .pipeline import Pipeline
from .stage_module import Part
from .transfer import Channels, Edge, Mailbox, Message, Transfer, incoming_to


@dataclass(frozen=True, slots=True)
class _Tied:
    """A tied weight of this rank: its copies here, and the ranks that hold the others of this part of it."""

    buckets: tuple[Bucket, ...]
    group: Group

    def sum_gradients(self) -> None:
        """Sums them in place, so that all copies have the total."""
        total = self.buckets[0].gradient
        for bucket in self.buckets[1:]:
            total.add_(bucket.gradient)
        if self.group is not None:
            collectives.all_reduce(total, self.group)
        for bucket in self.buckets[1:]:
            bucket.gradient.copy_(total)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A tied weight of this rank whose copies lie on unequal meshes.

    buckets: its copies here. stage: the first stage here that has it. edges: from and to its other positions.
    incoming: what this rank gets.
    """

    buckets: tuple[Bucket, ...]
    stage: int
    edges: tuple[Edge, ...]
    incoming: Mapping[int, Sequence[Transfer]]

    def sum_gradients(self, mesh: Mesh, channels: Channels) -> None:
        """Sums the gradients of the copies in the order of the stages, so that all copies stay equal."""
        here = self.buckets[0].gradient
        for bucket in self.buckets[1:]:
            here.add_(bucket.gradient)
        parts = {self.stage: self.buckets[0].whole(here)[0]}
        mailbox = Mailbox(mesh, channels, self.incoming)
        for edge in self.edges:
            if edge.source == self.stage:
                mailbox.send(Message(edge, 0), parts[self.stage])
        for edge in self.edges:
            if edge.target == self.stage:
                parts[edge.source] = mailbox.receive(Message(edge, 0))
        first, *others = (parts[stage] for stage in sorted(parts))
        total = first.clone()
        for part in others:
            total.add_(part)
        mailbox.finish()
        for bucket in self.buckets:
            bucket.set_gradient(bucket.entries[0], total)


class TiedGradients:
    """Those of one rank. parts: its stages by number. Every process makes every group, so all must make this."""

    def __init__(self, pipeline: Pipeline, mesh: Mesh, parts: Mapping[int, Part]) -> None:
        self._mesh = mesh
        self._tied: list[_Tied] = []
        self._exchanges: list[_Exchange] = []
        rank = mesh.everyone.rank
        groups: dict[tuple[int, ...], Group] = {}
        for name, stages in pipeline.tied:
            local_stages = [number for number in stages if number in parts]
            entries = (entry for number in local_stages for entry in parts[number].entries())
            buckets = tuple(bucket for bucket, entry in entries if entry.slot.name == name and bucket.key.requires_grad)
            edges = pipeline.exchanges(name, stages)
            if edges:
                if buckets:
                    incoming = incoming_to(rank, (Message(edge, 0) for edge in edges))
                    self._exchanges.append(_Exchange(buckets, min(local_stages), edges, incoming))
                continue
            firsts = sorted({pipeline.stage_mesh(number).first_rank for number in stages})
            for index in range(pipeline.stage_mesh(stages[0]).num_ranks):
                ranks = tuple(first + index for first in firsts)
                if len(ranks) > 1 and ranks not in groups:
                    groups[ranks] = dist.new_group(list(ranks), timeout=mesh.timeout)
                if rank in ranks and buckets:
                    self._tied.append(_Tied(buckets, groups.get(ranks)))

    def sum(self, channels: Channels) -> None:
        """Sums all of them; channels: what exchanges are sent by. Collective."""
        for tied in self._tied:
            tied.sum_gradients()
        for exchange in self._exchanges:
            exchange.sum_gradients(self._mesh, channels)
