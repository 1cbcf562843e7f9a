"""Prices under a framework's profile: fused kernels, the attention kernel, the optimizer, the dtype of matmuls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costs.context import AttentionSeconds, ContextCall, NearCall
from autopar.costs.price import Pricer
from autopar.errors import ConstraintError
from autopar.ir.graph import TensorMeta, base_name, has_dropout, is_causal
from autopar.ir.placement import Placements, Stored
from autopar.operators.traits import ATTENTION, MATMULS
from autopar.sharding.call_options import Operator, Option, num_local
from autopar.strategies.fusion import Part
from cost_models import compute
from cost_models.framework_profiles import Framework
from cost_models.hardware import DTYPE_FALLBACKS
from cost_models.mixed import AnyCluster

PRECISIONS: Mapping[str, tuple[str, str]] = {
    "fp32": ("fp32", "fp32"),
    "tf32": ("fp32", "tf32"),
    "bf16": ("bf16", "bf16"),
    "fp16": ("bf16", "fp16"),
    "fp8": ("bf16", "fp8"),
    "mxfp8": ("bf16", "mxfp8"),
    "nvfp4": ("bf16", "nvfp4"),
}
"""Precision -> (how the model is traced, dtype of the matmuls). Of the last three only linear layers are in them."""

CASTS: Mapping[str, float] = {"fp8": 2.0, "mxfp8": 2.03125, "nvfp4": 2.5625}
"""What casting a tensor moves, by its 16-bit bytes: read once, and written as it is and transposed, with a byte of
scale for 32 values (mxfp8) or 16 (nvfp4, whose tensor is read once more for a scale of its own). Transformer Engine's
user guide, "MXFP8" and "NVFP4". fp8 is of delayed scaling, where no tensor is read for its largest value first."""

FORWARD_PASSES = 6.5 / 14.0
"""Share of an unfused attention's passes over the scores that forward makes (frameworks.toml)."""

UNFUSED_LOSS_BYTES = 40.0
"""Bytes moved per logit from which a loss keeps its softmax for backward (frameworks.toml)."""

VECTOR_EFFICIENCY = 0.93
"""The fraction of the peak that fp32 matmuls reach without matrix units, where a device's own figure is of those: what
cuBLAS is known to reach on large ones; an assumption that published fp32 rows agree with."""

NO_GRADIENT_READ = frozenset({"add", "sub", "dropout", "neg", "to", "cat", "clone"})
"""Calls whose backward needs no input again."""


