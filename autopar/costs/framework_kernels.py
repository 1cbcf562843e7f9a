"""Prices of a published framework's kernels: attention, casts, fused calls, and the dtype of matmuls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costs.context import GENERATED, PUBLISHED, AttentionSeconds, ContextCall, Habits, NearCall
from autopar.costs.rates import FLASH, Rates, dtype_name, num_local_bytes
from autopar.ir.graph import TensorMeta, base_name, has_dropout, is_causal
from autopar.ir.mesh import Mesh
from autopar.operators.traits import ATTENTION, MATMULS
from autopar.sharding.call_options import Operator, Option, num_local
from cost_models import compute
from cost_models.framework_profiles import Framework

CAST_BYTES: Mapping[str, float] = {"fp8": 2.0, "mxfp8": 2.03125, "nvfp4": 2.5625}
"""Bytes that casting a tensor moves, relative to its 16-bit bytes: read once, and written as it is and transposed, with
a byte of scale for 32 values (mxfp8) or 16 (nvfp4, whose tensor is read once more for a separate scale). Transformer
Engine's user guide, "MXFP8" and "NVFP4". fp8 stands for delayed scaling, which reads no tensor for its largest value
first."""

FORWARD_PASSES = 6.5 / 14.0
"""Share of an unfused attention's passes over the scores that forward makes (frameworks.toml)."""

UNFUSED_LOSS_BYTES = 40.0
"""Bytes moved per logit from which a loss keeps its softmax for backward (frameworks.toml)."""

VECTOR_EFFICIENCY = 0.93
"""The fraction of the peak that fp32 matmuls reach without matrix units, where a device's efficiency is for matrix
units: cuBLAS is known to reach it on large matrices; an assumption that published fp32 rows agree with."""

NO_GRADIENT_READ = frozenset({"add", "sub", "dropout", "neg", "to", "cat", "clone"})
"""Calls whose backward needs no input again."""

Key = tuple[str, str]
"""(scope, call)"""


