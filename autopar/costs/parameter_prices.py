"""Prices of parameters: gradient synchronization, ZeRO's traffic, the update, and constant bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.costs import host
from autopar.costs.quantised_collectives import SentBytes, can_compress, quantising_bytes, sent_bytes_of
from autopar.costs.rates import Prices, Rates, is_cpu
from autopar.ir.graph import TensorMeta
from autopar.ir.mesh import zero_axes
from autopar.ir.placement import Stored
from autopar.sharding.call_options import num_local
from codegen.runtime.whole_updates import ROUND_BYTES
from cost_models import collective, compute
from cost_models.framework_profiles import Framework


def summed_axes(axes: tuple[str, ...], stored: Stored) -> list[tuple[int, ...]]:
    """Return the axes of gradient sums outside of ZeRO. Axes that ZeRO may share are one group."""
    partial = [number for number, placement in enumerate(stored.placements) if placement.kind == "Rp"]
    over = zero_axes(axes, stored.placements)
    together = [over] if over and not stored.zero else []
    return [*together, *((number,) for number in partial if number not in over)]


@dataclass(frozen=True)
class ParameterPrices(Prices):
    """Prices of parameters as they are stored. has_kernels: whether programs have fused kernels. profile: of the
    framework that updates them; None for generated programs."""

    rates: Rates
    has_kernels: bool = False
    profile: Framework | None = None

    def stored_seconds(self, meta: TensorMeta, stored: Stored, unit_bytes: float) -> float:
        """Return the seconds of one parameter per step without the calls that use it: exposed traffic, sums, update."""
        per_micro, per_step = self.sync_parts(meta, stored, unit_bytes)
        quantising_per_micro, quantising_per_step = self.quantising_parts(meta, stored, unit_bytes)
        per_micro += (
            self.accumulation_seconds(meta, stored) + self.rounding_seconds(meta, stored) + quantising_per_micro
        )
        per_step += quantising_per_step
        return per_micro * self.rates.training.num_micro_batches + per_step + self.optimizer_seconds(meta, stored)

    def sync_parts(self, meta: TensorMeta, stored: Stored, unit_bytes: float) -> tuple[float, float]:
        """Return the exposed gradient synchronization and ZeRO traffic of one parameter: seconds per micro-batch, and
        seconds once per step.

        unit_bytes: of all the parameters that share its buffers. They share the latency, too.
        """
        if not meta.requires_grad:
            return 0.0, 0.0
        training = self.rates.training
        local = num_local(meta, stored.placements, self.mesh)
        share = max(unit_bytes / max(meta.num_bytes, 1), 1.0)
        per_micro, per_step = 0.0, 0.0

        def shared(kind: collective.Kind, axes: tuple[int, ...], num_bytes: float) -> float:
            return self.rates.joint_seconds(kind, axes, num_bytes * share) / share

        size, over = self.zero_size(stored), zero_axes(self.mesh.axes, stored.placements)
        num_gathers = self.rates.num_forwards + 1
        if stored.zero:
            sent = self.sent(meta, stored)
            reduces = shared("all_to_all" if sent.reduce_code else "reduce_scatter", over, local * sent.reduce)
            gathers = shared("all_gather", over, local * sent.gather)
            per_micro += (reduces if stored.zero >= 2 else 0.0) + (num_gathers * gathers if stored.zero == 3 else 0.0)
            per_step += (reduces if stored.zero == 1 else 0.0) + (gathers if stored.zero < 3 else 0.0)
            if stored.zero == 3 and training.offload == "parameters":
                link_rate = self.cluster.device.host_link_bytes_per_second
                per_micro += num_gathers * local * training.compute_bytes / size / link_rate
        for axes in summed_axes(self.mesh.axes, stored):
            per_step += shared("all_reduce", axes, local * training.gradient_bytes / size)
        exposed = 1.0 - self.rates.hidden_fraction
        return per_micro * exposed, per_step * exposed

    def sent(self, meta: TensorMeta, stored: Stored) -> SentBytes:
        """Return the bytes per element that ZeRO's collectives of one parameter move."""
        training = self.rates.training
        size = self.zero_size(stored)
        return sent_bytes_of(training.compression, meta, size, training.compute_bytes, training.gradient_bytes)

    def quantising_parts(self, meta: TensorMeta, stored: Stored, unit_bytes: float) -> tuple[float, float]:
        """Return the seconds to quantize and dequantize compressed collectives, always exposed, split like
        `sync_parts`."""
        training, size = self.rates.training, self.zero_size(stored)
        if not (training.compression and stored.zero and meta.requires_grad):
            return 0.0, 0.0
        widths = (training.compute_bytes, training.gradient_bytes)
        share = max(unit_bytes / max(meta.num_bytes, 1), 1.0)
        elements = num_local(meta, stored.placements, self.mesh) * share
        gathers, reduces = (
            self.rates.memory_seconds(elements * moved) / share
            for moved in quantising_bytes(self.sent(meta, stored), size, *widths, self.cluster.device)
        )
        if stored.zero == 3:
            return reduces + (self.rates.num_forwards + 1) * gathers, 0.0
        return (reduces, gathers) if stored.zero == 2 else (0.0, reduces + gathers)

    def optimizer_seconds(self, meta: TensorMeta, stored: Stored, count: int = 1) -> float:
        """Price the update of one parameter's stored shard and of its compute copy: bandwidth only (kernels are
        shared by many parameters), and on a CPU launches. count: of parameters that have these elements together."""
        if not meta.requires_grad:
            return 0.0
        elements = self.stored_elements(meta, stored)
        device, training, launches = self.cluster.device, self.rates.training, 0.0
        if is_cpu(self.cluster):
            launches = count * host.UPDATE * host.launch_seconds(self.cluster)
        if training.offload:
            # The gradient goes out, the weight comes back; copies of one bucket overlap the update of another.
            copied = elements * max(training.gradient_bytes, training.compute_bytes)
            updated = elements * training.update_traffic / device.host_memory_bytes_per_second
            if training.offload.startswith("nvme:"):
                moved = 2 * elements * (training.state_bytes + training.master_bytes)
                updated += moved / device.disk_bytes_per_second
            return max(updated, copied / device.host_link_bytes_per_second) + launches
        if self.profile is not None and self.profile.optimizer_bytes:
            moved = elements * self.profile.optimizer_bytes
            return moved / (device.memory_bytes_per_second * device.memory_efficiency)
        moved = self.updated_elements(meta, stored) * training.update_traffic
        moved += elements * self.copy_traffic(meta, stored)
        beside = self.whole_update_seconds(meta, stored)
        if is_cpu(self.cluster):
            return moved / device.host_memory_bytes_per_second + launches + beside
        return moved / (device.memory_bytes_per_second * device.memory_efficiency) + beside

    def stored_elements(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the elements of a parameter's master on one rank."""
        return num_local(meta, stored.placements, self.mesh) / self.zero_size(stored)

    @property
    def whole_share(self) -> float:
        """Return the share of the trained elements that ranks of the mesh update whole for one another."""
        return 0.0 if self.rates.training.offload or self.mesh.num_ranks == 1 else self.rates.training.whole_share

    def updated_elements(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the elements of a parameter that a rank updates, with their state: its stored shard, or an owner's
        share."""
        share = self.whole_share
        return (1.0 - share) * self.stored_elements(meta, stored) + share * meta.numel / self.mesh.num_ranks

    def taken_bytes(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the bytes of values and gradients of whole parameters while their owner, which stores a shard,
        updates them."""
        if not meta.requires_grad or self.stored_elements(meta, stored) >= meta.numel:
            return 0.0
        width = self.rates.training.gradient_bytes  # of masters too
        return 2 * width * self.whole_share * meta.numel / self.mesh.num_ranks

    def update_temporary_bytes(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the temporary bytes of one parameter's update; an owner's cover the whole parameter."""
        if self.rates.training.offload:
            return 0.0
        is_whole = self.whole_share > 0 and not self.rates.training.updates_together
        elements = meta.numel if is_whole else self.updated_elements(meta, stored)
        return elements * self.rates.training.update_bytes

    def whole_update_seconds(self, meta: TensorMeta, stored: Stored) -> float:
        """Price the updates of whole parameters: products, traffic to and from their owners, and handing out copies
        on each axis, at the rate of long messages, which many parameters share."""
        share = self.whole_share
        if not share:
            return 0.0
        training, device = self.rates.training, self.cluster.device
        flops = training.update_flops * share * meta.numel / self.mesh.num_ranks
        work = compute.Work("matmul", flops, 0.0, training.update_dtype)
        axes = tuple(range(len(self.mesh.sizes)))
        # Value and gradient there, value back.
        rounds = 1.5 * self.taken_bytes(meta, stored) / ROUND_BYTES
        seconds = compute.seconds(work, device) + rounds * self.rates.joint_seconds("all_to_all", axes, ROUND_BYTES)
        cutting = {axis for axis in axes if stored.placements[axis].is_shard}
        cutting |= {*zero_axes(self.mesh.axes, stored.placements)} if stored.zero else set()
        rounds = share * self.stored_elements(meta, stored) * training.gradient_bytes / ROUND_BYTES
        copied = sum(self.rates.collective_seconds("broadcast", axis, ROUND_BYTES) for axis in {*axes} - cutting)
        return seconds + rounds * copied

    def copy_traffic(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the bytes per stored element that copy an updated master to its compute tensor.

        Where that is another tensor (codegen/runtime/flat.py `own_copy`), a copy reads the master and writes it; an
        update that has just computed the master only writes it. Under ZeRO-3 gathers read the masters
        (`rounding_seconds`).
        """
        training, size = self.rates.training, self.zero_size(stored)
        if training.offload or (stored.zero == 3 and size > 1):
            return 0.0
        rounded = self.is_rounded(meta, stored)
        if not (training.master_bytes or rounded):
            return 0.0
        read = 0.0 if self.writes_copies else float(training.master_bytes or meta.dtype.itemsize)
        return read + training.compute_bytes

    @property
    def writes_copies(self) -> bool:
        """Return whether one launch updates all masters and writes the compute tensors
        (codegen/runtime/fused_adamw.py)."""
        return self.has_kernels and self.rates.training.writes_copies and not is_cpu(self.cluster)

    def is_rounded(self, meta: TensorMeta, stored: Stored) -> bool:
        """Return whether compressed gathers round all ranks' compute tensors. Separate masters then stay in fp32."""
        is_gathered = (
            bool(self.rates.training.compression.gather) and stored.zero in (1, 2) and self.zero_size(stored) > 1
        )
        return is_gathered and can_compress(meta)

    def accumulation_seconds(self, meta: TensorMeta, stored: Stored, count: int = 1) -> float:
        """Return the seconds per micro-batch to move a parameter's gradient into the buffer that is reduced, and to add
        it up there.

        0 under a framework's profile, which says what the framework moves (Framework.accumulate_bytes).
        count: of parameters that have these elements together. With c and g the bytes of an element as computed and
        as reduced, and m micro-batches: read c, write g, and from the second micro-batch on read g. Where every
        micro-batch is reduced (zero 2 and 3), its shard is added up.
        """
        if not meta.requires_grad or self.profile is not None:
            return 0.0
        training, device = self.rates.training, self.cluster.device
        local, wide = num_local(meta, stored.placements, self.mesh), training.gradient_bytes
        again = (training.num_micro_batches - 1) / training.num_micro_batches
        is_whole = stored.zero < 2 or self.zero_size(stored) == 1
        summed = again * wide if is_whole else again * 3 * wide / self.zero_size(stored)
        moved = local * (meta.dtype.itemsize + wide + summed)
        added = count * host.GRADIENT * host.launch_seconds(self.cluster)
        return moved / (device.memory_bytes_per_second * device.memory_efficiency) + added

    def rounding_seconds(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the seconds per micro-batch to round this rank's masters for ZeRO-3's gathers, in every forward and
        in backward, if it computes in low precision. With an offloaded optimizer, the rounded copy exists
        already."""
        training, device, size = self.rates.training, self.cluster.device, self.zero_size(stored)
        if not (meta.requires_grad and training.master_bytes and stored.zero == 3 and size > 1) or training.offload:
            return 0.0
        shard = num_local(meta, stored.placements, self.mesh) / size
        moved = (self.rates.num_forwards + 1) * (training.master_bytes + training.compute_bytes) * shard
        return moved / (device.memory_bytes_per_second * device.memory_efficiency)

    def parameter_bytes(self, meta: TensorMeta, stored: Stored) -> tuple[float, float, float]:
        """Return (weights, gradients, optimizer state) bytes that stay allocated on one rank."""
        training = self.rates.training
        local = num_local(meta, stored.placements, self.mesh)
        if not meta.requires_grad:
            return local * meta.dtype.itemsize, 0.0, 0.0
        size, zero = self.zero_size(stored), stored.zero
        on_device = not training.offload
        is_away = zero == 3 and training.offload == "parameters"
        weights = 0.0 if is_away else training.compute_bytes * local / (size if zero == 3 else 1)
        master = training.master_bytes
        if self.is_rounded(meta, stored):
            master = 4
        weights += master * local / size if on_device else 0.0
        # As codegen/runtime/flat.py: stage 1 keeps the whole gradient in addition to its shard of the sum if several
        # micro-batches add up, and works as stage 2 if one does not.
        shares = 1 / size if zero >= 2 or (zero and training.num_micro_batches == 1) else 1 + (1 / size if zero else 0)
        gradients = training.gradient_bytes * local * shares
        if self.profile is not None and zero < 2:
            gradients += self.profile.gradient_copy_bytes * local
        state = training.state_bytes * self.updated_elements(meta, stored)
        return weights, gradients, state if on_device else 0.0

    def gathered_bytes(self, meta: TensorMeta, stored: Stored) -> float:
        """Return the bytes of the whole gradient (ZeRO-2) and also the whole parameter (ZeRO-3) while its unit is
        gathered."""
        if stored.zero < 2 or not meta.requires_grad:
            return 0.0
        sent = self.sent(meta, stored)
        width = self.rates.training.gradient_bytes + (sent.reduce if sent.reduce_code else 0)
        if stored.zero == 3:
            width += self.rates.training.compute_bytes + (sent.gather if sent.gather_code else 0)
        return num_local(meta, stored.placements, self.mesh) * width * (1.0 + self.rates.fragmentation)

    def zero_size(self, stored: Stored) -> int:
        """Return the number of ranks over which a parameter's state is sharded."""
        over = zero_axes(self.mesh.axes, stored.placements) if stored.zero else ()
        return math.prod(self.mesh.sizes[axis] for axis in over)
