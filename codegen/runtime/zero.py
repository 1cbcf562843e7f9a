"""ZeRO in one training step: when gradients are reduced, and parameters brought to all ranks.

Parameters stay whole between uses here (stages 0 to 2); of stage 3 see `ShardedUnits`. Buckets span layers and hold
`BUCKET_BYTES` or a little more. Collectives start in the order in which gradients arrive. That is the same on all ranks
because all run the same graph. Buckets that got none, or not all, are reduced at the end, in a fixed order, with zeros.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import collectives
from .collectives import Work
from .flat import Bucket, Entry, Key, key_of
from .mesh import Mesh
from .parameters import Module, Slot

BUCKET_BYTES = 25 * 2**20
"""Size from which latency no longer matters, as in DistributedDataParallel."""
_MAX_IN_FLIGHT = 2
"""Reduce-scatters whose whole gradients are still held; more would only cost memory."""


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction under way. line: keeps the sent buffer alive (None: it is free already). partial: to be added to the
    bucket's gradient."""

    bucket: Bucket
    work: Work | None
    line: Tensor | None
    partial: Tensor | None

    def finish(self) -> None:
        if self.work is not None:
            self.work.wait()
        if self.partial is not None:
            self.bucket.gradient.add_(self.partial)


class ZeroUnits:
    """All parameters of a module tree, allocated as their ZeRO stages say (0 to 2).

    compute_dtype: of floating-point parameters as the program uses them (masters and gradients stay fp32); None: their
    own.
    num_micro_batches: with one, stage 1 works as stage 2, which needs no more communication and less memory.
    alone: names of parameters that get buckets of their own, because their gradients are summed with other stages'.

    Under a pipeline forwards and backwards of several micro-batches alternate, each between a begin and an end. In a
    split step (`begin_deferring_step`) gradients of different micro-batches also arrive in turn: all are added up from
    zero, and reduced in `end` only.
    """

    grow: Callable[[Sequence[Slot]], None] | None = None
    """Makes room for parameters that are new or untrained."""

    def __init__(
        self,
        model: Module,
        mesh: Mesh,
        compute_dtype: torch.dtype | None = None,
        num_micro_batches: int = 1,
        alone: Collection[str] = (),
    ) -> None:
        self.mesh, self.compute_dtype, self.num_micro_batches = mesh, compute_dtype, num_micro_batches
        self.models = [model]  # of all programs that use the parameters
        self._in_flight: deque[_Reduction] = deque()
        self._accumulate = False
        self._is_last = True
        self._defers = False
        self.buckets = [self.new_bucket(slots) for slots in self._groups(model.slots(), alone)]
        self._trainable = [bucket for bucket in self.buckets if bucket.key.requires_grad]
        self._tell_of_gradients(self.buckets)

    def new_bucket(self, slots: Sequence[Slot]) -> Bucket:
        """Return a bucket of parameters of one key. Raises ValueError for stage 3."""
        key = key_of(slots[0].spec, self.mesh)
        if key.stage == 3:
            raise ValueError(f"{slots[0].name} has zero=3: make the step with units=ShardedUnits")
        return Bucket(key, slots, self.mesh, self.compute_dtype, self._keeps_whole_gradient(key))

    def _keeps_whole_gradient(self, key: Key) -> bool:
        return key.stage == 0 or (key.stage == 1 and self.num_micro_batches > 1)

    def _groups(self, slots: Iterable[Slot], alone: Collection[str]) -> Iterator[list[Slot]]:
        """Yield the parameters of each bucket."""
        by_key: dict[Any, list[Slot]] = {}
        for slot in slots:
            apart = slot.name if slot.name in alone else ""
            by_key.setdefault((*self._bucket_of(slot), apart), []).append(slot)
        for members in by_key.values():
            yield from self._cut(members)

    def _bucket_of(self, slot: Slot) -> tuple[Any, ...]:
        """Return what parameters of one bucket have in common."""
        return (key_of(slot.spec, self.mesh),)

    def _cut(self, members: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Cut parameters at BUCKET_BYTES: layers together, from the last to the first as gradients arrive, then the
        root's (its embedding's gradient is the last of all).

        On gloo smaller buckets, which hide more of the communication, were measured to cost more than they hide where
        every core is busy.
        """
        group: list[Slot] = []
        num_bytes = 0
        for slot in sorted(members, key=lambda slot: -slot.unit):
            group.append(slot)
            num_bytes += math.prod(slot.spec.local_shape(self.mesh)) * max(4, slot.spec.dtype.itemsize)
            if num_bytes >= BUCKET_BYTES:
                yield group
                group, num_bytes = [], 0
        if group:
            yield group

    def entries(self) -> dict[str, tuple[Bucket, Entry]]:
        """Return all parameters by name."""
        return {entry.slot.name: (bucket, entry) for bucket in self.buckets for entry in bucket.entries}

    def share(self, model: Module) -> None:
        """Put these parameters in the places of another program's model (`sharing.py`)."""
        entries = self.entries()
        for slot in model.slots():
            for owner, attribute in slot.places:
                owner._parameters[attribute] = entries[slot.name][1].used
        self.models.append(model)

    def exchange(self, old: Collection[Bucket], new: Sequence[Bucket]) -> None:
        """Take new buckets in the places of old ones, none of which is gathered for a layer, in all programs."""
        self.buckets[:] = [*(bucket for bucket in self.buckets if bucket not in old), *new]
        self._trainable += [bucket for bucket in new if bucket.key.requires_grad]
        used = {entry.slot.name: entry.used for bucket in new for entry in bucket.entries}
        for model in self.models:
            for slot in model.slots():
                for owner, attribute in slot.places if slot.name in used else ():
                    owner._parameters[attribute] = used[slot.name]
        self._tell_of_gradients(new)

    def _tell_of_gradients(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for index, entry in enumerate(bucket.entries if bucket.key.requires_grad else ()):
                leaf: Any = entry.used
                leaf.register_post_accumulate_grad_hook(_gradient_hook(self, bucket, index))

    # Calls of the executor, for each micro-batch ----------------------------------------------------------------------

    def begin(self, accumulate: bool, is_last: bool) -> None:
        """Prepare a forward. accumulate: add to the present gradients. is_last: of the step's micro-batches."""
        self._expect(accumulate, is_last)

    def begin_backward(self, accumulate: bool, is_last: bool) -> None:
        """Prepares a backward that does not follow its forward directly (which ended with has_backward=False)."""
        self._expect(accumulate, is_last)

    def begin_deferring_step(self) -> None:
        """Prepares a step in which backwards come in parts: gradients start from zero."""
        self._defers = True
        for bucket in self._trainable:
            bucket.gradient.zero_()
            if bucket.whole_gradient is not None:
                bucket.whole_gradient.zero_()

    def begin_deferred(self, is_last: bool) -> None:
        """Prepares the rest of a backward, which needs no parameters. Its `end` reduces all gradients there are."""
        self._expect(accumulate=True, is_last=is_last)

    def _expect(self, accumulate: bool, is_last: bool) -> None:
        self._accumulate, self._is_last = accumulate or self._defers, is_last
        for bucket in self._trainable:
            bucket.expect_gradients()

    def end(self, has_backward: bool = True) -> None:
        """End the backward, or a forward without one. After the last micro-batch all gradients are reduced."""
        if has_backward:
            for bucket in self._trainable:
                if not bucket.is_complete:
                    self._reduce(bucket)
            while self._in_flight:
                self._in_flight.popleft().finish()
            if self._is_last:
                self._reduce_over_others()

    def abandon(self) -> None:
        """Forget gradients and reductions of a backward that was cut short."""
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.abandon()

    def publish(self, is_copied: bool = False) -> None:
        """Copy changed masters to the parameters that are kept whole. is_copied: as in `start_publish`."""
        works = [bucket.start_publish(is_copied) for bucket in self.buckets]
        for work in works:
            if work is not None:
                work.wait()

    def _reduce(self, bucket: Bucket) -> None:
        line = bucket.collect(self._accumulate)
        if bucket.axis.size == 1:
            if self._is_last and bucket.others.size > 1:
                work = collectives.all_reduce(line, bucket.others.group, async_op=True)
                self._in_flight.append(_Reduction(bucket, work, line, None))
            return
        is_whole = bucket.whole_gradient is not None
        if is_whole and not self._is_last:
            return
        holds_more = not is_whole or bucket.rounds_gradients
        while len(self._in_flight) >= _MAX_IN_FLIGHT and holds_more:
            self._in_flight.popleft().finish()
        adds = self._accumulate and not is_whole
        target = torch.empty_like(bucket.gradient) if adds else bucket.gradient
        work, line_held = bucket.start_reduce(target, line), None if bucket.rounds_gradients else line
        self._in_flight.append(_Reduction(bucket, work, line_held, target if adds else None))

    def _reduce_over_others(self) -> None:
        """Once per step: sums of sums over the ZeRO axis, over the other axes with partial gradients."""
        works = [
            collectives.all_reduce(bucket.gradient, bucket.others.group, async_op=True)
            for bucket in self._trainable
            if bucket.axis.size > 1 and bucket.others.size > 1
        ]
        for work in works:
            if work is not None:
                work.wait()

    # Hooks ------------------------------------------------------------------------------------------------------------

    def _gradient_arrived(self, bucket: Bucket, index: int) -> None:
        # In a split step the last to arrive may be another micro-batch's.
        if bucket.count_gradient(index, self._accumulate) and not self._defers:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Reduce a bucket all of whose gradients are there."""
        self._reduce(bucket)


def _gradient_hook(zero: ZeroUnits, bucket: Bucket, index: int) -> Callable[[Tensor], None]:
    """Return the hook that a leaf calls when its gradient has arrived.

    It holds what it tells of it weakly: torch keeps a leaf's hooks where Python's collector of cycles does not look, so
    a hook that held the leaf's bucket would keep all buffers as long as the process lives.
    """
    its_zero, its_bucket = weakref.ref(zero), weakref.ref(bucket)

    def hook(leaf: Tensor) -> None:
        told, filled = its_zero(), its_bucket()
        # torch also tells of a gradient that was deferred, which there is none of yet.
        if leaf.grad is not None and told is not None and filled is not None:
            told._gradient_arrived(filled, index)

    return hook
