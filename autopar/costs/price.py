"""What one option costs: seconds of compute, of communication and of the optimiser, and bytes of memory.

The only caller of `cost_models`. Everything is per optimiser step and per rank; forward and backward run
`num_micro_batches` times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.compression import Compression
from autopar.costs import host
from autopar.costs.coding import Wire, can_compress, coding_bytes, wire_of
from autopar.costs.context import ContextCall, context_call
from autopar.costs.saved import extra_saved_bytes
from autopar.costs.specials import specials
from autopar.graph import VIEWS, Node, Ref, TensorMeta, base_name
from autopar.mesh import Mesh
from autopar.placement import Placements, Stored
from autopar.sharding.reshard import Step, steps
from autopar.sharding.strategies import Operator, Option, num_local
from cost_models import collective, compute
from cost_models.machine import Cluster

MATMULS = frozenset(
    ["linear", "addmm", "mm", "bmm", "matmul", "baddbmm", "einsum", "conv1d", "conv2d", "convolution", "grouped_mm"]
)
DEFERRABLE: Mapping[str, int] = {"linear": 1, "addmm": 2}
"""Calls whose weight gradients can be put off (codegen/runtime/deferred.py), and which input is the weight."""

BATCHED = frozenset({"bmm", "baddbmm", "matmul"})
"""Calls that multiply a matrix per element of their leading dims, where both operands have such."""

ATTENTION = frozenset({"scaled_dot_product_attention"})
VALUE_FEATURES = "f"
"""The factor of values and result that attention's scores lack (rules/attention.py)."""

FLASH = "fa2"
"""What torch's own fused attention is on GPUs (T. Dao, "FlashAttention-2" (2023))."""

FREE = VIEWS | {"contiguous", "to", "arange", "full", "zeros", "ones"} - {"reshape"}

ADAM_BYTES = 28.0
"""Bytes that one AdamW update moves per element: weight, both moments read and written, gradient read (fp32)."""


@dataclass(frozen=True, slots=True)
class Training:
    """How a step is run, as far as costs depend on it.

    state_bytes: optimiser state per parameter. update_bytes: temporaries of its update per element, of all parameters
    at once or (updates_together: no) of one after the other; update_traffic: bytes that it moves per
    element. compute_bytes, master_bytes: of a weight as computed with,
    and of a separate fp32 copy (0 if the weight itself is fp32). gradient_bytes: as accumulated and reduced. offload:
    "optimizer": state and separate masters live in host memory, and the host updates them; "parameters": under ZeRO-3
    the shards of the parameters too. compression: of ZeRO's collectives (coding.py).
    """

    num_micro_batches: int = 1
    state_bytes: float = 8.0
    compute_bytes: int = 4
    master_bytes: int = 0
    gradient_bytes: int = 4
    offload: str = ""
    update_bytes: float = 0.0
    updates_together: bool = False
    update_traffic: float = ADAM_BYTES
    compression: Compression = Compression()


def is_cpu(cluster: Cluster) -> bool:
    """Whether ranks are processes on a CPU."""
    return cluster.device.is_cpu


