"""Tensors from one stage's mesh to another's: who sends which part to whom, and the messages under way.

`plan_slices` works it out from two layouts and communicates nothing. `Mailbox` moves the tensors of one run through the
schedule. Messages between two ranks go in the order in which the schedule makes the sender send them, which both sides
derive from it; each direction (to higher, to lower ranks) has a process group of its own, since within one NCCL
communicator a receive that waits would hold up the sends behind it.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Group, Work, as_sent
from .mesh import Axis, Mesh
from .parameters import Param, runs

Box = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class StageMesh:
    """A mesh as others see it: named axes, row-major over the consecutive processes from first_rank on."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    first_rank: int = 0

    @property
    def num_ranks(self) -> int:
        """Processes of the mesh."""
        return math.prod(self.sizes)

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the axes that have more than one rank: equal for meshes on which all lies alike."""
        return tuple((name, size) for name, size in zip(self.axes, self.sizes, strict=True) if size > 1)

    @property
    def ranks(self) -> range:
        """The processes of the mesh, in its order."""
        return range(self.first_rank, self.first_rank + self.num_ranks)

    def seen_by(self, rank: int) -> Mesh:
        """The mesh as process `rank` would see it, without process groups."""
        strides = [math.prod(self.sizes[i + 1 :]) for i in range(len(self.sizes))]
        local_rank = rank - self.first_rank
        axes = tuple(
            Axis(name, size, local_rank // stride % size)
            for name, size, stride in zip(self.axes, self.sizes, strides, strict=True)
        )
        return Mesh(axes, Axis("world", self.num_ranks, local_rank), torch.device("cpu"), first_rank=self.first_rank)


@dataclass(frozen=True, slots=True)
class MessageSlice:
    """One box from process source to process target: where it lies in the part of each."""

    source: int
    target: int
    source_box: Box
    target_box: Box


_Runs = tuple[tuple[tuple[int, int, int], ...], ...]
"""For each dim the (local start, global start, length) that a rank holds."""


def plan_slices(sent: Param, source: StageMesh, received: Param, target: StageMesh) -> tuple[MessageSlice, ...]:
    """The boxes that bring a tensor from one layout to the other; R and S(d) only.

    Where several ranks hold the same part, a target gets it from itself, else from the rank of the same index if the
    meshes are of one size, else from the one that sends least so far. Raises ValueError for a tensor of two shapes and
    for partial placements.
    """
    if sent.shape != received.shape:
        raise ValueError(f"a tensor of shape {sent.shape} is received as {received.shape}")
    for spec in (sent, received):
        if any(text in ("P", "Rp") for text in spec.placements.values()):
            raise ValueError(f"tensors cross between stages as R or S(dim), not as {dict(spec.placements)}")
    holders: dict[_Runs, list[int]] = {}
    for rank in source.ranks:
        holders.setdefault(_held(sent, source, rank), []).append(rank)
    load = dict.fromkeys(source.ranks, 0)
    slices = []
    for rank in target.ranks:
        wanted = _held(received, target, rank)
        for holder, ranks in holders.items():
            boxes = list(_overlaps(holder, wanted))
            if not boxes:
                continue
            chosen = _choose(rank, ranks, source, target, load)
            for source_box, target_box in boxes:
                slices.append(MessageSlice(chosen, rank, source_box, target_box))
                if chosen != rank:
                    load[chosen] += math.prod(part.stop - part.start for part in target_box)
    return tuple(slices)


def _held(spec: Param, stage_mesh: StageMesh, rank: int) -> _Runs:
    mesh = stage_mesh.seen_by(rank)
    spec.local_shape(mesh)
    return tuple(tuple(runs(dim, spec, mesh)) for dim in range(len(spec.shape)))


def _overlaps(holder: _Runs, wanted: _Runs) -> Iterator[tuple[Box, Box]]:
    """(box in the source's part, box in the target's part) of all that they have in common."""
    dims = []
    for runs_held, other in zip(holder, wanted, strict=True):
        common = []
        for (source, at, length), (target, to, size) in itertools.product(runs_held, other):
            lo, hi = max(at, to), min(at + length, to + size)
            if lo < hi:
                common.append((slice(source + lo - at, source + hi - at), slice(target + lo - to, target + hi - to)))
        dims.append(common)
    for cut in itertools.product(*dims):
        yield tuple(source for source, _ in cut), tuple(target for _, target in cut)


def _choose(rank: int, holders: list[int], source: StageMesh, target: StageMesh, load: Mapping[int, int]) -> int:
    if rank in holders:
        return rank
    index = rank - target.first_rank
    if source.num_ranks == target.num_ranks and source.first_rank + index in holders:
        return source.first_rank + index
    return min(holders, key=lambda holder: (load[holder], abs(holder - source.first_rank - index)))


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A tensor that stage `source` makes and stage `target` takes. backward: empty if no gradient goes back."""

    name: str
    source: int
    target: int
    sent: Param
    received: Param
    dtype: torch.dtype
    forward: tuple[MessageSlice, ...]
    backward: tuple[MessageSlice, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """A tensor of one micro-batch on its way, or its gradient on the way back."""

    edge: Edge
    micro_batch: int
    is_gradient: bool = False

    @property
    def slices(self) -> tuple[MessageSlice, ...]:
        """The boxes that are sent, and to whom."""
        return self.edge.backward if self.is_gradient else self.edge.forward

    @property
    def spec(self) -> Param:
        """Return the placement on the receivers."""
        return self.edge.sent if self.is_gradient else self.edge.received

    @property
    def local_spec(self) -> Param:
        """Return the placement on the senders."""
        return self.edge.received if self.is_gradient else self.edge.sent


Transfer = tuple[Message, MessageSlice]


def incoming_to(rank: int, messages: Iterable[Message]) -> dict[int, list[Transfer]]:
    """Return the slices that a rank gets from each other rank, in the order of the messages."""
    incoming: dict[int, list[Transfer]] = {}
    for message in messages:
        for message_slice in message.slices:
            if message_slice.target == rank != message_slice.source:
                incoming.setdefault(message_slice.source, []).append((message, message_slice))
    return incoming


@dataclass(frozen=True, slots=True)
class Channels:
    """Process groups of everyone: for messages to higher and to lower ranks."""

    up: Group = None
    down: Group = None

    @classmethod
    def create(cls, mesh: Mesh) -> Channels:
        """Makes the groups. Collective over all processes."""
        if mesh.everyone.size == 1:
            return cls()
        return cls(dist.new_group(timeout=mesh.timeout), dist.new_group(timeout=mesh.timeout))

    def group(self, message_slice: MessageSlice) -> Group:
        """The process group of a message from copy.source to copy.target."""
        return self.up if message_slice.source < message_slice.target else self.down

    def connect(self, pairs: Iterable[tuple[int, int]], rank: int, device: torch.device) -> None:
        """Exchange a byte between all (source, target) that will have messages, in an order common to all.

        NCCL makes a connection when it is first used, which blocks both sides: in mid-schedule they could wait in a
        circle.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        for source, target in sorted(set(pairs)):
            group = self.up if source < target else self.down
            if rank == source:
                dist.send(byte, target, group=group)
            elif rank == target:
                dist.recv(byte, source, group=group)


@dataclass(slots=True)
class _Arrival:
    """A message as far as it was asked for: (box, its content, what to wait for)."""

    parts: list[tuple[Box, Tensor, Work | None]] = field(default_factory=list)


class Mailbox:
    """The messages of this rank during one run through the schedule.

    incoming: what comes from each rank, in the order in which it is sent there.
    """

    def __init__(self, mesh: Mesh, channels: Channels, incoming: Mapping[int, Iterable[Transfer]]) -> None:
        self._mesh = mesh
        self._rank = mesh.everyone.rank
        self._channels = channels
        self._incoming = {source: deque(transfers) for source, transfers in incoming.items()}
        self._missing: dict[tuple[Message, int], int] = {}
        for source, transfers in self._incoming.items():
            for message, _ in transfers:
                self._missing[message, source] = self._missing.get((message, source), 0) + 1
        self._arrivals: dict[Message, _Arrival] = {}
        self._sent: dict[Message, list[tuple[Work, Tensor]]] = {}
        self._num_messages: dict[tuple[int, int], int] = {}

    def expect(self, message: Message) -> None:
        """Ask for all messages of a message, and for those that its senders send before."""
        for source in {message_slice.source for message_slice in message.slices if message_slice.target == self._rank}:
            while self._missing.get((message, source), 0):
                self._ask(*self._incoming[source].popleft())

    def receive(self, message: Message) -> Tensor:
        """This rank's part of the tensor; waits for it."""
        self.expect(message)
        shape = message.spec.local_shape(self._mesh)
        parts = self._arrivals.pop(message).parts
        for _, _, work in parts:
            if work is not None:
                work.wait()
        if len(parts) == 1 and parts[0][1].shape == shape:
            return parts[0][1]
        whole = torch.empty(shape, dtype=message.edge.dtype, device=self._mesh.device)
        for box, content, _ in parts:
            whole[box] = content
        return whole

    def send(self, message: Message, x: Tensor) -> None:
        """This rank's boxes of its part x to whoever needs them; does not wait.

        Raises ValueError if x has another shape than the stage's table says.
        """
        expected = message.local_spec.local_shape(self._mesh)
        if x.shape != expected:
            edge = message.edge
            shape = tuple(x.shape)
            raise ValueError(f"stage {edge.source} sends {edge.name!r} of shape {shape}, SENDS says {expected}")
        x = x.detach().to(message.edge.dtype)
        for message_slice in message.slices:
            if message_slice.source != self._rank:
                continue
            content = x[message_slice.source_box].contiguous()  # as a program takes what its stage receives
            if message_slice.target == self._rank:
                self._arrivals.setdefault(message, _Arrival()).parts.append((message_slice.target_box, content, None))
                continue
            group, tag = self._channels.group(message_slice), self._tag(message_slice)
            work = dist.isend(as_sent(content), message_slice.target, group=group, tag=tag)
            assert work is not None
            self._sent.setdefault(message, []).append((work, content))

    def release(self, message: Message) -> None:
        """Wait until what was sent has left; what it held is freed."""
        for work, _ in self._sent.pop(message, ()):
            work.wait()

    def release_finished(self) -> None:
        """Free what has left, without waiting. (gloo does not tell, so that nothing is freed there.)"""
        for message in [p for p, sent in self._sent.items() if all(_is_over(work) for work, _ in sent)]:
            del self._sent[message]

    def finish(self) -> None:
        """Wait for all that was sent."""
        for message in list(self._sent):
            self.release(message)
        assert not any(self._incoming.values()), "messages are left over"

    def _ask(self, message: Message, message_slice: MessageSlice) -> None:
        sizes = [part.stop - part.start for part in message_slice.target_box]
        content = torch.empty(sizes, dtype=message.edge.dtype, device=self._mesh.device)
        group, tag = self._channels.group(message_slice), self._tag(message_slice)
        work = dist.irecv(as_sent(content), message_slice.source, group=group, tag=tag)
        self._arrivals.setdefault(message, _Arrival()).parts.append((message_slice.target_box, content, work))
        self._missing[message, message_slice.source] -= 1

    def _tag(self, message_slice: MessageSlice) -> int:
        """The number of the message between these ranks in this direction: the same on both sides."""
        key = (message_slice.source, message_slice.target)
        self._num_messages[key] = self._num_messages.get(key, -1) + 1
        return self._num_messages[key]


def _is_over(work: Work) -> bool:
    asked = getattr(work, "is_completed", None)
    return bool(asked()) if asked is not None else False
