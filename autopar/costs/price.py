"""The price of one option: seconds of compute, of communication and of the optimizer, and bytes of memory.

All prices are per optimizer step and per rank; forward and backward run `num_micro_batches` times. A Pricer is
composed of values: the rates of a mesh (rates.py), fused kernels (kernels.py), layers in fp8 (fp8.py), and the kernels
of a published framework (framework_kernels.py). contractions.py prices matmuls and attention, parameter_prices.py
parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.costs import host
from autopar.costs.context import window_tiles
from autopar.costs.contractions import Contractions
from autopar.costs.expert_rows import ExpertRows
from autopar.costs.fp8 import Fp8Layers, Product
from autopar.costs.framework_kernels import FrameworkKernels, part_seconds
from autopar.costs.kept import made_bytes
from autopar.costs.kernels import (
    FusedKernels,
    fused_saved_bytes,
    fused_seconds,
    is_whole,
    lm_head_bytes,
    preferred_fusion,
)
from autopar.costs.parameter_prices import ParameterPrices
from autopar.costs.rates import Rates, Training, is_cpu, num_local_bytes
from autopar.costs.saved import Saved
from autopar.costs.specials import specials
from autopar.ir.draws import DRAW
from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, base_name
from autopar.ir.mesh import Mesh
from autopar.ir.operators import arguments_of
from autopar.operators.traits import ATTENTION, CONVOLUTIONS, DEFERRABLE, JOINS, MATMULS, VIEWS
from autopar.rules.families.convolution import HALO
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.rules.families.norm import SYNCHRONISED
from autopar.sharding.call_options import Operator, Option, num_local
from autopar.sharding.fusible_runs import Fusion
from codegen.fusion import KERNELS
from cost_models import compute
from cost_models.machine import Cluster

DRAW_BYTES = 256.0
"""Bytes that a draw moves per element: codegen/runtime/draws.py makes a dozen passes over 64-bit integers in chunks,
and three over fp32."""
NCHW_RATE = 0.27
"""The share of the rate of memory at which torch's batch norm moves bf16 images in NCHW: 0.7 of 2.6 TB/s, of 53 calls
in a ResNet-50 on an H100 (shared/data/gpu_h100_families.jsonl). Programs with fused kernels run such networks in
channels_last memory (codegen/passes/channels_last.py)."""
FREE = VIEWS | {"contiguous", "to", "arange", "full", "zeros", "ones", "in_training"} - {"reshape"}


@dataclass(frozen=True)
class Pricer:
    """Prices of calls and parameters: the rates of devices, and what programs run on them. Stores no decision.

    kernels: fused kernels, if programs have them. fp8: the linear layers in e4m3, if any. framework: the kernels of a
    published framework; None for generated programs. experts: how rows reach their experts.
    """

    rates: Rates
    kernels: FusedKernels | None = None
    fp8: Fp8Layers | None = None
    framework: FrameworkKernels | None = None
    experts: ExpertRows = ExpertRows()
    _preferred: dict[int, tuple[Operator, Fusion | None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def contractions(self) -> Contractions:
        """Return the prices of matmuls and attention."""
        return Contractions(
            self.rates,
            has_kernels=self.kernels is not None,
            fp8=self.fp8,
            framework=self.framework,
            experts=self.experts,
        )

    @cached_property
    def parameters(self) -> ParameterPrices:
        """Return the prices of parameters as they are stored."""
        profile = self.framework.profile if self.framework is not None else None
        return ParameterPrices(self.rates, has_kernels=self.kernels is not None, profile=profile)

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of the rates."""
        return self.rates.mesh

    @property
    def cluster(self) -> Cluster:
        """Return the cluster of the rates."""
        return self.rates.cluster

    @property
    def training(self) -> Training:
        """Return the settings of a training step."""
        return self.rates.training

    @property
    def has_idioms(self) -> bool:
        """Return whether named runs of calls are functions, which free their intermediates."""
        return self.framework is None

    @property
    def gathers_again(self) -> bool:
        """Return whether tensors gathered for a call are gathered again for its backward, with only the shard kept."""
        return self.framework is not None and self.framework.profile.gathers_again

    def fusion(self, operator: Operator) -> Fusion | None:
        """Return the run that programs for this mesh and device fuse the call into."""
        if self.kernels is None:
            return None
        cached = self._preferred.get(id(operator))
        if cached is None:  # the operator is kept, so that no other has its id
            fusion = preferred_fusion(operator, self.mesh, is_cpu(self.cluster))
            cached = self._preferred[id(operator)] = operator, fusion
        return cached[1]

    def fused(self, operator: Operator, option: Option) -> Fusion | None:
        """Return the run whose share a call pays: the program's, or without one the run that this decision leaves
        intact."""
        if self.kernels is not None and self.kernels.fusions is not None:
            return self.kernels.fusions.get((operator.scope, operator.node.name))
        fusion = self.fusion(operator)
        return fusion if fusion is not None and is_whole(fusion, operator, option) else None

    # --- seconds ------------------------------------------------------------------------------------------------------

    def operator_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the compute seconds (forward, backward) of one call at its local sizes, or of its share of a fused
        run."""
        if fusion := self.fused(operator, option):
            forward, backward = fused_seconds(fusion, operator, option, self.rates)
        elif self.framework is not None and (part := self.framework.part_of(operator)):
            forward, backward = part_seconds(part, operator, option, self.rates)
        else:
            forward, backward = self._call_seconds(operator, option)
        return forward, backward

    def _call_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the seconds of a call that is a kernel of its own."""
        name = base_name(operator.node.op)
        metas_in = operator.inputs
        if name in FREE and not any(a.lowering for a in option.axes):
            view = host.VIEW * host.launch_seconds(self.cluster) if name in VIEWS else 0.0
            return view, view if any(meta.requires_grad for meta in metas_in) else 0.0
        if operator.node.op == DRAW:
            elements = num_local(operator.node.meta, option.outputs[0], self.mesh)
            return self.rates.memory_seconds(DRAW_BYTES * elements), 0.0
        if not any(meta.requires_grad for meta in operator.node.outputs) and not metas_in:
            return 0.0, 0.0
        outputs, mesh = operator.node.outputs, self.rates.mesh
        bytes_in = sum(num_local_bytes(m, p, mesh) for m, p in zip(metas_in, option.inputs, strict=True))
        bytes_out = sum(num_local_bytes(m, p, mesh) for m, p in zip(outputs, option.outputs, strict=True))
        num_grads = sum(meta.requires_grad for meta in metas_in)
        is_image = len(outputs[0].shape) == 4 and not is_cpu(self.cluster) and self.framework is None
        if name in MATMULS or name in ATTENTION:
            return self._contraction_seconds(operator, option, bytes_in + bytes_out)
        forward = bytes_in + bytes_out
        backward = _backward_bytes(operator, bytes_in, bytes_out, num_grads)
        if name == "batch_norm" and is_image:
            # The forward reads the images once more for their statistics.
            rate = 1.0 if self.kernels is not None else NCHW_RATE
            forward, backward = (forward + bytes_in) / rate, backward / rate
        inner, inner_backward = self._inner_seconds(operator, option)
        if self.framework is not None and (moved := self.framework.loss_bytes(operator, option, self.mesh)):
            return self.rates.memory_seconds(moved) + inner, self.rates.memory_seconds(moved)
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
            return one + inner, two + inner_backward if num_grads else 0.0
        behind = self.rates.memory_seconds(backward) + inner_backward if num_grads else 0.0
        return self.rates.memory_seconds(forward) + inner, behind

    def _contraction_seconds(self, operator: Operator, option: Option, num_bytes: float) -> tuple[float, float]:
        """Return the seconds of a matmul, attention or convolution with its neighbors' rows of space."""
        forward, backward = self.contractions.contraction_seconds(operator, option, num_bytes)
        if converted := self._converted_bytes(operator, option):
            forward += self.rates.memory_seconds(converted)
            backward += self.rates.memory_seconds(converted) if backward else 0.0
        rows = self._neighbors_seconds(operator, option)
        return forward + rows, backward + rows if operator.inputs[0].requires_grad else backward

    def _converted_bytes(self, operator: Operator, option: Option) -> float:
        """Return the bytes that cuDNN moves to convert images of a 16-bit convolution from NCHW and back."""
        if base_name(operator.node.op) not in CONVOLUTIONS or self.kernels is not None or is_cpu(self.cluster):
            return 0.0
        tensors = (operator.inputs[0], option.inputs[0]), (operator.node.outputs[0], option.outputs[0])
        if len(tensors[0][0].shape) != 4 or tensors[0][0].dtype.itemsize != 2 or self.framework is not None:
            return 0.0
        return 2.0 * sum(num_local_bytes(meta, placements, self.mesh) for meta, placements in tensors)

    def weight_seconds(self, operator: Operator, option: Option, whole_seconds: float) -> float:
        """Return the part of a linear layer's backward that computes its weight's gradient, which may be deferred.

        whole_seconds: forward and backward of the call (`operator_seconds`). 0 for a layer in fp8, and for an LM head
        with its loss, whose forward computes the gradient.
        """
        if self._product(operator, option) is not None or self.fused(operator, option) is not None:
            return 0.0
        position = DEFERRABLE.get(base_name(operator.node.op))
        if position is None or not operator.inputs[position].requires_grad:
            return 0.0
        forward_and_input = self.operator_seconds(_frozen(operator, position - 1), option)
        return whole_seconds - sum(forward_and_input)

    def deferring_seconds(self, operator: Operator) -> float:
        """Return the extra seconds of deferring them."""
        return host.DEFERRED * host.launch_seconds(self.cluster) if base_name(operator.node.op) in DEFERRABLE else 0.0

    def halo_bytes(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return (a rank's rows with those of its neighbors, the most of one neighbor) of a convolution whose space
        is cut; zeros for other calls."""
        axis = next((number for number, num_bytes in enumerate(option.axes) if num_bytes.lowering == HALO), None)
        if axis is None:
            return 0.0, 0.0
        x, joint = operator.inputs[0], operator.rule.joints[option.axes[axis].label]
        num_bytes = num_local(x, option.inputs[0], self.mesh) * x.dtype.itemsize
        share = joint.least * self.mesh.sizes[axis] / x.shape[option.inputs[0][axis].dim]
        return num_bytes * (1 + 2 * share), num_bytes * share

    def _neighbors_seconds(self, operator: Operator, option: Option) -> float:
        """Return the seconds to send and join neighbors' rows of space; the backward takes as long."""
        joined, sent = self.halo_bytes(operator, option)
        axis = next((number for number, axis_option in enumerate(option.axes) if axis_option.lowering == HALO), 0)
        if not sent:
            return 0.0
        return 2 * self.rates.collective_seconds("p2p", axis, sent) + self.rates.memory_seconds(2 * joined)

    def _inner_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the seconds of collectives inside a lowering, (forward, backward): cross-entropy over a sharded
        vocabulary reduces three numbers a token, batch norm one per channel twice and two in backward, group norm
        one per group of a row."""
        total, backward = 0.0, 0.0
        for axis, choice in enumerate(option.axes):
            if choice.lowering in SYNCHRONISED:
                x, cuts = operator.inputs[0], zip(option.inputs[0], self.mesh.sizes, strict=True)
                is_of_batch = choice.lowering == "batch_norm"
                whole = x.shape[1] if is_of_batch else x.shape[0] * arguments_of(operator.node)["num_groups"]
                kept = (1,) if is_of_batch else (0, 1)
                size = 4.0 * whole / math.prod([n for p, n in cuts if p.is_shard and p.dim in kept])
                total += 2 * self.rates.collective_seconds("all_reduce", axis, size)
                backward += self.rates.collective_seconds("all_reduce", axis, 2 * size)
        if base_name(operator.node.op) == "cross_entropy_loss":
            logits, placements = operator.inputs[0], option.inputs[0]
            for axis, (choice, placement) in enumerate(zip(option.axes, placements, strict=True)):
                if choice.lowering and placement.is_shard and choice.outputs[0].is_replicated:
                    tokens = logits.numel // logits.shape[min(1, len(logits.shape) - 1)]
                    total += 3 * self.rates.collective_seconds("all_reduce", axis, 4.0 * tokens)
        return total, backward

    def saved_bytes(self, operator: Operator, option: Option, saved: tuple[Saved, ...]) -> float:
        """Return the bytes of activations that this call is first to keep for one micro-batch's backward."""
        if fusion := self.fused(operator, option):
            return fused_saved_bytes(fusion, operator, option, self.rates)
        total = 0.0
        for ref, num_bytes in saved:
            if ref.node == operator.node.name:
                meta, placements = operator.node.outputs[ref.index], option.outputs[ref.index]
            else:
                position = operator.node.inputs.index(ref)
                meta, placements = operator.inputs[position], option.inputs[position]
            total += num_local(meta, placements, self.mesh) / max(meta.numel, 1) * num_bytes
        if any(meta.requires_grad for meta in operator.node.outputs):
            local = num_local(operator.node.outputs[0], option.outputs[0], self.mesh)
            total += self.made_bytes(operator, option)
            total += self.window_bytes(operator, option, local) + self.halo_bytes(operator, option)[0]
        return total * (1.0 + self.rates.fragmentation)

    def window_bytes(self, operator: Operator, option: Option, num_local: int) -> float:
        """Return the kept bytes of attention over windows of a whole sequence besides its tensors: the results of
        its tiles, if there are several, masks, and repeated keys. num_local: elements of this rank's result."""
        if operator.node.op != WINDOW_ATTENTION or self.contractions.context_call(operator, option):
            return 0.0
        num_tiles, masks = window_tiles(operator)
        kept = (masks + (num_local if num_tiles > 1 else 0)) * operator.node.outputs[0].dtype.itemsize
        return kept + self.contractions.repeated_bytes(operator, option)

    def made_bytes(self, operator: Operator, option: Option) -> float:
        """Return the kept bytes that are neither inputs nor outputs (kept.py)."""
        if self.framework is not None:
            num_bytes = self.framework.made_bytes(operator, option, self.mesh)
            if num_bytes is not None:
                return num_bytes
        return made_bytes(operator, option, self.mesh, is_cpu(self.cluster))

    def kernel_bytes(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the bytes (kept besides inputs and results, temporaries of the forward) of a call."""
        pattern = KERNELS.get(operator.node.op)
        if pattern is not None and pattern.chunk_rows is not None:
            return lm_head_bytes(pattern.chunk_rows, operator, option, self.rates)
        if operator.node.op == SINK_ATTENTION:
            return 0.0, self.contractions.sinks(operator, option).held_forward
        if operator.node.op == EXPERT_LINEAR:
            return 0.0, self.contractions.rows.sorted_bytes(operator, option)
        product = self._product(operator, option)
        return 0.0, product.forward_temporary(is_cpu(self.cluster)) if product is not None else 0.0

    def backward_bytes(self, operator: Operator, option: Option) -> float:
        """Return the temporary bytes of a call's backward besides the gradients that it computes. If each expert has
        its kernel, its weight has a separate gradient, and these are joined."""
        if operator.node.op == SINK_ATTENTION:
            return self.contractions.sinks(operator, option).held_backward
        if operator.node.op == EXPERT_LINEAR:
            weight = num_local_bytes(operator.inputs[1], option.inputs[1], self.mesh)
            is_grouped = self.contractions.is_grouped(operator)
            return self.contractions.rows.sorted_bytes(operator, option) + (0.0 if is_grouped else weight)
        product = self._product(operator, option)
        return product.backward_temporary(is_cpu(self.cluster)) if product is not None else 0.0

    def product_bytes(self, operator: Operator, option: Option) -> float:
        """Return the bytes of the product of a matmul whose result is another tensor (fp8.py); 0 for all others."""
        product = self._product(operator, option)
        return product.result_bytes(is_cpu(self.cluster)) if product is not None else 0.0

    def may_defer(self, operator: Operator, option: Option) -> bool:
        """Return whether programs can defer the gradient of this call's weight: not for products in e4m3."""
        return base_name(operator.node.op) in DEFERRABLE and self._product(operator, option) is None

    def _product(self, operator: Operator, option: Option) -> Product | None:
        """Return the sizes of a call in e4m3; None for other calls."""
        return self.fp8.product(operator, option, self.mesh) if self.fp8 is not None else None

    def compute_kinds(self, operator: Operator) -> tuple[str, str]:
        """Return the kinds under which the seconds of a call's forward and backward are reported."""
        if self.framework is not None:
            return self.framework.compute_kinds(operator)
        return "forward compute", "backward compute"


def _backward_bytes(operator: Operator, bytes_in: float, bytes_out: float, num_grads: int) -> float:
    """Return the bytes that the backward of a memory-bound call reads and writes (torch's derivatives.yaml): the
    inputs, the results' gradients, and a gradient for each trained input. The pieces of a joined tensor have
    views of its gradient, a sum with an untrained operand has the gradient itself, and a multiple does not read
    its factor again."""
    name, metas = base_name(operator.node.op), operator.inputs
    if name in JOINS:
        return 0.0
    if name in ("add", "sub") and num_grads == 1 and len(metas) == 2:
        position = [meta.requires_grad for meta in metas].index(True)
        output = operator.node.outputs[0]
        is_same = (metas[position].shape, metas[position].dtype) == (output.shape, output.dtype)
        if is_same and (name == "add" or position == 0):
            return 0.0
    if name in ("mul", "div", "neg") and len(metas) == 1:
        return bytes_in + bytes_out
    return bytes_in + bytes_out * (1 + num_grads)


def _frozen(operator: Operator, kept: int) -> Operator:
    """Return the call as if only its input `kept` needed a gradient."""
    inputs = tuple(m if i == kept else replace(m, requires_grad=False) for i, m in enumerate(operator.inputs))
    return replace(operator, inputs=inputs)
