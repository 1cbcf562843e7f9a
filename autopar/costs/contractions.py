"""FLOPs and seconds of matmuls and attention at local sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.costs.context import (
    GENERATED,
    AttentionSeconds,
    ContextCall,
    Direction,
    NearCall,
    context_call,
    seen_keys,
)
from autopar.costs.expert_rows import ExpertRows, RowPrices
from autopar.costs.fp8 import Fp8Layers
from autopar.costs.framework_kernels import FrameworkKernels
from autopar.costs.rates import Rates, are_aligned, dtype_name, is_cpu, num_local_dim
from autopar.costs.sink_attention import Sinks, sinks
from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, TensorMeta, base_name, is_causal
from autopar.ir.mesh import Mesh
from autopar.operators.traits import ATTENTION, BATCHED_PRODUCTS, CONVOLUTIONS
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.sharding.call_options import Operator, Option, num_local
from cost_models import compute
from cost_models.machine import Cluster

MATH_PASSES = ((3, 2, 1, 2), (3, 2))
"""Reads and writes of the fp32 scores by each kernel between the products of torch's math path, forward and backward:
the mask is added, softmax, rows without any key, their zeros; the gradients of both. Counted in T5's kernels
(shared/data/gpu_h100_families.jsonl): 14 passes, at the rate of memory."""
VALUE_FEATURES = "f"
"""The factor of values and result that the scores of attention lack (rules/families/attention.py)."""


@dataclass(frozen=True)
class Contractions:
    """Prices of calls whose FLOPs count: matmuls and attention. has_kernels: whether programs have fused kernels.
    fp8, framework, experts: as of Pricer."""

    rates: Rates
    has_kernels: bool = False
    fp8: Fp8Layers | None = None
    framework: FrameworkKernels | None = None
    experts: ExpertRows = ExpertRows()

    @cached_property
    def rows(self) -> RowPrices:
        """Return the prices of rows that reach their experts."""
        return RowPrices(self.rates, self.experts, self.has_kernels and not is_cpu(self.cluster))

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the rates."""
        return self.rates.mesh

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of the rates."""
        return self.rates.cluster

    def contraction_seconds(self, operator: Operator, option: Option, num_bytes: float) -> tuple[float, float]:
        """Return the seconds (forward, backward) of a matmul or attention that reads and writes num_bytes. A
        matmul's backward has a product for each trained factor."""
        if base_name(operator.node.op) in ATTENTION:
            return self.attention_seconds(operator, option, num_bytes)
        forward, wrt_input, wrt_weight = self.matmul_seconds(operator, option, num_bytes)
        is_routed, load = operator.node.op == EXPERT_LINEAR, 1.0
        read = operator.inputs[:2] if is_routed else [meta for meta in operator.inputs if len(meta.shape) > 1][-2:]
        factors = [meta.requires_grad for meta in read]
        products = (wrt_input, wrt_weight)[2 - len(factors) :]
        backward = sum(product for product, is_trained in zip(products, factors, strict=True) if is_trained)
        if is_routed:
            load = self.rows.load(operator, option)
            forward, backward = forward * load, backward * load
        biases = operator.inputs[3:] if is_routed else [meta for meta in operator.inputs if len(meta.shape) == 1]
        if any(meta.requires_grad for meta in biases):
            # The gradient of a bias is a sum over all rows.
            output = operator.node.outputs[0]
            size = num_local(output, option.outputs[0], self.mesh) * output.dtype.itemsize
            backward += self.rates.memory_seconds(load * size)
        if self.framework is not None:
            forward, backward = self.framework.with_casts((forward, backward), operator, option, self.rates, load)
        if is_routed:
            rows = self.rows.exchange(operator, option)
            behind = rows.copies + self.rows.copies_behind(operator, option)
            spared = self.rows.spared_seconds(operator, option)
            forward = max(forward + rows.forward + rows.copies - spared[0], 0.0)
            backward = max(backward + rows.backward + behind - spared[1], 0.0) if any(factors) else 0.0
        return forward, backward

    def local_flops(self, operator: Operator, option: Option) -> float:
        """Return the floating-point operations of one rank."""
        rule = operator.rule
        ways = math.prod(n for a, n in zip(option.axes, self.mesh.sizes, strict=True) if rule.sharded_by(a.label, n))
        return contraction_flops(operator) / ways

    def dtype_name(self, meta: TensorMeta) -> str:
        """Return the dtype of contractions with this result."""
        return self.framework.dtype_name(meta) if self.framework is not None else dtype_name(meta)

    def attention_seconds(self, operator: Operator, option: Option, num_bytes: float) -> tuple[float, float]:
        """Price forward and backward of one attention kernel, or of several with exchanges between ranks."""
        if directions := self.context_directions(operator, option):
            forward, backward = (direction.seconds for direction in directions)
        elif self.framework is not None:
            forward, backward = self.framework.attention_seconds(operator, option, self.rates)
        elif takes_math_path(operator) and not is_cpu(self.cluster):
            forward, backward = self._math_seconds(operator, option)
        else:
            query = operator.inputs[0]
            queries, width = query.shape[-2], query.shape[-1]
            heads = max(num_local(query, option.inputs[0], self.mesh) // (queries * width), 1)
            # Ranks that share the features of the values compute all scores each: half of the work.
            widths = [n for a, n in zip(option.axes, self.mesh.sizes, strict=True) if a.label == VALUE_FEATURES]
            flops = self.local_flops(operator, option) * (1 + math.prod(widths)) / 2
            dtype, shape = dtype_name(operator.node.outputs[0]), (heads, queries, seen_keys(operator))
            forward, backward = self.rates.flash_seconds(flops, num_bytes, dtype, shape, is_causal(operator.node))
        if self.framework is not None:
            return forward, backward
        if repeated := self.repeated_bytes(operator, option):
            forward += self.rates.memory_seconds(2 * repeated)
            backward += self.rates.memory_seconds(2 * repeated)
        if operator.node.op == SINK_ATTENTION:
            sink_bytes = self.sinks(operator, option)
            forward += self.rates.memory_seconds(sink_bytes.moved_forward)
            backward += self.rates.memory_seconds(sink_bytes.moved_backward)
        return forward, backward if any(meta.requires_grad for meta in operator.inputs) else 0.0

    def _math_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Price torch's math path: products of fp32 copies, two forward and four backward, and passes over scores."""
        query, key = operator.inputs[:2]
        queries, width, keys = query.shape[-2], query.shape[-1], key.shape[-2]
        batch = max(num_local(query, option.inputs[0], self.mesh) // (queries * width), 1)
        scores, flops = batch * queries * keys, 2.0 * batch * queries * keys * width
        moved = 4.0 * (scores + batch * (queries + keys) * width)
        shapes = (queries, keys, width), (queries, width, keys)
        products = sum(
            compute.seconds(compute.Work("matmul", flops, moved, "fp32", shape=shape), self.cluster.device)
            for shape in shapes
        )
        forward, backward = (sum(self.rates.memory_seconds(4.0 * scores * n) for n in passes) for passes in MATH_PASSES)
        return products + forward, 2 * products + backward

    def context_directions(self, operator: Operator, option: Option) -> tuple[Direction, Direction] | None:
        """Return forward and backward of attention over keys of several ranks; None for other calls."""
        call = self.context_call(operator, option)
        if call is None:
            return None
        kernels = self.context_kernels(call, operator, option)
        return call.directions(self.rates.collective_seconds, self.rates.memory_seconds, kernels)

    def context_kernels(self, call: ContextCall | NearCall, operator: Operator, option: Option) -> AttentionSeconds:
        """Return the seconds of the kernels of attention over keys of several ranks."""
        if self.framework is not None:
            return self.framework.context_kernels(call, operator, option, self.rates)
        output, width = operator.node.outputs[0], operator.inputs[0].shape[-1]
        dtype = dtype_name(output)
        tensors = [*zip(operator.inputs, option.inputs, strict=True), (output, option.outputs[0])]
        num_bytes = sum(num_local(meta, lies, self.mesh) * meta.dtype.itemsize for meta, lies in tensors)

        def seconds(keys: int, causal: bool) -> tuple[float, float]:
            shape, moved = (call.heads, call.queries, keys), num_bytes + call.part * (keys / call.keys - 1)
            work = 4.0 * math.prod(shape) * width * (0.5 if causal else 1.0)
            return self.rates.flash_seconds(work, moved, dtype, shape, causal)

        return seconds

    def repeated_bytes(self, operator: Operator, option: Option) -> float:
        """Return the bytes of the keys and values that windows on a GPU repeat for the heads that share them
        (codegen/runtime/windows.py)."""
        query, key, value = operator.inputs[:3]
        is_grouped = operator.node.op == WINDOW_ATTENTION and query.shape[-3] != key.shape[-3]
        if not is_grouped or is_cpu(self.cluster) or self.context_call(operator, option):
            return 0.0
        heads = num_local(query, option.inputs[0], self.mesh) // (query.shape[-2] * query.shape[-1])
        return float(heads * key.shape[-2] * (key.shape[-1] + value.shape[-1]) * key.dtype.itemsize)

    def sinks(self, operator: Operator, option: Option) -> Sinks:
        """Return the extra cost of attention with sinks over attention without."""
        is_exchanged = self.context_call(operator, option) is not None
        return sinks(operator, option, self.mesh, is_cpu(self.cluster), is_exchanged)

    def context_call(self, operator: Operator, option: Option) -> ContextCall | NearCall | None:
        """Return one rank's form of an attention call whose keys are cut along the sequence; None for other calls."""
        if not operator.rule.joints:
            return None
        habits = GENERATED if self.framework is None else self.framework.habits
        return context_call(operator, option, self.mesh, is_cpu(self.cluster), habits)

    def matmul_seconds(self, operator: Operator, option: Option, num_bytes: float) -> tuple[float, float, float]:
        """Price the forward, the gradient with respect to the input, and that with respect to the weight."""
        flops = self.local_flops(operator, option)
        plain = self._products_seconds(operator, option, flops, num_bytes, self.dtype_name(operator.node.outputs[0]))
        product = self.fp8.product(operator, option, self.mesh) if self.fp8 is not None else None
        if self.fp8 is None or product is None:
            return plain
        forward, wrt_input, _ = self._products_seconds(operator, option, flops, product.moved_bytes, "fp8")
        casts = product.cast_bytes
        forward += self.rates.memory_seconds(casts.x) / self.fp8.num_sharing(operator)
        forward += self.rates.memory_seconds(casts.weight)
        wrt_input += self.rates.memory_seconds(casts.gradient) + self.rates.memory_seconds(casts.weight_again)
        return forward, wrt_input, plain[2]

    def _products_seconds(
        self, operator: Operator, option: Option, flops: float, num_bytes: float, dtype: str
    ) -> tuple[float, float, float]:
        """Price the products of `matmul_seconds` in one dtype."""
        output, placements = operator.node.outputs[0], option.outputs[0]
        is_convolution = base_name(operator.node.op) in CONVOLUTIONS
        of_columns = 1 - len(operator.inputs[1].shape) if is_convolution else -1
        columns = num_local_dim(output, placements, self.mesh, of_columns)
        if base_name(operator.node.op) in BATCHED_PRODUCTS and min(len(meta.shape) for meta in operator.inputs) > 2:
            # One product per element of the leading dims; flops counts all.
            rows = num_local_dim(output, placements, self.mesh, -2)
            batch = max(num_local(output, placements, self.mesh) // (rows * columns), 1)
            depth = max(round(flops / (2 * rows * columns * batch)), 1)
        else:
            rows = max(num_local(output, placements, self.mesh) // max(columns, 1), 1)
            depth = max(round(flops / (2 * rows * columns)), 1)
        launches = 1
        if operator.node.op == EXPERT_LINEAR:
            num_experts = local_experts(operator, option, self.mesh)
            rows, launches = max(rows // num_experts, 1), 1 if self.is_grouped(operator) else num_experts
        shapes = ((rows, columns, depth), (rows, depth, columns), (columns, depth, rows))
        # A framework pads what it multiplies; cuDNN has its own rules.
        aligned = is_convolution or self.framework is not None or are_aligned(dtype, columns, depth)
        works = (
            compute.Work("matmul", flops / launches, num_bytes / launches, dtype, shape=shape, aligned=aligned)
            for shape in shapes
        )
        forward, wrt_input, wrt_weight = (launches * compute.seconds(work, self.cluster.device) for work in works)
        return forward, wrt_input, wrt_weight

    def is_grouped(self, operator: Operator) -> bool:
        """Return whether one kernel multiplies the rows of all experts, rather than one kernel per expert.

        With fused kernels that is so on GPUs, in any dtype (codegen/runtime/grouped.py). Without, it is torch's kernel
        (codegen/runtime/experts.py) for bf16 on GPUs that multiply in fp8. These GPUs include compute capability 8.9,
        for which torch has no such kernel.
        """
        if is_cpu(self.cluster):
            return False
        is_torchs = operator.node.outputs[0].dtype == torch.bfloat16
        return self.has_kernels or is_torchs and "fp8" in self.cluster.device.peak_flops_per_second


def takes_math_path(operator: Operator) -> bool:
    """Return whether torch's attention has no fused kernel for the call on a GPU: its mask has a gradient."""
    is_plain = base_name(operator.node.op) == "scaled_dot_product_attention"
    return is_plain and len(operator.inputs) > 3 and operator.inputs[3].requires_grad


def local_experts(operator: Operator, option: Option, mesh: Mesh) -> int:
    """Return how many experts of an expert layer each rank has."""
    return num_local_dim(operator.inputs[1], option.inputs[1], mesh, -3)


def contraction_flops(operator: Operator) -> float:
    """Return the floating-point operations of the whole call; a multiply-add counts as two."""
    node = operator.node
    if base_name(node.op) in ATTENTION:
        causal = 0.5 if is_causal(node) else 1.0
        return 4.0 * operator.inputs[0].numel * seen_keys(operator) * causal
    if node.op == EXPERT_LINEAR:  # a row is multiplied by the matrix of one expert
        return 2.0 * operator.inputs[0].numel * operator.inputs[1].shape[-1]
    if base_name(node.op) in CONVOLUTIONS:
        # An element of the result is a sum over a window; so is one of a transposed convolution's input.
        (x, weight), output = operator.inputs[:2], node.outputs[0]
        windows = x if "transpose" in node.op else output
        return 2.0 * windows.numel * weight.numel / weight.shape[0]
    return 2.0 * math.prod(operator.rule.sizes[f] for f in _used_factors(operator))


def _used_factors(operator: Operator) -> set[str]:
    rule = operator.rule
    return {f for dims in (*rule.inputs, *rule.outputs) for dim in dims for f in dim}
