"""ZeRO where parameters are sharded between uses (stage 3), masters are in host memory, or collectives are compressed.

Under stage 3 a unit (one layer instance, or the root) has buckets of its own, gathered before the layer runs and freed
after it: in forward by module hooks, in backward by a hook on the layer's outputs and by the arrival of its last
gradient. The next unit is gathered while one computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from . import collectives
from .collectives import Work
from .flat import Bucket, Key, NotHere, key_of
from .mesh import Mesh
from .parameters import Module, Slot
from .zero import ZeroUnits

if TYPE_CHECKING:
    # Only programs that compress or offload have these beside them.
    from .compressed import Compression
    from .host_memory import HostMemory


class ShardedBucket(Bucket):
    """The flat buffers of some parameters of equal key, of any stage.

    host: where the master lives if the optimizer is offloaded; the gradient then stays on the device, and is attached
    to the stored parameters for the update only. There is compression where the master is in fp32; `flat` is rounded to
    it on a range's owner, the master not.
    """

    def __init__(
        self,
        key: Key,
        slots: Sequence[Slot],
        mesh: Mesh,
        compute_dtype: torch.dtype | None,
        whole_gradient: bool,
        host: HostMemory | None,
        compression: Compression | None,
    ) -> None:
        is_host_gathered = host is not None and host.holds_parameters and key.stage == 3
        self.host = host if key.requires_grad or is_host_gathered else None
        # Under stage 3 with a master on the host: what this rank sends in gathers, unless that comes from the host too.
        self.resident: Tensor | None = None
        self.is_gathered = key.stage < 3
        self._compression = compression
        self._work: Work | None = None
        self._sent: Tensor | None = None
        super().__init__(key, slots, mesh, compute_dtype, whole_gradient)

    @property
    def compression(self) -> Compression | None:
        """The compression of this bucket's collectives; None if they are exact."""
        return self._compression if self.axis.size > 1 and self.master_dtype == torch.float32 else None

    @property
    def alignment(self) -> int:
        """Elements of which a rank's range is a multiple: whole blocks of codes."""
        return super().alignment if self.compression is None else self.compression.block_size

    def _allocate(self) -> None:
        total, device = self.axis.size * self.shard_numel, self.mesh.device
        make = torch.empty if self.key.stage == 3 else torch.zeros  # gathers fill it; untouched memory is not taken
        self.flat = make(total, dtype=self.compute_dtype, device=device)
        self._num_bytes = total * self.compute_dtype.itemsize
        if self.host is not None:
            self.master = self.host.zeros(self.shard_numel, self.master_dtype, "master")
            if self.key.stage == 3 and not self.host.holds_parameters:
                self.resident = torch.zeros(self.shard_numel, dtype=self.compute_dtype, device=device)
        # Stages below 3 in full precision: the masters are this rank's range of the parameters themselves.
        elif self.key.stage < 3 and self.compute_dtype == self.master_dtype and not self.compresses_gathers:
            self.master = self.flat.narrow(0, self.offset, self.shard_numel)
        else:
            self.master = torch.zeros(self.shard_numel, dtype=self.master_dtype, device=device)

    def _attached(self) -> list[tuple[nn.Parameter, Tensor]]:
        if self.host is None:
            return super()._attached()
        line = torch.zeros(1, dtype=self.master_dtype).expand(self.shard_numel)
        attached: list[tuple[nn.Parameter, Tensor]] = []
        for stored, view in self.attach(line):
            attached.append((stored, view.as_subclass(NotHere)))
        self.detach()
        return attached

    def detach(self) -> None:
        """Leave the stored parameters without gradients."""
        for entry in self.entries:
            if entry.stored is not None:
                entry.stored.grad = None

    @property
    def compresses_gathers(self) -> bool:
        """Whether what other ranks get of this rank's range, and so everyone's `flat`, is rounded."""
        return self.compression is not None and self.compression.gather is not None

    @property
    def rounds_gradients(self) -> bool:
        """Whether gradients are rounded before they are summed over the ZeRO axis."""
        return self.compression is not None and self.compression.reduce is not None

    @property
    def own_copy(self) -> Tensor | None:
        """This rank's range of `flat`, where it stays and the master is another tensor of the device."""
        return None if self.key.stage == 3 or self.host is not None else super().own_copy

    def abandon(self) -> None:
        """Forget gradients and gathers that were cut short; what `flat` holds then is no parameter."""
        super().abandon()
        if self.key.stage == 3:
            self._work, self._sent, self.is_gathered = None, None, False
            self.flat.untyped_storage().resize_(0)

    # Gathering (stage 3) and publishing (stages 0 to 2) ---------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to fill `flat` with everyone's masters, unless it is full or being filled."""
        if self.is_gathered or self._work is not None:
            return
        # Compressed parts arrive in another buffer. Resize only once: a second one would move a collective's target.
        if not self.compresses_gathers:
            self.flat.untyped_storage().resize_(self._num_bytes)
        if self.host is not None and self.resident is None:
            with self.host.bringing(self.master, self.compute_dtype) as sent:
                self._work = self._gather(sent)
            return
        self._work = self._gather(self.master.to(self.compute_dtype) if self.resident is None else self.resident)

    def _gather(self, part: Tensor) -> Work | None:
        if self.compression is not None and self.compresses_gathers:
            return self.compression.start_gather(self.flat, part, self.axis)
        self._sent = part
        return collectives.all_gather(self.flat, part, self.axis.group, async_op=True)

    def finish_gather(self) -> None:
        """Wait for the gather. `flat` may be read when this returns."""
        self.start_gather()
        if self._work is not None:
            if self.compresses_gathers:
                self.flat.untyped_storage().resize_(self._num_bytes)
            self._work.wait()
            self._work = self._sent = None
            self.is_gathered = True

    def release(self) -> None:
        """Free `flat` (stage 3). Views stay valid for when it is filled again."""
        if self.key.stage == 3:
            if self._work is not None:
                self.finish_gather()
            self.is_gathered = False
            self.flat.untyped_storage().resize_(0)

    def start_publish(self, is_copied: bool = False) -> Work | None:
        """Bring new masters to every `flat` (stages 0 to 2); the work to wait for, if any.

        is_copied: `own_copy` has them already.
        """
        if self.key.stage == 3:
            if self.host is not None and self.resident is not None:
                self.host.copy_in(self.master, self.resident)
            return None
        local = self.flat.narrow(0, self.offset, self.shard_numel)
        if self.host is not None:
            self.host.copy_in(self.master, local)
        elif not is_copied and local.data_ptr() != self.master.data_ptr():
            local.copy_(self.master)
        if self.axis.size == 1:
            return None
        if self.compression is not None and self.compresses_gathers:
            return self.compression.start_publish(self.flat, local, self.axis)
        return collectives.all_gather(self.flat, local, self.axis.group, async_op=True)

    def start_reduce(self, target: Tensor, line: Tensor) -> Work | None:
        """Begin to sum everyone's `line` over the ZeRO axis, this rank's range of it into `target`."""
        if self.compression is not None and self.rounds_gradients:
            return self.compression.start_reduce(target, line, self.axis)
        return super().start_reduce(target, line)


