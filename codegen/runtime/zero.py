"""ZeRO in one training step: when parameters are gathered and released, and when gradients are reduced.

ZeRO stages 0 to 2 keep the parameters; their buckets span layers and hold `BUCKET_BYTES` or a little more. Under
stage 3 a unit (one layer instance, or the root) has buckets of its own, gathered before the layer runs and freed after
it: in forward by module hooks, in backward by a hook on the layer's outputs and by the arrival of its last gradient.
The next unit is gathered while one computes. Collectives start in the order in which gradients arrive, which is the
same on all ranks because all run the same graph; buckets that got none, or not all, are reduced at the end, in a fixed
order, with zeros.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import collectives
from .collectives import Work
from .flat import Bucket, Entry, Key, key_of
from .mesh import Mesh
from .parameters import Module, Slot
from .sharing import has_gradient, may_share

if TYPE_CHECKING:
    # Only programs that compress or offload have these beside them.
    from .compressed import Compression
    from .host_memory import HostMemory

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


class _Unit:
    """A layer instance with parameters under stage 3. place: in the order of execution, from the first forward."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self.place = -1
        self.is_in_backward = False
        # Frozen weights are needed for the gradients of activations, of which nothing tells the end.
        self.releases_itself = all(bucket.key.requires_grad for bucket in buckets)
        self._num_left = 0

    def expect_gradients(self) -> None:
        self.is_in_backward = False
        self._num_left = len(self.buckets)

    def start_gather(self) -> None:
        for bucket in self.buckets:
            bucket.start_gather()

    def finish_gather(self) -> None:
        for bucket in self.buckets:
            bucket.finish_gather()

    def release(self) -> None:
        for bucket in self.buckets:
            bucket.release()

    def bucket_done(self) -> None:
        self._num_left -= 1
        if self._num_left == 0 and self.releases_itself:
            self.release()