@dataclass
class Pricer:
    """Costs on one mesh of one cluster. Caches collective times; holds no decision.

    hidden_fraction: share of gradient and parameter traffic that runs behind compute. fragmentation: what the
    allocator holds beyond activations and transients, as a fraction of them.
    """

    mesh: Mesh
    cluster: Cluster
    training: Training
    hidden_fraction: float = 0.0
    fragmentation: float = 0.0
    _times: dict[tuple[collective.Kind, int, float], float] = field(default_factory=dict)
    _memory_times: dict[float, float] = field(default_factory=dict)
    _reshards: dict[tuple[Placements, Placements, int, bool], float] = field(default_factory=dict)
    _matrices: dict[tuple[tuple[Placements, ...], tuple[Placements, ...], int, bool], np.ndarray] = field(
        default_factory=dict
    )

    @cached_property
    def groups(self) -> tuple[collective.Group, ...]:
        """The process group of each axis, as laid over the cluster."""
        return tuple(
            collective.Group(size, self.mesh.stride(axis))
            for axis, size in zip(self.mesh.axes, self.mesh.sizes, strict=True)
        )

    def collective_seconds(self, kind: collective.Kind, axis: int, num_bytes: float) -> float:
        """One collective on one axis; num_bytes as cost_models.collective defines it."""
        key = (kind, axis, num_bytes)
        if key not in self._times:
            self._times[key] = collective.seconds(kind, num_bytes, self.groups[axis], self.cluster)
        return self._times[key]

    # --- resharding -------------------------------------------------------------------------------------------

    def step_seconds(self, step: Step, meta: TensorMeta) -> tuple[float, float]:
        """(forward, backward) of one reshard step of the whole tensor `meta`: collective plus local copies."""
        num_bytes = meta.num_bytes * step.fraction
        forward = self.collective_seconds(step.forward, step.axis, num_bytes) if step.forward else 0.0
        backward = (
            self.collective_seconds(step.backward, step.axis, num_bytes)
            if step.backward and meta.requires_grad
            else 0.0
        )
        copies = self.memory_seconds(2 * num_bytes) if (step.source.kind, step.target.kind) != ("R", "Rp") else 0.0
        return forward + copies, backward + (copies if meta.requires_grad else 0.0)

    def reshard_seconds(self, source: Placements, target: Placements, meta: TensorMeta) -> float:
        """Forward and conjugate backward of a reshard, once. inf if there is no way."""
        if source == target:
            return 0.0
        key = (source, target, meta.num_bytes, meta.requires_grad)
        if key not in self._reshards:
            path = steps(source, target, self.mesh.sizes)
            self._reshards[key] = math.inf if path is None else sum(sum(self.step_seconds(s, meta)) for s in path)
        return self._reshards[key]

    def reshard_matrix(
        self, sources: tuple[Placements, ...], targets: tuple[Placements, ...], meta: TensorMeta
    ) -> np.ndarray:
        """[len(sources), len(targets)] seconds of one forward and backward."""
        key = (sources, targets, meta.num_bytes, meta.requires_grad)
        if key not in self._matrices:
            unique_s, index_s = _unique(sources)
            unique_t, index_t = _unique(targets)
            small = np.array([[self.reshard_seconds(s, t, meta) for t in unique_t] for s in unique_s])
            self._matrices[key] = small[np.ix_(index_s, index_t)]
        return self._matrices[key]

    # --- compute ----------------------------------------------------------------------------------------------

    def memory_seconds(self, num_bytes: float) -> float:
        """A memory-bound kernel that moves num_bytes."""
        if num_bytes not in self._memory_times:
            work = compute.Work("memory", 0.0, num_bytes)
            self._memory_times[num_bytes] = compute.seconds(work, self.cluster.device)
        return self._memory_times[num_bytes]

    def operator_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """(forward, backward) compute of one call at its local sizes."""
        name = base_name(operator.node.op)
        metas_in = operator.inputs
        if name in FREE and not any(a.lowering for a in option.axes):
            seconds = host.VIEW * host.launch_seconds(self.cluster) if name in VIEWS else 0.0
            return seconds, seconds if any(meta.requires_grad for meta in metas_in) else 0.0
        if not any(meta.requires_grad for meta in operator.node.outputs) and not metas_in:
            return 0.0, 0.0
        bytes_in = sum(
            num_local(m, p, self.mesh) * m.dtype.itemsize for m, p in zip(metas_in, option.inputs, strict=True)
        )
        outputs = operator.node.outputs
        bytes_out = sum(
            num_local(m, p, self.mesh) * m.dtype.itemsize for m, p in zip(outputs, option.outputs, strict=True)
        )
        num_grads = sum(meta.requires_grad for meta in metas_in)
        if name in MATMULS or name in ATTENTION:
            return self._contraction_seconds(operator, option, bytes_in + bytes_out, num_grads)
        forward, backward = bytes_in + bytes_out, bytes_in + bytes_out * (1 + num_grads)
        inner = self._inner_seconds(operator, option)
        counts = specials(operator.node)
        if self.cluster.device.special_seconds and any(counts):
            largest = max((*metas_in, *outputs), key=lambda meta: meta.numel)
            lies = (*option.inputs, *option.outputs)[(*metas_in, *outputs).index(largest)]
            elements = num_local(largest, lies, self.mesh)
            small = host.LOSS if name == "cross_entropy_loss" else (0.0, 0.0)
            one, two = (
                compute.seconds(compute.Work("memory", 0.0, size, specials=count * elements), self.cluster.device)
                + launches * host.launch_seconds(self.cluster)
                for size, count, launches in zip((forward, backward), counts, small, strict=True)
            )
            return one + inner, two if num_grads else 0.0
        return self.memory_seconds(forward) + inner, self.memory_seconds(backward) if num_grads else 0.0

    def _contraction_seconds(
        self, operator: Operator, option: Option, num_bytes: float, num_grads: int
    ) -> tuple[float, float]:
        rule = operator.rule
        ways = math.prod(n for a, n in zip(option.axes, self.mesh.sizes, strict=True) if rule.sharded_by(a.label))
        flops = contraction_flops(operator) / ways
        dtype = self.dtype_name(operator.node.outputs[0])
        if base_name(operator.node.op) in ATTENTION:
            # Ranks that share the features of the values have all scores each, which are half of the work.
            widths = [n for a, n in zip(option.axes, self.mesh.sizes, strict=True) if a.label == VALUE_FEATURES]
            flops *= (1 + math.prod(widths)) / 2
            forward, backward = self._attention_seconds(operator, option, flops, num_bytes, dtype)
            return forward, backward if num_grads else 0.0
        forward, wrt_input, wrt_weight = self._matmul_seconds(operator, option, flops, num_bytes, dtype)
        backward = (wrt_weight if num_grads else 0.0) + (wrt_input if num_grads > 1 else 0.0)
        if any(len(meta.shape) == 1 and meta.requires_grad for meta in operator.inputs):
            # The gradient of a bias is a sum over all rows.
            output = operator.node.outputs[0]
            size = num_local(output, option.outputs[0], self.mesh) * output.dtype.itemsize
            backward += self.memory_seconds(size)
        return forward, backward

    def _attention_seconds(
        self, operator: Operator, option: Option, flops: float, num_bytes: float, dtype: str
    ) -> tuple[float, float]:
        """Forward and backward of torch's own flash kernel, or of several of them with exchanges between ranks."""
        query, key = operator.inputs[0], operator.inputs[1]
        queries, width = query.shape[-2], query.shape[-1]
        call = self.context_call(operator, option)
        if call is not None:
            known = call

            def part(keys: int, causal: bool) -> tuple[float, float]:
                shape, moved = (known.heads, known.queries, keys), num_bytes + known.part * (keys / known.keys - 1)
                work = 4.0 * math.prod(shape) * width * (0.5 if causal else 1.0)
                return self._flash_seconds(work, moved, dtype, shape, causal)

            return call.seconds(self.collective_seconds, self.memory_seconds, part)
        heads = max(num_local(query, option.inputs[0], self.mesh) // (queries * width), 1)
        shape = (heads, queries, key.shape[-2])
        return self._flash_seconds(flops, num_bytes, dtype, shape, _is_causal(operator.node))

    def context_call(self, operator: Operator, option: Option) -> ContextCall | None:
        """An attention call whose keys are cut along the sequence, as one rank has it; None for others."""
        return context_call(operator, option, self.mesh, is_cpu(self.cluster)) if operator.rule.joints else None

    def _flash_seconds(
        self,
        flops: float,
        num_bytes: float,
        dtype: str,
        shape: tuple[int, int, int],
        causal: bool,
        variant: str = FLASH,
    ) -> tuple[float, float]:
        """Forward and backward of one kernel; shape: heads, queries, keys."""
        device = self.cluster.device
        forward = compute.Work("attention", flops, num_bytes, dtype, shape, variant, causal=causal)
        backward = compute.Work("attention", 2.5 * flops, 2 * num_bytes, dtype, shape, variant, True, causal)
        return compute.seconds(forward, device), compute.seconds(backward, device)

    def _matmul_seconds(
        self, operator: Operator, option: Option, flops: float, num_bytes: float, dtype: str
    ) -> tuple[float, float, float]:
        """Forward, gradient with respect to the input, and to the weight."""
        output, placements = operator.node.outputs[0], option.outputs[0]
        columns = num_local_dim(output, placements, self.mesh)
        if base_name(operator.node.op) in BATCHED and min(len(meta.shape) for meta in operator.inputs) > 2:
            # A product per element of the leading dims, of which flops counts all.
            rows = num_local_dim(output, placements, self.mesh, -2)
            batch = max(num_local(output, placements, self.mesh) // (rows * columns), 1)
            depth = max(round(flops / (2 * rows * columns * batch)), 1)
        else:
            rows = max(num_local(output, placements, self.mesh) // max(columns, 1), 1)
            depth = max(round(flops / (2 * rows * columns)), 1)
        shapes = ((rows, columns, depth), (rows, depth, columns), (columns, depth, rows))
        device = self.cluster.device
        forward, wrt_input, wrt_weight = (
            compute.seconds(compute.Work("matmul", flops, num_bytes, dtype, shape), device) for shape in shapes
        )
        return forward, wrt_input, wrt_weight

    def weight_seconds(self, operator: Operator, option: Option, whole_seconds: float) -> float:
        """The part of a linear layer's backward that makes its weight's gradient, which may be put off.

        whole_seconds: forward and backward of the call (`operator_seconds`).
        """
        position = DEFERRABLE.get(base_name(operator.node.op))
        if position is None or not operator.inputs[position].requires_grad:
            return 0.0
        forward_and_input = self.operator_seconds(_frozen(operator, position - 1), option)
        return whole_seconds - sum(forward_and_input)

    def putting_off_seconds(self, operator: Operator) -> float:
        """What it takes beside that to put them off."""
        return host.PUT_OFF * host.launch_seconds(self.cluster) if base_name(operator.node.op) in DEFERRABLE else 0.0

    def _inner_seconds(self, operator: Operator, option: Option) -> float:
        """Collectives inside a lowering: cross-entropy over a sharded vocabulary reduces three numbers a token."""
        total = 0.0
        if base_name(operator.node.op) == "cross_entropy_loss":
            logits, placements = operator.inputs[0], option.inputs[0]
            for axis, (choice, placement) in enumerate(zip(option.axes, placements, strict=True)):
                if choice.lowering and placement.is_shard and choice.outputs[0].is_replicated:
                    tokens = logits.numel // logits.shape[min(1, len(logits.shape) - 1)]
                    total += 3 * self.collective_seconds("all_reduce", axis, 4.0 * tokens)
        return total

    # --- parameters -------------------------------------------------------------------------------------------

    def stored_seconds(self, meta: TensorMeta, stored: Stored, unit_bytes: float) -> float:
        """What one parameter takes per step beside the calls that use it: traffic that is not hidden, sums, update."""
        per_micro, per_step = self.sync_parts(meta, stored, unit_bytes)
        coding_per_micro, coding_per_step = self.coding_parts(meta, stored, unit_bytes)
        per_micro += self.accumulation_seconds(meta, stored) + coding_per_micro
        per_step += coding_per_step
        return per_micro * self.training.num_micro_batches + per_step + self.optimizer_seconds(meta, stored)

    def sync_parts(self, meta: TensorMeta, stored: Stored, unit_bytes: float) -> tuple[float, float]:
        """Gradient synchronisation and ZeRO traffic of one parameter, not counting what is hidden: seconds per
        micro-batch, and seconds once per step.

        unit_bytes: of all the parameters that share its buffers, so that latency is shared too.
        """
        if not meta.requires_grad:
            return 0.0, 0.0
        training = self.training
        local = num_local(meta, stored.placements, self.mesh)
        share = max(unit_bytes / max(meta.num_bytes, 1), 1.0)
        per_micro, per_step = 0.0, 0.0

        def shared(kind: collective.Kind, axis: int, num_bytes: float) -> float:
            return self.collective_seconds(kind, axis, num_bytes * share) / share

        size = 1
        if stored.zero:
            axis = self.mesh.axes.index("dp")
            size = self.mesh.sizes[axis]
            wire = self.wire(meta, stored)
            reduces = shared("all_to_all" if wire.reduce_code else "reduce_scatter", axis, local * wire.reduce)
            gathers = shared("all_gather", axis, local * wire.gather)
            per_micro += (reduces if stored.zero >= 2 else 0.0) + (2 * gathers if stored.zero == 3 else 0.0)
            per_step += (reduces if stored.zero == 1 else 0.0) + (gathers if stored.zero < 3 else 0.0)
            if stored.zero == 3 and training.offload == "parameters":
                per_micro += 2 * local * training.compute_bytes / size / self.cluster.device.host_link_bytes_per_second
        for axis, placement in enumerate(stored.placements):
            if placement.kind == "Rp" and not (stored.zero and self.mesh.axes[axis] == "dp"):
                per_step += shared("all_reduce", axis, local * training.gradient_bytes / size)
        exposed = 1.0 - self.hidden_fraction
        return per_micro * exposed, per_step * exposed

    def wire(self, meta: TensorMeta, stored: Stored) -> Wire:
        """Bytes per element that ZeRO's collectives of one parameter move."""
        training = self.training
        size = self.zero_size(stored)
        return wire_of(training.compression, meta, size, training.compute_bytes, training.gradient_bytes)

    def coding_parts(self, meta: TensorMeta, stored: Stored, unit_bytes: float) -> tuple[float, float]:
        """Quantising and dequantising of compressed collectives, which nothing hides, in the parts of `sync_parts`."""
        training, size = self.training, self.zero_size(stored)
        if not (training.compression and stored.zero and meta.requires_grad):
            return 0.0, 0.0
        widths = (training.compute_bytes, training.gradient_bytes)
        share = max(unit_bytes / max(meta.num_bytes, 1), 1.0)
        elements = num_local(meta, stored.placements, self.mesh) * share
        gathers, reduces = (
            self.memory_seconds(elements * moved) / share
            for moved in coding_bytes(self.wire(meta, stored), size, *widths, self.cluster.device)
        )
        if stored.zero == 3:
            return reduces + 2 * gathers, 0.0
        return (reduces, gathers) if stored.zero == 2 else (0.0, reduces + gathers)

    def optimizer_seconds(self, meta: TensorMeta, stored: Stored) -> float:
        """The update of one parameter's stored part, bandwidth only (kernels are shared by many parameters)."""
        if not meta.requires_grad:
            return 0.0
        elements = num_local(meta, stored.placements, self.mesh) / self.zero_size(stored)
        device, training = self.cluster.device, self.training
        if training.offload:
            # Out goes the gradient, back comes the weight; copies of one bucket run beside the update of another.
            copied = elements * max(training.gradient_bytes, training.compute_bytes)
            updated = elements * training.update_traffic / device.host_memory_bytes_per_second
            if training.offload.startswith("nvme:"):
                moved = 2 * elements * (training.state_bytes + training.master_bytes)
                updated += moved / device.disk_bytes_per_second
            return max(updated, copied / device.host_link_bytes_per_second)
        if is_cpu(self.cluster):
            moved = elements * training.update_traffic
            return moved / device.host_memory_bytes_per_second + host.UPDATE * host.launch_seconds(self.cluster)
        return elements * training.update_traffic / (device.memory_bytes_per_second * device.memory_efficiency)

    def accumulation_seconds(self, meta: TensorMeta, stored: Stored) -> float:
        """Per micro-batch: a parameter's gradient moved into the line that is reduced, and added up there.

        With c and g the bytes of an element as computed and as reduced, and m micro-batches: read c, write g, and from
        the second micro-batch on read g; where every micro-batch is reduced (zero 2 and 3), its shard is added up.
        """
        if not meta.requires_grad:
            return 0.0
        training, device = self.training, self.cluster.device
        local, wide = num_local(meta, stored.placements, self.mesh), training.gradient_bytes
        again = (training.num_micro_batches - 1) / training.num_micro_batches
        is_whole = stored.zero < 2 or self.zero_size(stored) == 1
        summed = again * wide if is_whole else again * 3 * wide / self.zero_size(stored)
        moved = local * (meta.dtype.itemsize + wide + summed)
        added = host.GRADIENT * host.launch_seconds(self.cluster)
        return moved / (device.memory_bytes_per_second * device.memory_efficiency) + added

    def parameter_bytes(self, meta: TensorMeta, stored: Stored) -> tuple[float, float, float]:
        """(weights, gradients, optimiser state) that stay allocated on one rank."""
        training = self.training
        local = num_local(meta, stored.placements, self.mesh)
        if not meta.requires_grad:
            return local * meta.dtype.itemsize, 0.0, 0.0
        size, zero = self.zero_size(stored), stored.zero
        on_device = not training.offload
        is_away = zero == 3 and training.offload == "parameters"
        weights = 0.0 if is_away else training.compute_bytes * local / (size if zero == 3 else 1)
        master = training.master_bytes
        if training.compression.gather and zero in (1, 2) and size > 1 and can_compress(meta):
            # What all ranks compute with is rounded, so that the masters lie beside it in fp32 too.
            master = 4
        weights += master * local / size if on_device else 0.0
        # As codegen/runtime/flat.py: stage 1 keeps the whole gradient beside its part of the sum where several
        # micro-batches add up, and works as stage 2 where one does not.
        shares = 1 / size if zero >= 2 or (zero and training.num_micro_batches == 1) else 1 + (1 / size if zero else 0)
        gradients = training.gradient_bytes * local * shares
        return weights, gradients, training.state_bytes * local / size if on_device else 0.0

    def gathered_bytes(self, meta: TensorMeta, stored: Stored) -> float:
        """The whole gradient (ZeRO-2) and also the whole parameter (ZeRO-3), while its unit is gathered."""
        if stored.zero < 2 or not meta.requires_grad:
            return 0.0
        wire = self.wire(meta, stored)
        width = self.training.gradient_bytes + (wire.reduce if wire.reduce_code else 0)
        if stored.zero == 3:
            width += self.training.compute_bytes + (wire.gather if wire.gather_code else 0)
        return num_local(meta, stored.placements, self.mesh) * width * (1.0 + self.fragmentation)

    def zero_size(self, stored: Stored) -> int:
        """Ranks over which a parameter's state is sharded."""
        return self.mesh.size("dp") if stored.zero else 1

    # --- activations ------------------------------------------------------------------------------------------

    def saved_bytes(self, operator: Operator, option: Option, kept: tuple[Ref, ...]) -> float:
        """Activations that this call is first to keep for one micro-batch's backward."""
        total = 0.0
        for ref in kept:
            if ref.node == operator.node.name:
                meta, placements = operator.node.outputs[ref.index], option.outputs[ref.index]
            else:
                position = operator.node.inputs.index(ref)
                meta, placements = operator.inputs[position], option.inputs[position]
            total += num_local(meta, placements, self.mesh) * meta.dtype.itemsize
        if any(meta.requires_grad for meta in operator.node.outputs):
            local = num_local(operator.node.outputs[0], option.outputs[0], self.mesh)
            total += self.extra_saved_bytes(operator.node, operator.inputs, local)
        return total * (1.0 + self.fragmentation)

    def extra_saved_bytes(self, node: Node, inputs: tuple[TensorMeta, ...], num_local: int) -> int:
        """Bytes kept that are neither inputs nor outputs (saved.py); num_local: elements of this rank's result."""
        return extra_saved_bytes(node, inputs, num_local)

    def kernel_bytes(self, operator: Operator, option: Option) -> tuple[float, float]:
        """(kept beside inputs and results, temporaries of the forward) of a fused call; see kernels.py."""
        return 0.0, 0.0

    def compute_kinds(self, operator: Operator) -> tuple[str, str]:
        """Under which kinds the seconds of a call's forward and backward are told."""
        return "forward compute", "backward compute"

    def dtype_name(self, meta: TensorMeta) -> str:
        """What contractions with this result are computed in."""
        return _dtype_name(meta)


def _frozen(operator: Operator, kept: int) -> Operator:
    """The call as if only its input `kept` needed a gradient."""
    inputs = tuple(m if i == kept else replace(m, requires_grad=False) for i, m in enumerate(operator.inputs))
    return replace(operator, inputs=inputs)


def contraction_flops(operator: Operator) -> float:
    """Multiply-adds times two of the whole call."""
    node = operator.node
    if base_name(node.op) in ATTENTION:
        query, key = operator.inputs[0], operator.inputs[1]
        causal = 0.5 if _is_causal(node) else 1.0
        return 4.0 * query.numel * key.shape[-2] * causal
    return 2.0 * math.prod(operator.rule.sizes[f] for f in _used_factors(operator))


def _used_factors(operator: Operator) -> set[str]:
    rule = operator.rule
    return {f for dims in (*rule.inputs, *rule.outputs) for dim in dims for f in dim}


def _is_causal(node: Node) -> bool:
    return len(node.args) > 5 and bool(node.args[5])


def num_local_dim(meta: TensorMeta, placements: Placements, mesh: Mesh, dim: int = -1) -> int:
    """Local size of a dim, counted from the last."""
    if not meta.shape:
        return 1
    number = len(meta.shape) + dim
    ways = math.prod(n for p, n in zip(placements, mesh.sizes, strict=True) if p.is_shard and p.dim == number)
    return max(meta.shape[dim] // ways, 1)


def _dtype_name(meta: TensorMeta) -> str:
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    return names.get(str(meta.dtype).removeprefix("torch."), "fp32")


def _unique(items: tuple[Placements, ...]) -> tuple[list[Placements], list[int]]:
    index: Mapping[Placements, int] = {item: i for i, item in enumerate(dict.fromkeys(items))}
    return list(index), [index[item] for item in items]
