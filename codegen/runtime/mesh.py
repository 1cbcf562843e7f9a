"""The device mesh of a generated program: named axes over the ranks, and the reshards as methods of an axis."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from . import collectives, reshard
from .collectives import Group, Work
from .heap import keep_freed_memory

AXIS_NAMES = ("pp", "ddp", "dp", "cp", "ep", "ttp", "tp")
"""Axes that a program may name although its mesh lacks them; they then have one rank."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One mesh axis as this rank sees it: `rank` of `size`, and the process group of the ranks that differ in it only.

    The methods of the first half change a tensor's placement on this axis, forward and backward (`reshard.py`); with
    one rank they return their argument. Negative dims count from the end. `sections` k: the dim is k equal sections,
    each split over the ranks. The second half is plain communication without gradients.

    wait=False: returns at once, and nothing may read the result before `Mesh.finish`. For sums that are only wanted at
    the end: a rank that is ahead need not wait for the others in mid-step.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: Group = field(default=None, repr=False, compare=False)
    unfinished: list[Work] = field(default_factory=list, repr=False, compare=False)
    """Collectives that were started with wait=False."""
    symmetric: str = field(default="", repr=False, compare=False)
    """The group's name where the ranks share memory to multiply with (`symmetric_memory.py`)."""

    def all_gather(
        self, x: Tensor, dim: int, sections: int = 1, grad: Literal["partial", "full"] = "partial"
    ) -> Tensor:
        """S -> Rp (backward: reduce_scatter); with grad="full" S -> R (backward: slice)."""
        if self.size == 1:
            return x
        function = reshard.AllGather if grad == "partial" else reshard.AllGatherFull
        return _apply(function, x, dim % x.ndim, sections, self)

    def reduce_scatter(self, x: Tensor, dim: int, sections: int = 1) -> Tensor:
        """Reshards P -> S (backward: all_gather)."""
        return x if self.size == 1 else _apply(reshard.ReduceScatter, x, dim % x.ndim, sections, self)

    def all_reduce(self, x: Tensor, grad: Literal["partial", "full"] = "full", wait: bool = True) -> Tensor:
        """P -> R (backward: nothing); with grad="partial" P -> Rp (backward: all_reduce, and always waited for)."""
        if self.size == 1:
            return x
        if grad == "partial":
            return _apply(reshard.AllReducePartial, x, self)
        return _apply(reshard.AllReduce, x, self if wait else _Later(self))

    def for_use(self, x: Tensor) -> Tensor:
        """Reshards R -> Rp: nothing forward, all_reduce backward."""
        return x if self.size == 1 else _apply(reshard.ForUse, x, self)

    def slice(self, x: Tensor, dim: int, sections: int = 1, grad: Literal["partial", "full"] = "full") -> Tensor:
        """R -> S (backward: all_gather); with grad="partial" Rp -> S (backward: zeros around)."""
        if self.size == 1:
            return x
        function = reshard.SlicePartial if grad == "partial" else reshard.Slice
        return _apply(function, x, dim % x.ndim, sections, self)

    def first_rank_only(self, x: Tensor, grad: Literal["partial", "full"] = "full") -> Tensor:
        """R -> P: zeros on all ranks but the first (backward: nothing; with grad="partial", Rp -> P: the same)."""
        if self.size == 1:
            return x
        function = reshard.FirstRankOnlyPartial if grad == "partial" else reshard.FirstRankOnly
        return _apply(function, x, self)

    def first_rank_grad(self, x: Tensor) -> Tensor:
        """Rp -> R: nothing forward; backward the gradient stays on the first rank, zeros elsewhere."""
        return x if self.size == 1 else _apply(reshard.FirstRankGrad, x, self)

    def all_to_all(
        self, x: Tensor, split_dim: int, concat_dim: int, split_sections: int = 1, concat_sections: int = 1
    ) -> Tensor:
        """Reshards S(concat_dim) -> S(split_dim) (backward: the reverse)."""
        if self.size == 1:
            return x
        split, concat = (split_dim % x.ndim, split_sections), (concat_dim % x.ndim, concat_sections)
        return _apply(reshard.AllToAll, x, split, concat, self)

    def sum_over(self, x: Tensor, wait: bool = True) -> Tensor:
        """The sum over the ranks, a new tensor. No gradient."""
        return self._reduced(x, largest=False, wait=wait)

    def max_over(self, x: Tensor) -> Tensor:
        """The elementwise maximum over the ranks, a new tensor. No gradient."""
        return self._reduced(x, largest=True)

    def _reduced(self, x: Tensor, largest: bool, wait: bool = True) -> Tensor:
        if self.size == 1:
            return x.detach()
        result = _copy(x)
        work = collectives.all_reduce(result, self.group, async_op=not wait, largest=largest)
        if work is not None:
            self.unfinished.append(work)
        return result

    def gather_parts(self, part: Tensor) -> Tensor:
        """[*part] -> [n, *part]: every rank's part, in rank order. No gradient."""
        result = part.new_empty((self.size, *part.shape))
        collectives.all_gather(result, part.detach().contiguous(), self.group)
        return result

    def scatter_sum(self, parts: Tensor) -> Tensor:
        """[n, *part] -> [*part]: the sum over ranks of their parts[this rank]. No gradient."""
        result = parts.new_empty(parts.shape[1:])
        collectives.reduce_scatter(result, parts.detach().contiguous(), self.group)
        return result

    def exchange_parts(self, parts: Tensor) -> Tensor:
        """[n, *part] -> [n, *part]: result[i] is rank i's parts[this rank]. No gradient."""
        sent = parts.detach().contiguous()
        result = torch.empty_like(sent)
        collectives.all_to_all(result, sent, self.group)
        return result

    def exchange_rows(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """[sum(sent), ...] -> [sum(received), ...]: the first sent[0] rows go to rank 0 and so on, and those that come
        are in rank order. No gradient."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        collectives.all_to_all_rows(result, rows.detach().contiguous(), received, sent, self.group)
        return result

    def start_sum(self, x: Tensor) -> Arrival:
        """Starts `sum_over`; x may be read meanwhile."""
        result = _copy(x)
        return Arrival(result, result, _works(collectives.all_reduce(result, self.group, async_op=True)))

    def start_scatter_sum(self, parts: Tensor) -> Arrival:
        """Starts `scatter_sum`; the parts may be read meanwhile."""
        sent = parts.detach().contiguous()
        result = parts.new_empty(parts.shape[1:])
        return Arrival(result, sent, _works(collectives.reduce_scatter(result, sent, self.group, async_op=True)))

    def pass_on(self, part: Tensor, hops: int = 1) -> Arrival:
        """Starts to send `part` to the rank so many further on; what the one as far back sends is on its way. No
        gradient."""
        sent = part.detach().contiguous()
        received = torch.empty_like(sent)
        return Arrival(received, sent, collectives.pass_on(received, sent, self.rank, self.group, hops))


@dataclass(frozen=True, slots=True)
class Arrival:
    """A tensor on its way from other ranks, and one to them; `sent` must live until it has left."""

    received: Tensor
    sent: Tensor
    works: list[Work]

    def wait(self) -> Tensor:
        """Wait for both messages, and return the received tensor."""
        for work in self.works:
            work.wait()
        return self.received


def _copy(x: Tensor) -> Tensor:
    """A copy for sums in place: the argument may be saved for a backward, or be the gradient of several values."""
    return x.detach().clone(memory_format=torch.contiguous_format)


def _works(work: Work | None) -> list[Work]:
    return [] if work is None else [work]


@dataclass(frozen=True, slots=True)
class _Later:
    """An axis whose sums are not waited for."""

    axis: Axis

    def sum_over(self, x: Tensor) -> Tensor:
        return self.axis.sum_over(x, wait=False)


def _apply(function: Any, *args: object) -> Tensor:
    """`function.apply`, which torch leaves untyped."""
    result: Tensor = function.apply(*args)
    return result


class Mesh:
    """Named axes over all ranks, row-major: the last axis joins neighboring ranks.

    `mesh.dp` is the Axis of that name; one that the mesh lacks has a single rank. `world` is the axis of all ranks of
    the mesh. Under a pipeline a mesh is one pipeline rank's: `everyone` is the axis of all processes, and the mesh is
    the consecutive ones from `first_rank` on.
    """

    def __init__(
        self,
        axes: tuple[Axis, ...],
        world: Axis,
        device: torch.device,
        *,
        everyone: Axis | None = None,
        first_rank: int = 0,
        timeout: timedelta | None = None,
    ) -> None:
        self.axes = axes
        self.world = world
        self.everyone = everyone or world
        self.first_rank = first_rank
        self.timeout = timeout
        self.rank = world.rank
        self.world_size = world.size
        self.device = device
        self._joint: dict[tuple[str, ...], Axis] = {}
        for name in AXIS_NAMES:
            setattr(self, name, Axis(name))
        for axis in axes:
            setattr(self, axis.name, axis)

    def __getattr__(self, name: str) -> Axis:
        raise AttributeError(f"the mesh {self} has no axis {name!r}; known names are {', '.join(AXIS_NAMES)}")

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}{axis.size}" for axis in self.__dict__.get("axes", ())) or "single"

    @classmethod
    def create(cls, axes: tuple[str, ...], sizes: tuple[int, ...], device: torch.device | str = "cpu") -> Mesh:
        """The mesh over all ranks of the default process group, which must be up if there is more than one rank.

        device: "cpu", or this rank's GPU ("cuda" means the current one). Raises ValueError if the sizes do not
        multiply to the number of processes. Every rank must call it, with equal axes and sizes.
        """
        needed, running = math.prod(sizes), _everyone().size
        if needed != running:
            shape = " x ".join(f"{name}{size}" for name, size in zip(axes, sizes, strict=True)) or "single"
            raise ValueError(
                f"the program's mesh {shape} needs {needed} processes, but {running} run: start it with "
                f"torchrun --nproc-per-node (times --nnodes) = {needed}, or plan for {running} devices"
            )
        mesh = cls.over(axes, sizes, device, timeout=timeout_of_all())
        assert mesh is not None
        return mesh

    @classmethod
    def over(
        cls,
        axes: tuple[str, ...],
        sizes: tuple[int, ...],
        device: torch.device | str,
        *,
        timeout: timedelta | None,
        first_rank: int = 0,
        joints: Collection[tuple[str, ...]] = (),
    ) -> Mesh | None:
        """The mesh over consecutive processes from first_rank on; None in a process outside of it.

        timeout: of its collectives. joints: what `joint` may be asked for. Every process must call it with equal
        arguments, since torch wants all groups made by all.
        """
        device, everyone = _checked(axes, sizes, device), _everyone()
        if device.type == "cpu":
            keep_freed_memory()
        wanted = [axes, *((name,) for name in axes), *joints]
        keys = dict.fromkeys(_sizable(axes, sizes, names) for names in wanted)
        axis_of_names = {key: _axis_of(axes, sizes, key, first_rank, everyone, timeout) for key in keys}
        if not first_rank <= everyone.rank < first_rank + math.prod(sizes):
            return None
        whole = axis_of_names[_sizable(axes, sizes, axes)]
        world = Axis("world", whole.size, whole.rank, whole.group)
        built = tuple(axis_of_names[name,] if (name,) in axis_of_names else Axis(name) for name in axes)
        mesh = cls(built, world, device, everyone=everyone, first_rank=first_rank, timeout=timeout)
        mesh._joint.update({key: axis for key, axis in axis_of_names.items() if len(key) > 1})
        return mesh

    def finish(self) -> None:
        """Wait for what was started with wait=False."""
        for axis in self.axes:
            while axis.unfinished:
                axis.unfinished.pop().wait()

    def abandon(self) -> None:
        """Forget what was started with wait=False, by work that was cut short."""
        for axis in self.axes:
            axis.unfinished.clear()

    def axis(self, name: str) -> Axis:
        """The axis of that name."""
        axis: Axis = getattr(self, name)
        return axis

    def put(self, axis: Axis) -> None:
        """Take this for the axis of its name, which has the same ranks."""
        self.axes = tuple(axis if present.name == axis.name else present for present in self.axes)
        setattr(self, axis.name, axis)

    def joint(self, names: tuple[str, ...]) -> Axis:
        """One axis over all ranks that differ in the named axes only (row-major, in mesh order).

        Makes process groups the first time, so every rank must ask for the same axes in the same order.
        """
        joined = [axis for axis in self.axes if axis.name in names and axis.size > 1]
        if len(joined) <= 1:
            return joined[0] if joined else Axis("+".join(names) or "none")
        key = tuple(axis.name for axis in joined)
        if key not in self._joint:
            self._joint[key] = self._join(joined)
        return self._joint[key]

    def _join(self, joined: list[Axis]) -> Axis:
        size = math.prod(axis.size for axis in joined)
        name = "+".join(axis.name for axis in joined)
        if size == self.world_size:
            return Axis(name, size, self.rank, self.world.group)
        if self.world_size < self.everyone.size:
            raise ValueError(f"the axis {name} of a pipeline rank's mesh must be asked for when the mesh is made")
        axes, sizes = tuple(axis.name for axis in self.axes), tuple(axis.size for axis in self.axes)
        return _axis_of(axes, sizes, tuple(axis.name for axis in joined), 0, self.everyone, self.timeout)


def _sizable(axes: Sequence[str], sizes: Sequence[int], names: Collection[str]) -> tuple[str, ...]:
    """The named axes with more than one rank, in mesh order."""
    return tuple(name for name, size in zip(axes, sizes, strict=True) if name in names and size > 1)


def _axis_of(
    axes: Sequence[str],
    sizes: Sequence[int],
    names: tuple[str, ...],
    first_rank: int,
    everyone: Axis,
    timeout: timedelta | None,
) -> Axis:
    """The axis over the named axes of a mesh from first_rank on, as this process sees it (one rank if it is outside).

    Every process makes every group, as torch requires, and keeps its own.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for size in sizes)), first_rank):
        outside = tuple(i for i, name in zip(place, axes, strict=True) if name not in names)
        members.setdefault(outside, []).append(rank)
    axis_found = Axis("+".join(names) or "none")
    for ranks in members.values():
        if len(ranks) == 1:
            continue
        group = everyone.group if len(ranks) == everyone.size else dist.new_group(ranks, timeout=timeout)
        if everyone.rank in ranks:
            axis_found = Axis(axis_found.name, len(ranks), ranks.index(everyone.rank), group)
    return axis_found


def _checked(axes: tuple[str, ...], sizes: tuple[int, ...], device: torch.device | str) -> torch.device:
    if len(axes) != len(sizes) or len(set(axes)) != len(axes):
        raise ValueError(f"axes {axes} and sizes {sizes} must pair up without repetition")
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def _everyone() -> Axis:
    """The axis of all processes."""
    if dist.is_available() and dist.is_initialized():
        return Axis("everyone", dist.get_world_size(), dist.get_rank(), dist.group.WORLD)
    return Axis("everyone")


def timeout_of_all() -> timedelta | None:
    """Return how long the default process group waits in a collective. Groups that are made of it would take torch's
    default, whatever it was made with."""
    if _everyone().size == 1:
        return None
    group: Any = dist.group.WORLD
    backends = (group._get_backend(device) for device in group._device_types)
    timeouts = [backend.options._timeout for backend in backends if hasattr(backend, "_set_default_timeout")]
    return max(timeouts, default=None)
