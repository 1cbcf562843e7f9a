"""Updates of whole parameters, each on one rank, for optimizers whose update of a tensor depends on all of it.

Every parameter that needs it has an owner among the ranks of the mesh, whatever they store: copies, shards of tp or ep,
flat slices of ZeRO. Before the optimizer steps, the owner gets value and gradient in the user's own shape, without
padding, from the nearest ranks that store parts of them; it alone holds the optimizer's state. Afterwards these get
their parts of the new value, and hand them on to all that store copies. An owner that stores the parameter whole
updates it where it lies, and gets nothing. So each matrix is updated once, by one rank, and work and state are
balanced.

Between steps an owner holds no whole value of what it stores in part: masters, which checkpoints and scripts read and
write, are the only truth. Parts move by one all_to_all per round and direction, copies by a broadcast per parameter and
axis, all within a mesh: copies of a tied parameter on several stages have an owner each.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import collectives
from .boxes import pieces_of
from .flat import Bucket, Entry, NotHere
from .mesh import Axis, Mesh
from .parameters import shards
from .stage_module import Part

ROUND_BYTES = 64 * 2**20
"""Bytes of the parameters that are exchanged at a time, about: more takes more memory, less more messages."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a whole tensor."""


@dataclass(frozen=True, slots=True, eq=False)
class _Owned:
    """A parameter that its owner updates.

    whole: on the owner, what the optimizer has of it; elsewhere None. is_stored: that is what the owner stores. values,
    gradients: what this rank stores, in boxes. sources: the ranks that the owner gets them from. copies: for each axis
    whose ranks store the same, where the owner is on it. boxes: on the owner, those of every rank.
    """

    entry: Entry
    dtype: torch.dtype
    owner: int
    whole: nn.Parameter | None
    is_stored: bool
    values: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    sources: frozenset[int]
    copies: Mapping[str, int]
    boxes: tuple[tuple[Box, ...], ...]

    def parts(self, whole: Tensor, rank: int) -> list[Tensor]:
        """Return the parts of a whole tensor that a rank stores (views)."""
        return [_part(whole, *box) for box in self.boxes[rank]]


class WholeUpdates:
    """Those of one rank. names: of the parameters, of which any name will do. Every rank of the mesh makes it alike."""

    def __init__(self, parts: Sequence[Part], mesh: Mesh, names: Collection[str]) -> None:
        self._mesh = mesh
        trained = [
            (bucket, entry)
            for part in parts
            for bucket, entry in part.entries()
            if bucket.key.requires_grad and any(name in names for name in part.names(entry.slot))
        ]
        seen = [_seen_by(mesh, rank) for rank in range(mesh.world_size)]
        owners = _owners(trained, seen)
        owned = [
            _owned(bucket, entry, at, seen, mesh.rank) for (bucket, entry), at in zip(trained, owners, strict=True)
        ]
        self._rounds = list(_rounds([parameter for parameter in owned if not parameter.is_stored]))
        self._by_leaf = {id(parameter.entry.used): parameter for parameter in owned}
        self._taken = [parameter for parameter in owned if parameter.whole is not None and not parameter.is_stored]
        self._put_away()

    def updated(self, entry: Entry) -> nn.Parameter | None:
        """Return this rank's part of a parameter in its optimizer: nothing or all of one that is updated whole."""
        owned = self._by_leaf.get(id(entry.used))
        return entry.stored if owned is None else owned.whole

    @property
    def owned(self) -> list[str]:
        """Names of the parameters that this rank updates whole."""
        return [parameter.entry.slot.name for parameter in self._by_leaf.values() if parameter.whole is not None]

    @torch.no_grad()
    def gather(self) -> None:
        """Brings values and gradients to their owners; the optimizer may step then. Collective."""
        for parameter in self._taken:
            assert parameter.whole is not None
            parameter.whole.data = parameter.whole.new_empty(parameter.entry.slot.spec.shape)
            parameter.whole.grad = torch.empty_like(parameter.whole)
        for owned in self._rounds:
            self._exchange(owned, is_back=False)

    @torch.no_grad()
    def send_back(self) -> None:
        """Brings new values from their owners to all that store parts of them. Collective."""
        for owned in self._rounds:
            self._exchange(owned, is_back=True)
        for axis in self._mesh.axes:
            self._hand_on(axis)
        self._put_away()

    def attach(self) -> None:
        """Lets scripts find what says that gradients of taken parameters are not here."""
        for parameter in self._taken:
            assert parameter.whole is not None
            parameter.whole.grad = parameter.whole.detach().as_subclass(NotHere)

    def _put_away(self) -> None:
        """Frees whole values; what is read there before the next step is nan."""
        for parameter in self._taken:
            assert parameter.whole is not None
            parameter.whole.data = parameter.whole.new_full((), math.nan).expand(parameter.entry.slot.spec.shape)
        self.attach()

    def _exchange(self, owned: Sequence[_Owned], is_back: bool) -> None:
        """One all_to_all of parts: values and gradients to owners, or new values from them (is_back)."""
        this_rank, ranks = self._mesh.rank, range(self._mesh.world_size)
        wholes: list[list[Tensor]] = [[] for _ in ranks]
        parts: list[list[Tensor]] = [[] for _ in ranks]
        for parameter in owned:
            if this_rank in parameter.sources:
                parts[parameter.owner] += parameter.values if is_back else (*parameter.values, *parameter.gradients)
            if parameter.whole is not None:
                gradient = [] if is_back or parameter.whole.grad is None else [parameter.whole.grad]
                for rank in parameter.sources:
                    wholes[rank] += [
                        part for whole in (parameter.whole, *gradient) for part in parameter.parts(whole, rank)
                    ]
        sent, received = (wholes, parts) if is_back else (parts, wholes)
        _all_to_all(sent, received, self._mesh, owned[0].dtype)

    def _hand_on(self, axis: Axis) -> None:
        """Brings what the owners' places on an axis have to all on it that store the same. Collective.

        One axis after the other: where a place has old values yet, it and its like get them again later.
        """
        works = [
            collectives.broadcast(parameter.entry.stored.detach().view(-1), parameter.copies[axis.name], axis.group)
            for parameter in self._by_leaf.values()
            if axis.name in parameter.copies and parameter.entry.stored is not None
        ]
        for work in works:
            if work is not None:
                work.wait()