class ZeroUnits:
    """All parameters of a module tree, allocated as their ZeRO stages say.

    compute_dtype: of floating-point parameters as the program uses them (masters and gradients stay fp32); None: their
    own.
    num_micro_batches: with one, stage 1 works as stage 2, which needs no more communication and less memory.
    host: where masters live if the optimizer is offloaded.
    tied: names of parameters that get buckets of their own, because their gradients are summed with other stages'.
    compression: of gathers and reductions over ZeRO axes (`compressed.py`), None for exact ones.

    Under a pipeline forwards and backwards of several micro-batches alternate, each between a begin and an end. In a
    split step (`begin_deferring_step`) gradients of different micro-batches also arrive in turn: all are added up from
    zero, and reduced in `end` only.
    """

    def __init__(
        self,
        model: Module,
        mesh: Mesh,
        compute_dtype: torch.dtype | None = None,
        num_micro_batches: int = 1,
        host: HostMemory | None = None,
        tied: Collection[str] = (),
        compression: Compression | None = None,
    ) -> None:
        self.mesh, self.compute_dtype, self.host, self.compression = mesh, compute_dtype, host, compression
        self.models = [model]  # of all programs that use the parameters
        self.grow: Callable[[Sequence[Slot]], None] | None = None  # makes room for parameters that are new or untrained
        self.buckets: list[Bucket] = []
        self._root_buckets: list[Bucket] = []
        self._units: list[_Unit] = []
        self._order: list[_Unit] = []
        self._in_flight: deque[_Reduction] = deque()
        self._accumulate = False
        self._is_last = True
        self._defers = False
        for unit, slots in _groups(model, mesh, tied):
            key = key_of(slots[0].spec, mesh)
            whole = key.stage == 0 or (key.stage == 1 and num_micro_batches > 1)
            bucket = Bucket(key, slots, mesh, compute_dtype, whole, host, compression)
            self.buckets.append(bucket)
            if key.stage == 3:
                bucket.release()
                if unit == 0:
                    self._root_buckets.append(bucket)
        self._trainable = [bucket for bucket in self.buckets if bucket.key.requires_grad]
        self._owners = self._hook_layers(model)
        self._tell_of_gradients(self.buckets)

    def adopt(self, model: Module) -> None:
        """Put these parameters in the places of another program's model, which has the same ones or fewer: it then
        gathers, uses and trains them. Raises ValueError where its parameters are others, or lie otherwise.

        Under stage 3 the other program's layers may be of other classes. What one of its layers reads is gathered
        before that layer; what its root or several layers read is gathered for the whole step.
        """
        entries, slots = self._entries(), {slot.name: slot for slot in model.slots()}
        if strange := [slot for slot in slots.values() if not has_gradient(slot, entries.get(slot.name))]:
            if self.grow is None:
                names = ", ".join(sorted(slot.name for slot in strange)[:3])
                raise ValueError(f"forward reads or trains parameters that it did not before: {names}")
            self.grow(strange)
            entries = self._entries()
        readers: dict[_Unit, set[int]] = {}
        for name, slot in slots.items():
            bucket, entry = entries[name]
            if not may_share(slot, entry.slot, self.mesh):
                raise ValueError(f"the programs differ in how {name} lies")
            if (unit := self._owners.get(id(bucket))) is not None:
                readers.setdefault(unit, set()).add(slot.unit)
            for owner, attribute in slot.places:
                owner._parameters[attribute] = entry.used
        self.models.append(model)
        modules = model.units()
        for unit, indices in readers.items():
            if len(indices) == 1 and 0 not in indices:
                module = modules[indices.pop()]
                module.register_forward_pre_hook(self._pre_forward_hook(unit))
                module.register_forward_hook(self._forward_hook(unit))
            else:
                held = {id(bucket) for bucket in self._root_buckets}
                self._root_buckets += [bucket for bucket in unit.buckets if id(bucket) not in held]

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

    def _entries(self) -> dict[str, tuple[Bucket, Entry]]:
        return {entry.slot.name: (bucket, entry) for bucket in self.buckets for entry in bucket.entries}

    def _hook_layers(self, model: Module) -> dict[int, _Unit]:
        owners: dict[int, _Unit] = {}
        for index, module in enumerate(model.units()):
            own = [b for b in self.buckets if b.key.stage == 3 and b.entries[0].slot.unit == index]
            if index and own:
                unit = _Unit(own)
                self._units.append(unit)
                owners.update((id(bucket), unit) for bucket in own)
                module.register_forward_pre_hook(self._pre_forward_hook(unit))
                module.register_forward_hook(self._forward_hook(unit))
        return owners

    # Calls of the executor, for each micro-batch ----------------------------------------------------------------------

    def begin(self, accumulate: bool, is_last: bool) -> None:
        """Prepare a forward. accumulate: add to the present gradients. is_last: of the step's micro-batches."""
        self._expect(accumulate, is_last)
        self._gather_root(self._order[0] if self._order else None)

    def begin_backward(self, accumulate: bool, is_last: bool) -> None:
        """Prepares a backward that does not follow its forward directly (which ended with has_backward=False)."""
        self._expect(accumulate, is_last)
        self._gather_root(self._order[-1] if self._order else None)

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
        for unit in self._units:
            unit.expect_gradients()

    def _gather_root(self, first: _Unit | None) -> None:
        for bucket in self._root_buckets:
            bucket.start_gather()
        if first is not None:
            first.start_gather()
        for bucket in self._root_buckets:
            bucket.finish_gather()

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
        for bucket in self.buckets:
            bucket.release()

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
        holds_more = not is_whole or bucket.compresses_reductions
        while len(self._in_flight) >= _MAX_IN_FLIGHT and holds_more:
            self._in_flight.popleft().finish()
        adds = self._accumulate and not is_whole
        target = torch.empty_like(bucket.gradient) if adds else bucket.gradient
        work, held = bucket.start_reduce(target, line), None if bucket.compresses_reductions else line
        self._in_flight.append(_Reduction(bucket, work, held, target if adds else None))

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
            self._reduce(bucket)
            unit = self._owners.get(id(bucket))
            if unit is not None:
                unit.bucket_done()

    def _pre_forward_hook(self, unit: _Unit) -> Callable[[nn.Module, Any], None]:
        def hook(_: nn.Module, __: Any) -> None:
            if unit.place < 0:
                unit.place = len(self._order)
                self._order.append(unit)
            unit.finish_gather()
            # In backward (recomputation) the next layer is done, and must not be gathered again.
            if not unit.is_in_backward and unit.place + 1 < len(self._order):
                self._order[unit.place + 1].start_gather()

        return hook

    def _forward_hook(self, unit: _Unit) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if unit.is_in_backward:
                return
            has_backward = torch.is_grad_enabled()
            if has_backward:
                for tensor in _tensors(output):
                    if tensor.requires_grad:
                        tensor.register_hook(lambda _: self._before_backward(unit))
            # The last layer's backward is the next thing to run.
            if not (has_backward and unit.place == len(self._units) - 1):
                unit.release()

        return hook

    def _before_backward(self, unit: _Unit) -> None:
        if unit.is_in_backward:
            return
        unit.is_in_backward = True
        unit.finish_gather()
        following = unit.place + 1
        if following < len(self._order) and (self._defers or not self._order[following].releases_itself):
            self._order[following].release()
        if unit.place > 0:
            self._order[unit.place - 1].start_gather()


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


def _groups(model: Module, mesh: Mesh, tied: Collection[str]) -> Iterator[tuple[int, list[Slot]]]:
    """Yield the parameters of each bucket, with their unit under stage 3 (0 is the root).

    Stage 3: one bucket per unit and key. Below: layers together, from the last to the first as gradients arrive, then
    the root's (its embedding's gradient is the last of all), cut at BUCKET_BYTES. On gloo smaller buckets, which hide
    more of the communication, were measured to cost more than they hide where every core is busy.
    """
    slots = list(model.slots())
    by_key: dict[tuple[Key, int, str], list[Slot]] = {}
    for slot in slots:
        key = key_of(slot.spec, mesh)
        alone = slot.name if slot.name in tied else ""
        by_key.setdefault((key, slot.unit if key.stage == 3 else 0, alone), []).append(slot)
    for (key, unit, _), members in by_key.items():
        if key.stage == 3:
            yield unit, members
            continue
        group: list[Slot] = []
        num_bytes = 0
        for slot in sorted(members, key=lambda slot: -slot.unit):
            group.append(slot)
            num_bytes += math.prod(slot.spec.local_shape(mesh)) * max(4, key.dtype.itemsize)
            if num_bytes >= BUCKET_BYTES:
                yield unit, group
                group, num_bytes = [], 0
        if group:
            yield unit, group


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in a nested output (their hook methods are untyped in torch)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