class _Unit:
    """A layer instance with parameters under stage 3. place: in the order of execution, from the first forward."""

    def __init__(self, buckets: Sequence[ShardedBucket]) -> None:
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


class ShardedUnits(ZeroUnits):
    """All parameters of a module tree, of any ZeRO stage.

    host: where masters live if the optimizer is offloaded.
    compression: of gathers and reductions over ZeRO axes (`compressed.py`), None for exact ones.
    """

    buckets: list[ShardedBucket]  # type: ignore[assignment]  # of these alone

    def __init__(
        self,
        model: Module,
        mesh: Mesh,
        compute_dtype: torch.dtype | None = None,
        num_micro_batches: int = 1,
        alone: Collection[str] = (),
        *,
        host: HostMemory | None = None,
        compression: Compression | None = None,
    ) -> None:
        self.host, self.compression = host, compression
        super().__init__(model, mesh, compute_dtype, num_micro_batches, alone)
        self._units: list[_Unit] = []
        self._order: list[_Unit] = []
        self._root_buckets = [b for b in self.buckets if b.key.stage == 3 and b.entries[0].slot.unit == 0]
        self._owners = self._hook_layers(model)

    def new_bucket(self, slots: Sequence[Slot]) -> ShardedBucket:
        """Return a bucket of parameters of one key, which is not gathered."""
        key = key_of(slots[0].spec, self.mesh)
        settings = self.mesh, self.compute_dtype, self._keeps_whole_gradient(key), self.host, self.compression
        bucket = ShardedBucket(key, slots, *settings)
        bucket.release()
        return bucket

    def _bucket_of(self, slot: Slot) -> tuple[Any, ...]:
        key = key_of(slot.spec, self.mesh)
        return key, slot.unit if key.stage == 3 else 0

    def _cut(self, members: Sequence[Slot]) -> Iterator[list[Slot]]:
        """Yield one bucket per unit and key under stage 3."""
        if key_of(members[0].spec, self.mesh).stage == 3:
            yield list(members)
        else:
            yield from super()._cut(members)

    def share(self, model: Module) -> None:
        """Put these parameters in the places of another program's model, which then gathers them too.

        Its layers may be of other classes. What one of its layers reads is gathered before that layer; what its root or
        several layers read is gathered for the whole step.
        """
        super().share(model)
        entries, readers = self.entries(), dict[_Unit, set[int]]()
        for slot in model.slots():
            if (unit := self._owners.get(id(entries[slot.name][0]))) is not None:
                readers.setdefault(unit, set()).add(slot.unit)
        modules = model.units()
        for unit, indices in readers.items():
            if len(indices) == 1 and 0 not in indices:
                self._hook(modules[indices.pop()], unit)
            else:
                present = {id(bucket) for bucket in self._root_buckets}
                self._root_buckets += [bucket for bucket in unit.buckets if id(bucket) not in present]

    def _hook_layers(self, model: Module) -> dict[int, _Unit]:
        owners: dict[int, _Unit] = {}
        for index, module in enumerate(model.units()):
            buckets_of_layer = [b for b in self.buckets if b.key.stage == 3 and b.entries[0].slot.unit == index]
            if index and buckets_of_layer:
                unit = _Unit(buckets_of_layer)
                self._units.append(unit)
                owners.update((id(bucket), unit) for bucket in buckets_of_layer)
                self._hook(module, unit)
        return owners

    def _hook(self, module: nn.Module, unit: _Unit) -> None:
        module.register_forward_pre_hook(self._pre_forward_hook(unit))
        module.register_forward_hook(self._forward_hook(unit))

    # Calls of the executor, for each micro-batch ----------------------------------------------------------------------

    def begin(self, accumulate: bool, is_last: bool) -> None:
        """Prepare a forward, as `ZeroUnits.begin` does, and gather what the root reads."""
        super().begin(accumulate, is_last)
        self._gather_root(self._order[0] if self._order else None)

    def begin_backward(self, accumulate: bool, is_last: bool) -> None:
        """Prepare a backward that does not follow its forward directly, and gather what the root reads."""
        super().begin_backward(accumulate, is_last)
        self._gather_root(self._order[-1] if self._order else None)

    def _expect(self, accumulate: bool, is_last: bool) -> None:
        super()._expect(accumulate, is_last)
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
        """End the backward, or a forward without one, and free what is gathered."""
        super().end(has_backward)
        for bucket in self.buckets:
            bucket.release()

    def _complete(self, bucket: Bucket) -> None:
        super()._complete(bucket)
        unit = self._owners.get(id(bucket))
        if unit is not None:
            unit.bucket_done()

    # Hooks ------------------------------------------------------------------------------------------------------------

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


def _tensors(value: Any) -> Iterator[Any]:
    """The tensors in a nested output (their hook methods are untyped in torch)."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