def _all_to_all(sent: list[list[Tensor]], received: list[list[Tensor]], mesh: Mesh, dtype: torch.dtype) -> None:
    """Fills `received[r]` with what rank r has in its `sent[this rank]`, tensor by tensor."""
    leaving, arriving = ([sum(x.numel() for x in tensors) for tensors in side] for side in (sent, received))
    line = torch.empty(sum(leaving), dtype=dtype, device=mesh.device)
    result = torch.empty(sum(arriving), dtype=dtype, device=mesh.device)
    _copy(_cut(line, sent), [x for tensors in sent for x in tensors])
    collectives.all_to_all_rows(result, line, arriving, leaving, mesh.world.group)
    _copy([x for tensors in received for x in tensors], _cut(result, received))


def _cut(line: Tensor, like: list[list[Tensor]]) -> list[Tensor]:
    flat = [x for group in like for x in group]
    parts = torch.split(line, [x.numel() for x in flat])
    return [part.view(x.shape) for part, x in zip(parts, flat, strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _part(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(dim, at, size)
    return whole


# Who has what ---------------------------------------------------------------------------------------------------------


def _seen_by(mesh: Mesh, rank: int) -> Mesh:
    """The mesh as its rank of that number sees it, without process groups."""
    left, axes = rank, list[Axis]()
    for axis in reversed(mesh.axes):
        left, place = divmod(left, axis.size)
        axes.insert(0, Axis(axis.name, axis.size, place))
    return Mesh(tuple(axes), Axis("world", mesh.world_size, rank), torch.device("cpu"))


def _range(bucket: Bucket, entry: Entry, seen: Mesh) -> tuple[int, int]:
    """Return the elements of its flattened part of a parameter that a rank stores, as `Entry.lo` and `Entry.hi`."""
    index = 0
    for axis in seen.axes:
        if axis.name in bucket.key.zero_axes:
            index = index * axis.size + axis.rank
    first = index * bucket.shard_numel - entry.start
    return min(max(first, 0), entry.numel), min(max(first + bucket.shard_numel, 0), entry.numel)


def _cutting_axes(bucket: Bucket, entry: Entry, mesh: Mesh) -> set[str]:
    """The axes whose ranks store other parts; those that differ in other axes only store the same."""
    return {*bucket.key.zero_axes, *(axis for axis, *_ in shards(entry.slot.spec.placements, mesh))}


def _owners(trained: Sequence[tuple[Bucket, Entry]], seen: Sequence[Mesh]) -> list[int]:
    """The rank that updates each: the largest first, each to the rank with the fewest elements so far.

    Of ranks with equally many it is the one that stores the most of the parameter. Elements count, since state has as
    many, and matrices of a model are mostly alike in what an update takes per element.
    """
    loads, owners = [0] * len(seen), [0] * len(trained)
    order = sorted(range(len(trained)), key=lambda index: -math.prod(trained[index][1].slot.spec.shape))
    for index in order:
        bucket, entry = trained[index]
        least = min(loads)
        stored = {
            rank: hi - lo
            for rank, mesh in enumerate(seen)
            for lo, hi in (_range(bucket, entry, mesh),)
            if loads[rank] == least
        }
        owners[index] = max(stored, key=lambda rank: (stored[rank], -rank))
        loads[owners[index]] += math.prod(entry.slot.spec.shape)
    return owners


def _owned(bucket: Bucket, entry: Entry, owner: int, seen: Sequence[Mesh], this_rank: int) -> _Owned:
    spec, cutting = entry.slot.spec, _cutting_axes(bucket, entry, seen[0])
    places = [{axis.name: axis.rank for axis in mesh.axes} for mesh in seen]
    apart = [name for name in places[0] if name not in cutting]
    sources = frozenset(
        rank for rank, place in enumerate(places) if all(place[axis] == places[owner][axis] for axis in apart)
    )
    copies = {
        axis.name: places[owner][axis.name] for axis in seen[this_rank].axes if axis.name in apart and axis.size > 1
    }
    is_all = not spec.padding and entry.shape == spec.shape
    is_stored = is_all and _range(bucket, entry, seen[owner]) == (0, entry.numel)
    if owner != this_rank:
        whole, boxes = None, tuple[tuple[Box, ...], ...]()
    else:
        whole = entry.stored if is_stored else nn.Parameter(bucket.master.new_zeros(()).expand(spec.shape))
        boxes = _boxes(bucket, entry, seen, cutting)
        num_elements = sum(math.prod(sizes) for rank in sources for _, sizes in boxes[rank])
        assert num_elements == math.prod(spec.shape), f"{entry.slot.name}: its parts have {num_elements} elements"
    values, gradients = tuple[Tensor, ...](), tuple[Tensor, ...]()
    if entry.stored is not None:
        line = bucket.gradient.narrow(0, entry.start + entry.lo - bucket.offset, entry.hi - entry.lo)
        stored = entry.stored.detach().view(-1)
        values, gradients = (
            tuple(piece.value for piece in pieces_of(entry.slot.name, spec, seen[this_rank], line_or_stored, entry.lo))
            for line_or_stored in (stored, line)
        )
    return _Owned(
        entry=entry,
        dtype=bucket.master_dtype,
        owner=owner,
        whole=whole,
        is_stored=is_stored,
        values=values,
        gradients=gradients,
        sources=sources,
        copies=copies,
        boxes=boxes,
    )


def _boxes(bucket: Bucket, entry: Entry, seen: Sequence[Mesh], cutting: set[str]) -> tuple[tuple[Box, ...], ...]:
    """Return the boxes of a parameter that every rank stores."""
    boxes_of_place: dict[tuple[int, ...], tuple[Box, ...]] = {}
    boxes = []
    for mesh in seen:
        place = tuple(axis.rank for axis in mesh.axes if axis.name in cutting)
        if place not in boxes_of_place:
            lo, hi = _range(bucket, entry, mesh)
            values = torch.empty(hi - lo, device="meta")
            pieces = pieces_of(entry.slot.name, entry.slot.spec, mesh, values, lo)
            boxes_of_place[place] = tuple((piece.offsets, tuple(piece.value.shape)) for piece in pieces)
        boxes.append(boxes_of_place[place])
    return tuple(boxes)


def _rounds(owned: Sequence[_Owned]) -> Iterator[list[_Owned]]:
    """Parameters of one dtype and of ROUND_BYTES or a little more, of all owners in turn."""
    turns: dict[int, int] = {}
    queues: dict[torch.dtype, list[tuple[int, int, _Owned]]] = {}
    for parameter in owned:
        turn = turns[parameter.owner] = turns.get(parameter.owner, 0) + 1
        queues.setdefault(parameter.dtype, []).append((turn, parameter.owner, parameter))
    for dtype, queue in queues.items():
        round_: list[_Owned] = []
        num_bytes = 0
        for *_, parameter in sorted(queue, key=lambda item: item[:2]):
            round_.append(parameter)
            num_bytes += math.prod(parameter.entry.slot.spec.shape) * dtype.itemsize
            if num_bytes >= ROUND_BYTES:
                yield round_
                round_, num_bytes = [], 0
        if round_:
            yield round_