@dataclass(frozen=True, slots=True)
class Part:
    """One call of a fused kernel. reads: per input, whether it comes from memory. writes: per output, whether it goes
    there. is_first: whether the kernel is launched for it."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]
    is_first: bool


@dataclass(frozen=True, slots=True)
class FrameworkKernels:
    """The kernels of one framework. profile: its constants. parts: calls that are fused with others. attention: as in
    `Framework`. matmul_dtype: of cost_models.hardware."""

    profile: Framework
    parts: Mapping[Key, Part]
    matmul_dtype: str
    attention: str

    @property
    def habits(self) -> Habits:
        """Return how ranks that share a sequence exchange keys and values."""
        return GENERATED if self.profile.cp_habits == "generated" else PUBLISHED

    @property
    def is_cast(self) -> bool:
        """Return whether matmuls multiply in a narrower dtype than that of their tensors."""
        return self.matmul_dtype in CAST_BYTES

    def dtype_name(self, meta: TensorMeta) -> str:
        """Return the dtype of contractions with this result."""
        planned_dtype = dtype_name(meta)
        traced = "fp32" if self.matmul_dtype in ("fp32", "tf32") else "bf16"
        return self.matmul_dtype if planned_dtype == traced else planned_dtype

    def compute_kinds(self, operator: Operator) -> tuple[str, str]:
        """Return the kinds of a call's seconds: matmuls, attention and memory-bound kernels are reported apart."""
        name = base_name(operator.node.op)
        kind = "matmuls" if name in MATMULS else "attention" if name in ATTENTION else "memory-bound kernels"
        return f"forward {kind}", f"backward {kind}"

    # --- matmuls ------------------------------------------------------------------------------------------------------

    def with_casts(
        self, seconds: tuple[float, float], operator: Operator, option: Option, rates: Rates
    ) -> tuple[float, float]:
        """Return the seconds of a matmul with its casts, at the rate of the units that multiply in its dtype.

        Each operand is read in 16 bits and written in fewer, as it is and transposed; in backward the gradient is.
        """
        forward, backward = seconds
        if self.is_cast:
            moved, mesh = CAST_BYTES[self.matmul_dtype], rates.mesh
            sizes = [num_local_bytes(m, p, mesh) for m, p in zip(operator.inputs, option.inputs, strict=True)]
            forward += rates.memory_seconds(moved * sum(sizes))
            backward += rates.memory_seconds(moved * num_local_bytes(operator.node.outputs[0], option.outputs[0], mesh))
        device = rates.cluster.device
        if self.matmul_dtype == "fp32" and device.peak("fp32") < device.peak("fp16"):
            rate = device.matmul_efficiency / VECTOR_EFFICIENCY
            forward, backward = forward * rate, backward * rate
        return forward, backward

    # --- attention ----------------------------------------------------------------------------------------------------

    def context_kernels(
        self, call: ContextCall | NearCall, operator: Operator, option: Option, rates: Rates
    ) -> AttentionSeconds:
        """Return the seconds of attention over some keys: their share of one kernel over all of them."""
        forward, backward = self.attention_seconds(operator, option, rates, call)
        whole = call.size * call.keys
        return lambda keys, causal: (forward * keys / whole, backward * keys / whole)

    def attention_seconds(
        self, operator: Operator, option: Option, rates: Rates, call: ContextCall | NearCall | None = None
    ) -> tuple[float, float]:
        """Price one kernel of a rank's queries and all keys that they see. call: where ranks exchange keys."""
        query, key = operator.inputs[0], operator.inputs[1]
        local = num_local(query, option.inputs[0], rates.mesh)
        queries = call.queries if call else query.shape[-2]
        shape = (max(local // (queries * query.shape[-1]), 1), queries, key.shape[-2])
        dtype = "bf16" if self.is_cast else self.dtype_name(operator.node.outputs[0])
        if self.attention == "unfused":
            return self._unfused_seconds(operator, shape, dtype, rates)
        received = (call.size - 1) * call.part if call else 0.0
        causal = is_causal(operator.node)
        flops = 4.0 * math.prod(shape) * query.shape[-1] * (0.5 if causal else 1.0)
        moved = sum(num_local_bytes(m, p, rates.mesh) for m, p in zip(operator.inputs, option.inputs, strict=True))
        moved += num_local_bytes(operator.node.outputs[0], option.outputs[0], rates.mesh) + received
        variant = FLASH if self.attention == "flash" else self.attention
        return rates.flash_seconds(flops, moved, dtype, shape, causal, variant)

    def _unfused_seconds(
        self, operator: Operator, shape: tuple[int, int, int], dtype: str, rates: Rates
    ) -> tuple[float, float]:
        """Price two batched matmuls over all of the scores, causal or not, and the passes over the scores."""
        batch, rows, columns = shape
        width, size = operator.inputs[0].shape[-1], operator.inputs[0].dtype.itemsize
        flops = 2.0 * batch * rows * columns * width
        moved = size * batch * (rows * columns + (rows + columns) * width)
        product = compute.seconds(
            compute.Work(kind="matmul", flops=flops, num_bytes=moved, dtype=dtype, shape=(rows, columns, width)),
            rates.cluster.device,
        )
        scores = float(size * batch * rows * columns)
        # The products' traffic includes some passes over the scores: two forward, four backward.
        passes = self.profile.attention_passes
        forward = rates.memory_seconds(max(passes * FORWARD_PASSES - 2, 0) * scores)
        backward = rates.memory_seconds(max(passes * (1 - FORWARD_PASSES) - 4, 0) * scores)
        return 2 * product + forward, 4 * product + backward

    # --- memory-bound calls -------------------------------------------------------------------------------------------

    def loss_bytes(self, operator: Operator, option: Option, mesh: Mesh) -> float:
        """Return the bytes that a language model's loss moves in each direction; 0 for other calls, and for a loss like
        that of generated programs."""
        if base_name(operator.node.op) != "cross_entropy_loss":
            return 0.0
        return self.profile.loss_bytes * num_local(operator.inputs[0], option.inputs[0], mesh) / 2

    def part_of(self, operator: Operator) -> Part | None:
        """Return a call's part of a fused kernel; None for matmuls and for calls that are not fused."""
        is_matmul = base_name(operator.node.op) in MATMULS
        return None if is_matmul else self.parts.get((operator.scope, operator.node.name))

    def made_bytes(self, operator: Operator, option: Option, mesh: Mesh) -> float | None:
        """Return the kept bytes that are neither inputs nor outputs; None where the framework keeps what generated
        programs do.

        An unfused attention keeps its probabilities; with dropout also what is left of them, and the mask. An unfused
        loss keeps its softmax in fp32; the vocabulary is sharded where matrices are.
        """
        node, inputs = operator.node, operator.inputs
        if base_name(node.op) == "cross_entropy_loss" and self.profile.loss_bytes >= UNFUSED_LOSS_BYTES:
            ways = mesh.num_ranks if self.profile.shards_weights else mesh.num_data_ranks
            return 4 * inputs[0].numel // ways
        if base_name(node.op) not in ATTENTION or self.attention != "unfused":
            return None
        query, key = inputs[0], inputs[1]
        rows = num_local(node.outputs[0], option.outputs[0], mesh) / query.shape[-1]
        scores = math.ceil(rows) * key.shape[-2]
        return scores * (2 * query.dtype.itemsize + 1 if has_dropout(node) else query.dtype.itemsize)


def part_seconds(part: Part, operator: Operator, option: Option, rates: Rates) -> tuple[float, float]:
    """Price a call's traffic in a fused kernel, whose launch its first call pays for."""
    sizes_in = [num_local_bytes(m, p, rates.mesh) for m, p in zip(operator.inputs, option.inputs, strict=True)]
    outputs = zip(operator.node.outputs, option.outputs, part.writes, strict=True)
    read = sum(size for size, is_read in zip(sizes_in, part.reads, strict=True) if is_read)
    written = sum(num_local_bytes(m, p, rates.mesh) for m, p, is_written in outputs if is_written)
    again = base_name(operator.node.op) not in NO_GRADIENT_READ
    behind = written + sum(
        size * (2 if again else 1)
        for size, is_read, meta in zip(sizes_in, part.reads, operator.inputs, strict=True)
        if is_read and meta.requires_grad
    )
    has_gradient = any(meta.requires_grad for meta in operator.inputs)
    forward, backward = (_part_of_kernel(num_bytes, part.is_first, rates) for num_bytes in (read + written, behind))
    return forward, backward if has_gradient else 0.0


def _part_of_kernel(num_bytes: float, launches: bool, rates: Rates) -> float:
    """Price the part of a memory-bound kernel that moves num_bytes."""
    launch = rates.cluster.device.kernel_launch_seconds
    if num_bytes <= 0:
        return launch if launches else 0.0
    whole = rates.memory_seconds(num_bytes)
    return whole if launches else max(whole - launch, 0.0)