@dataclass
class ProfiledPricer(Pricer):
    """Prices of one framework. parts: fused calls; matmul_dtype, attention: see `Framework` and PRECISIONS."""

    has_idioms = False
    framework: Framework = field(default_factory=lambda: Framework("", ""))
    parts: Mapping[tuple[str, str], Part] = field(default_factory=dict)
    matmul_dtype: str = "bf16"
    attention: str = "flash"

    @property
    def gathers_again(self) -> bool:
        """As the framework's linear layers do."""
        return self.framework.gathers_again

    def dtype_name(self, meta: TensorMeta) -> str:
        """Return the dtype that contractions of this dtype are computed in."""
        planned_dtype = super().dtype_name(meta)
        traced = "fp32" if self.matmul_dtype in ("fp32", "tf32") else "bf16"
        return self.matmul_dtype if planned_dtype == traced else planned_dtype

    def compute_kinds(self, operator: Operator) -> tuple[str, str]:
        """Matmuls, attention and memory-bound kernels are told apart."""
        name = base_name(operator.node.op)
        kind = "matmuls" if name in MATMULS else "attention" if name in ATTENTION else "memory-bound kernels"
        return f"forward {kind}", f"backward {kind}"

    # --- compute ----------------------------------------------------------------------------------------------

    def operator_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Seconds (forward, backward) of one call."""
        forward, backward = self._plain_seconds(operator, option)
        name, device = base_name(operator.node.op), self.cluster.device
        if name not in MATMULS:
            return forward, backward
        if self.matmul_dtype == "fp32" and device.peak("fp32") < device.peak("fp16"):
            rate = device.matmul_efficiency / VECTOR_EFFICIENCY
            forward, backward = forward * rate, backward * rate
        return forward, backward

    def _plain_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        name = base_name(operator.node.op)
        if name in ATTENTION:
            if directions := self.context_directions(operator, option):
                return directions[0].seconds, directions[1].seconds
            return self._kernel_seconds(operator, option, None)
        if name == "cross_entropy_loss" and self.framework.loss_bytes:
            moved = self.framework.loss_bytes * num_local(operator.inputs[0], option.inputs[0], self.mesh) / 2
            return self.memory_seconds(moved) + self._inner_seconds(operator, option)[0], self.memory_seconds(moved)
        if name in MATMULS and self.matmul_dtype in CASTS:
            plain, casts = super().operator_seconds(operator, option), self._cast_seconds(operator, option)
            return plain[0] + casts[0], plain[1] + casts[1]
        part = self.parts.get((operator.scope, operator.node.name))
        if part is None or name in MATMULS:
            return super().operator_seconds(operator, option)
        return self._part_seconds(operator, option, part)

    def _part_seconds(self, operator: Operator, option: Option, part: Part) -> tuple[float, float]:
        """A call's own readings and writings in a fused kernel, whose launch its first call pays for."""
        sizes_in = [self._local_bytes(m, p) for m, p in zip(operator.inputs, option.inputs, strict=True)]
        sizes_out = [self._local_bytes(m, p) for m, p in zip(operator.node.outputs, option.outputs, strict=True)]
        read = sum(size for size, is_read in zip(sizes_in, part.reads, strict=True) if is_read)
        written = sum(size for size, is_read in zip(sizes_out, part.writes, strict=True) if is_read)
        again = base_name(operator.node.op) not in NO_GRADIENT_READ
        back = written + sum(
            size * (2 if again else 1)
            for size, is_read, meta in zip(sizes_in, part.reads, operator.inputs, strict=True)
            if is_read and meta.requires_grad
        )
        has_gradient = any(meta.requires_grad for meta in operator.inputs)
        forward, backward = (self.part_seconds(size, part.is_first) for size in (read + written, back))
        return forward, backward if has_gradient else 0.0

    def part_seconds(self, num_bytes: float, launches: bool) -> float:
        """A part of a memory-bound kernel that moves num_bytes."""
        launch = self.cluster.device.kernel_launch_seconds
        if num_bytes <= 0:
            return launch if launches else 0.0
        whole = self.memory_seconds(num_bytes)
        return whole if launches else max(whole - launch, 0.0)

    def _cast_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Every operand is read in 16 bits and written in fewer, as it is and transposed; backward the gradient."""
        sizes = [self._local_bytes(m, p) for m, p in zip(operator.inputs, option.inputs, strict=True)]
        cast_bytes = self._local_bytes(operator.node.outputs[0], option.outputs[0])
        moved = CASTS[self.matmul_dtype]
        return self.memory_seconds(moved * sum(sizes)), self.memory_seconds(moved * cast_bytes)

    def context_kernels(self, call: ContextCall | NearCall, operator: Operator, option: Option) -> AttentionSeconds:
        """Each part of the keys takes its share of one kernel over all of them."""
        forward, backward = self._kernel_seconds(operator, option, call)
        whole = call.size * call.keys
        return lambda keys, causal: (forward * keys / whole, backward * keys / whole)

    def _kernel_seconds(
        self, operator: Operator, option: Option, call: ContextCall | NearCall | None
    ) -> tuple[float, float]:
        """One attention kernel of a rank's queries and all keys that they see. call: where ranks exchange keys."""
        seconds = self._unfused_attention_seconds if self.attention == "unfused" else self._flash_attention_seconds
        query, key = operator.inputs[0], operator.inputs[1]
        local = num_local(query, option.inputs[0], self.mesh)
        queries = call.queries if call else query.shape[-2]
        heads = max(local // (queries * query.shape[-1]), 1)
        received = (call.size - 1) * call.part if call else 0.0
        return seconds(operator, option, (heads, queries, key.shape[-2]), received)

    def _flash_attention_seconds(
        self, operator: Operator, option: Option, shape: tuple[int, int, int], received: float
    ) -> tuple[float, float]:
        """shape: heads, queries, keys. received: bytes of the keys and values of other ranks."""
        heads, queries, keys = shape
        causal = is_causal(operator.node)
        flops = 4.0 * heads * queries * keys * operator.inputs[0].shape[-1] * (0.5 if causal else 1.0)
        moved = sum(self._local_bytes(m, p) for m, p in zip(operator.inputs, option.inputs, strict=True))
        moved += self._local_bytes(operator.node.outputs[0], option.outputs[0]) + received
        dtype = "bf16" if self.matmul_dtype in CASTS else self.dtype_name(operator.node.outputs[0])
        variant = "fa2" if self.attention == "flash" else self.attention
        return self._flash_seconds(flops, moved, dtype, shape, causal, variant)

    def _unfused_attention_seconds(
        self, operator: Operator, option: Option, shape: tuple[int, int, int], received: float
    ) -> tuple[float, float]:
        """Two batched matmuls over all of the scores, causal or not, and the passes over the scores."""
        batch, rows, columns = shape
        width, size = operator.inputs[0].shape[-1], operator.inputs[0].dtype.itemsize
        dtype = "bf16" if self.matmul_dtype in CASTS else self.dtype_name(operator.node.outputs[0])
        flops = 2.0 * batch * rows * columns * width
        moved = size * batch * (rows * columns + (rows + columns) * width)
        device = self.cluster.device
        product = compute.seconds(
            compute.Work(kind="matmul", flops=flops, num_bytes=moved, dtype=dtype, shape=(rows, columns, width)), device
        )
        scores = float(size * batch * rows * columns)
        # What the matmuls move of the scores is in their own bytes; two of the passes forward, four backward.
        passes = self.framework.attention_passes
        forward = self.memory_seconds(max(passes * FORWARD_PASSES - 2, 0) * scores)
        backward = self.memory_seconds(max(passes * (1 - FORWARD_PASSES) - 4, 0) * scores)
        return 2 * product + forward, 4 * product + backward

    def _local_bytes(self, meta: TensorMeta, placements: Placements) -> float:
        return float(num_local(meta, placements, self.mesh) * meta.dtype.itemsize)

    # --- parameters -------------------------------------------------------------------------------------------

    def optimizer_seconds(self, meta: TensorMeta, stored: Stored, count: int = 1) -> float:
        """The update of one parameter, at the bandwidth that memory-bound kernels reach."""
        moved = self.framework.optimizer_bytes
        if self.training.offload or not moved or not meta.requires_grad:
            return super().optimizer_seconds(meta, stored, count)
        device = self.cluster.device
        elements = num_local(meta, stored.placements, self.mesh) / self.zero_size(stored)
        return elements * moved / (device.memory_bytes_per_second * device.memory_efficiency)

    def accumulation_seconds(self, meta: TensorMeta, stored: Stored, count: int = 1) -> float:
        """Seconds of adding up gradients: 0, as `stages.profiled` adds what the framework moves."""
        return 0.0

    def parameter_bytes(self, meta: TensorMeta, stored: Stored) -> tuple[float, float, float]:
        """(weights, gradients, optimizer state) with the framework's copy of gradients."""
        weights, gradients, state = super().parameter_bytes(meta, stored)
        if meta.requires_grad and stored.zero < 2:
            gradients += self.framework.gradient_copy_bytes * num_local(meta, stored.placements, self.mesh)
        return weights, gradients, state

    # --- activations ------------------------------------------------------------------------------------------

    def made_bytes(self, operator: Operator, option: Option) -> float:
        """An unfused attention keeps its probabilities; with dropout also what is left of them, and the mask. An
        unfused loss keeps its softmax."""
        node, inputs = operator.node, operator.inputs
        if base_name(node.op) == "cross_entropy_loss" and self.framework.loss_bytes >= UNFUSED_LOSS_BYTES:
            # The softmax, in fp32; the vocabulary is cut where matrices are.
            ways = self.mesh.num_ranks if self.framework.shards_weights else self.mesh.num_data_ranks
            return 4 * inputs[0].numel // ways
        if base_name(node.op) not in ATTENTION or self.attention != "unfused":
            return super().made_bytes(operator, option)
        query, key = inputs[0], inputs[1]
        rows = num_local(node.outputs[0], option.outputs[0], self.mesh) / query.shape[-1]
        scores = math.ceil(rows) * key.shape[-2]
        return scores * (2 * query.dtype.itemsize + 1 if has_dropout(node) else query.dtype.itemsize)


def matmul_dtype(precision: str, cluster: AnyCluster) -> str:
    """Return the dtype of matmuls. Raises ConstraintError where a device has no units for it, nor others for it."""
    dtype = PRECISIONS[precision][1]
    for group in cluster.groups:
        peaks = group.device.peak_flops_per_second
        if dtype not in peaks and not DTYPE_FALLBACKS[dtype]:
            raise ConstraintError(
                "the device has no units for this precision",
                values=f"{precision} on {group.device.name}",
                alternatives=", ".join(name for name, (_, peak) in PRECISIONS.items() if peak in peaks),
            )
    return dtype


def traced_as(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ConstraintError("precision is not supported", values=repr(precision), alternatives=", ".join(PRECISIONS))
    return PRECISIONS[precision][0]
