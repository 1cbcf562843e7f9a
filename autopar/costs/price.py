"""The price of one option: seconds of compute, of communication and of the optimizer, and bytes of memory.

All prices are per optimizer step and per rank; forward and backward run `num_micro_batches` times. rates.py prices
collectives and reshards, contractions.py matmuls and attention, parameter_prices.py parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from autopar.costs import host
from autopar.costs.context import window_tiles
from autopar.costs.contractions import Contractions
from autopar.costs.kept import made_bytes
from autopar.costs.parameter_prices import ParameterPrices
from autopar.costs.rates import is_cpu
from autopar.costs.saved import Saved
from autopar.costs.specials import specials
from autopar.ir.draws import DRAW
from autopar.ir.graph import SINK_ATTENTION, WINDOW_ATTENTION, base_name
from autopar.ir.operators import arguments_of
from autopar.operators.traits import ATTENTION, DEFERRABLE, JOINS, MATMULS, VIEWS
from autopar.rules.families.convolution import HALO
from autopar.rules.families.experts import EXPERT_LINEAR
from autopar.rules.families.norm import SYNCHRONISED
from autopar.sharding.call_options import Operator, Option, num_local
from cost_models import compute

DRAW_BYTES = 256.0
"""Bytes that a draw moves per element: codegen/runtime/draws.py makes a dozen passes over 64-bit integers in chunks,
and three over fp32."""
FREE = VIEWS | {"contiguous", "to", "arange", "full", "zeros", "ones", "in_training"} - {"reshape"}


@dataclass
class Pricer(Contractions, ParameterPrices):
    """Prices of calls and parameters. Stores no decision.

    has_idioms: whether named runs of calls are functions, which free their intermediates.
    """

    has_idioms: ClassVar[bool] = True

    @property
    def gathers_again(self) -> bool:
        """Return whether tensors gathered for a call are gathered again for its backward, with only the shard kept."""
        return False

    def operator_seconds(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the compute seconds (forward, backward) of one call at its local sizes."""
        name = base_name(operator.node.op)
        metas_in = operator.inputs
        if name in FREE and not any(a.lowering for a in option.axes):
            seconds = host.VIEW * host.launch_seconds(self.cluster) if name in VIEWS else 0.0
            return seconds, seconds if any(meta.requires_grad for meta in metas_in) else 0.0
        if operator.node.op == DRAW:
            return self.memory_seconds(DRAW_BYTES * num_local(operator.node.meta, option.outputs[0], self.mesh)), 0.0
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
            forward, backward = self.contraction_seconds(operator, option, bytes_in + bytes_out)
            rows = self._neighbors_seconds(operator, option)
            return forward + rows, backward + rows if operator.inputs[0].requires_grad else backward
        forward = bytes_in + bytes_out
        backward = _backward_bytes(operator, bytes_in, bytes_out, num_grads)
        inner, inner_backward = self._inner_seconds(operator, option)
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
        behind = self.memory_seconds(backward) + inner_backward if num_grads else 0.0
        return self.memory_seconds(forward) + inner, behind

    def weight_seconds(self, operator: Operator, option: Option, whole_seconds: float) -> float:
        """Return the part of a linear layer's backward that computes its weight's gradient, which may be deferred.

        whole_seconds: forward and backward of the call (`operator_seconds`).
        """
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
        return 2 * self.collective_seconds("p2p", axis, sent) + self.memory_seconds(2 * joined) if sent else 0.0

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
                total += 2 * self.collective_seconds("all_reduce", axis, size)
                backward += self.collective_seconds("all_reduce", axis, 2 * size)
        if base_name(operator.node.op) == "cross_entropy_loss":
            logits, placements = operator.inputs[0], option.inputs[0]
            for axis, (choice, placement) in enumerate(zip(option.axes, placements, strict=True)):
                if choice.lowering and placement.is_shard and choice.outputs[0].is_replicated:
                    tokens = logits.numel // logits.shape[min(1, len(logits.shape) - 1)]
                    total += 3 * self.collective_seconds("all_reduce", axis, 4.0 * tokens)
        return total, backward

    def saved_bytes(self, operator: Operator, option: Option, saved: tuple[Saved, ...]) -> float:
        """Return the bytes of activations that this call is first to keep for one micro-batch's backward."""
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
        return total * (1.0 + self.fragmentation)

    def window_bytes(self, operator: Operator, option: Option, num_local: int) -> float:
        """Return the kept bytes of attention over windows of a whole sequence besides its tensors: the results of
        its tiles, if there are several, masks, and repeated keys. num_local: elements of this rank's result."""
        if operator.node.op != WINDOW_ATTENTION or self.context_call(operator, option):
            return 0.0
        num_tiles, masks = window_tiles(operator)
        kept = (masks + (num_local if num_tiles > 1 else 0)) * operator.node.outputs[0].dtype.itemsize
        return kept + self.repeated_bytes(operator, option)

    def made_bytes(self, operator: Operator, option: Option) -> float:
        """Return the kept bytes that are neither inputs nor outputs (kept.py)."""
        return made_bytes(operator, option, self.mesh, is_cpu(self.cluster))

    def kernel_bytes(self, operator: Operator, option: Option) -> tuple[float, float]:
        """Return the bytes (kept besides inputs and results, temporaries of the forward) of a call; see also
        kernels.py, fp8.py."""
        if operator.node.op == SINK_ATTENTION:
            return 0.0, self.sinks(operator, option).held_forward
        return 0.0, self.sorted_bytes(operator, option) if operator.node.op == EXPERT_LINEAR else 0.0

    def backward_bytes(self, operator: Operator, option: Option) -> float:
        """Return the temporary bytes of a call's backward besides the gradients that it computes; see fp8.py. If
        each expert has its kernel, its weight has a separate gradient, and these are joined."""
        if operator.node.op == SINK_ATTENTION:
            return self.sinks(operator, option).held_backward
        if operator.node.op != EXPERT_LINEAR:
            return 0.0
        weight = num_local(operator.inputs[1], option.inputs[1], self.mesh) * operator.inputs[1].dtype.itemsize
        return self.sorted_bytes(operator, option) + (0.0 if self.is_grouped(operator) else weight)

    def product_bytes(self, operator: Operator, option: Option) -> float:
        """Return the bytes of the product of a matmul whose result is another tensor (see fp8.py); 0 for all others."""
        return 0.0

    def may_defer(self, operator: Operator, option: Option) -> bool:
        """Return whether programs can defer the gradient of this call's weight."""
        return base_name(operator.node.op) in DEFERRABLE

    def compute_kinds(self, operator: Operator) -> tuple[str, str]:
        """Return the kinds under which the seconds of a call's forward and backward are reported."""
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
