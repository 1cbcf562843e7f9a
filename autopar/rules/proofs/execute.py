"""Run a call on real tensors: the whole call, or one rank's call with its lowering.

Lowerings run the runtime's own functions, so proofs cover these too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.ir.draws import IN_TRAINING
from autopar.ir.graph import Node, TensorMeta, base_name, map_refs
from autopar.ir.operators import arguments_of
from autopar.operators.schemas import find_op
from autopar.rules.call import Call, Operand
from autopar.rules.families.attention import EXCHANGES
from autopar.rules.families.convolution import HALO, halo_dim
from autopar.rules.families.experts import ROUTED, routed_linear
from autopar.rules.families.loss import is_plain_cross_entropy
from autopar.rules.families.norm import SYNCHRONISED
from autopar.rules.localize import LocalCall, LoweringCall
from autopar.rules.proofs.simulated_ranks import SimulatedMesh, meshes
from codegen.functions import applied, function_of
from codegen.runtime.attention import attention, attention_with
from codegen.runtime.batch_norm import batch_norm, group_norm
from codegen.runtime.context_attention import context_attention
from codegen.runtime.cross_entropy import cross_entropy
from codegen.runtime.draws import draw
from codegen.runtime.dropout import dropout, masked
from codegen.runtime.embedding import vocab_embedding
from codegen.runtime.halo import halo_convolution
from codegen.runtime.layout import AxisLike, Layout

Tensors = tuple[Tensor, ...]
DROPOUT_KEY = 1234
COMMUNICATING = frozenset({"cross_entropy", ROUTED, HALO, *SYNCHRONISED, *EXCHANGES})


def call_op(
    op: str,
    args: tuple[Any, ...],
    kwargs: Sequence[tuple[str, Any]],
    inputs: Sequence[Tensor],
    device: str = "cpu",
    copies: bool = True,
) -> Tensors:
    """Return the operator's outputs. `inputs` replace the Refs in order, and `device` replaces every named device.

    copies: whether in-place forms write to copies of the inputs. Raises ValueError for an op unknown to torch.
    """
    overload = find_op(op)
    if overload is None:
        raise ValueError(f"torch has no operator {op!r}")
    # Copies keep in-place forms from writing to leaves.
    feed = (tensor.clone() if copies else tensor for tensor in inputs)
    bound_args = [_as_list(map_refs(value, lambda _: next(feed)), device) for value in args]
    bound_kwargs = {name: _as_list(map_refs(value, lambda _: next(feed)), device) for name, value in kwargs}
    result = overload(*bound_args, **bound_kwargs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _as_list(value: Any, device: str) -> Any:
    """Convert tuples to lists, which operators require, and a trace's device to the device of the call."""
    if isinstance(value, torch.device):
        return torch.device(device)
    return [_as_list(item, device) for item in value] if isinstance(value, tuple) else value


def run_alone(node: Node, metas: tuple[TensorMeta, ...], inputs: Sequence[Tensor]) -> Tensors:
    """Run the call as an unsharded program does: with the runtime's own function if it has one.

    In-place forms write to the inputs. Dropout masks are not drawn.
    """
    if node.op == IN_TRAINING:
        return (inputs[0],)
    device = next((str(tensor.device) for tensor in inputs), "cpu")
    function = function_of(node.op)
    if function is not None:
        feed = iter(inputs)
        result = applied(function.function, *function.given(map_refs(node.args, lambda _: next(feed))))
        return tuple(result) if isinstance(result, tuple | list) else (result,)
    call, name = Call.of(node, metas), base_name(node.op)
    if is_plain_cross_entropy(node, metas, any_dims=True):
        return (_cross_entropy(LoweringCall("cross_entropy"), call, inputs, meshes(())[()], torch.tensor(1.0)),)
    if name == "batch_norm":
        return (_batch_norm(call, inputs),)
    if name == "dropout" and call["train"] and 0.0 < call["p"] < 1.0:
        return (_masked(inputs[0], call["p"]),)
    if name == "scaled_dot_product_attention" and call["dropout_p"] > 0.0:
        q, k, v = (inputs[call.tensor(argument).index] for argument in ("query", "key", "value"))
        mask = call.get("attn_mask")
        mask_values = inputs[mask.index] if isinstance(mask, Operand) else None
        drop = partial(_masked, p=call["dropout_p"])
        return (attention_with(drop, q, k, v, mask_values, call["is_causal"], call["scale"], call["enable_gqa"]),)
    return call_op(node.op, node.args, node.kwargs, inputs, device, copies=False)


def _masked(x: Tensor, p: float) -> Tensor:
    """Apply dropout with an uninitialized mask."""
    return masked(x, torch.empty_like(x, dtype=torch.bool), p) if p < 1.0 else x * 0.0


def run_whole(node: Node, call: Call, lowering: LoweringCall | None, inputs: Sequence[Tensor]) -> Tensors:
    """Run the call on one device. If the lowering draws random numbers, its draw for one rank is the reference."""
    if lowering is not None and lowering.name in ("dropout", "draw", "attention"):
        (mesh,) = meshes(()).values()
        whole = LoweringCall(lowering.name, layout_shape=lowering.layout_shape)
        return _lowered(LocalCall(node.op, node.args, node.kwargs, whole), call, inputs, mesh, None)
    return call_op(node.op, node.args, node.kwargs, inputs)


def run_local(
    local: LocalCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh, num_targets: Tensor | None
) -> Tensors:
    """Return one rank's outputs. num_targets: count of valid targets over all ranks, for cross-entropy."""
    if local.lowering is None:
        return call_op(local.op, local.args, local.kwargs, inputs)
    return _lowered(local, call, inputs, mesh, num_targets)


def count_targets(call: Call, inputs: Sequence[Tensor]) -> Tensor | None:
    """Count the targets that a cross-entropy averages over; 1 for a sum; None for other calls."""
    if call.packet != "cross_entropy_loss":
        return None
    target = inputs[call.tensor("target").index]
    if call["reduction"] != 1 or target.dtype.is_floating_point:
        return torch.tensor(1.0, dtype=torch.float64)
    is_valid: Tensor = target != call["ignore_index"]
    return is_valid.sum().to(torch.float64)


def _layout(lowering: LoweringCall, mesh: SimulatedMesh) -> Any:
    named = {axis.name: str(p) for axis, p in zip(mesh.axes, lowering.layout, strict=True) if p.is_shard}
    return Layout(lowering.layout_shape, **named)


def _lowered(
    local: LocalCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh, num_targets: Tensor | None
) -> Tensors:
    lowering = local.lowering
    assert lowering is not None
    if lowering.name == "mean":
        return tuple(out / lowering.divisor for out in call_op(local.op, local.args, local.kwargs, inputs))
    if lowering.name == "arange":
        position = _layout(lowering, mesh).index(mesh, mesh.device)
        values = call["start"] + call.get("step", 1) * position if "start" in call.arguments else position
        return (values.to(call.outputs[0].dtype),)
    if lowering.name == "vocab_embedding":
        weight, ids = (inputs[call.tensor(name).index] for name in ("weight", "indices"))
        padding = call["padding_idx"]
        axis = mesh.axes[lowering.axes[0]]
        return (vocab_embedding(ids, weight, axis, None if padding < 0 else padding),)
    if lowering.name == "cross_entropy":
        return (_cross_entropy(lowering, call, inputs, mesh, num_targets),)
    if lowering.name == "dropout":
        layout = _layout(lowering, mesh)
        return (dropout(inputs[0].clone(), call["p"], key=DROPOUT_KEY, layout=layout, mesh=mesh),)
    if lowering.name == "draw":
        return (_draw(lowering, call, mesh),)
    if lowering.name == "attention":
        return (_attention(lowering, call, inputs, mesh),)
    if lowering.name in EXCHANGES:
        return (_context_attention(lowering, call, inputs, mesh),)
    if lowering.name == "batch_norm":
        copies = tuple(tensor if tensor.requires_grad else tensor.clone() for tensor in inputs)  # of running statistics
        return (_batch_norm(call, copies, *(mesh.axes[number] for number in lowering.axes)),)
    if lowering.name == "group_norm":
        return (_group_norm(local, lowering, call, inputs, mesh),)
    if lowering.name == HALO:
        return (_halo(local, lowering, call, inputs, mesh),)
    if lowering.name == ROUTED:
        bias = inputs[3] if len(inputs) > 3 else None
        axis = mesh.joint(tuple(mesh.axes[number].name for number in lowering.axes))
        return (routed_linear(inputs[0], inputs[1], inputs[2], bias, axis),)
    raise ValueError(f"the proof does not know the lowering {lowering.name!r}")


def _cross_entropy(
    lowering: LoweringCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh, num_targets: Tensor | None
) -> Tensor:
    x, target = (inputs[call.tensor(name).index] for name in ("self", "target"))
    assert num_targets is not None
    x_NC = x.movedim(1, -1).reshape(-1, x.shape[1]) if x.dim() > 1 else x.unsqueeze(0)
    return cross_entropy(
        x_NC,
        target.reshape(-1),
        num_targets,
        ignore_index=call["ignore_index"],
        vocab_axis=mesh.axes[lowering.axes[0]] if lowering.axes else None,
        label_smoothing=call["label_smoothing"],
    )


def _halo(
    local: LocalCall, lowering: LoweringCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh
) -> Tensor:
    reach, arguments = halo_dim(call), arguments_of(replace(call.node, args=local.args, kwargs=local.kwargs))
    assert reach is not None
    x, weight = (inputs[call.tensor(name).index] for name in ("input", "weight"))
    bias = inputs[2] if len(inputs) > 2 else None
    sizes = {name: arguments[name] for name in ("stride", "padding", "dilation", "groups")}
    return halo_convolution(x, weight, bias, mesh.axes[lowering.axes[0]], dim=reach[0], **sizes)


def _batch_norm(call: Call, inputs: Sequence[Tensor], *axes: AxisLike) -> Tensor:
    names = ("input", "weight", "bias", "running_mean", "running_var")
    operands = [inputs[operand.index] if isinstance(operand := call.get(name), Operand) else None for name in names]
    x, weight, bias, mean, var = operands
    assert x is not None
    return batch_norm(x, weight, bias, mean, var, call["training"], call["momentum"], call["eps"], *axes)


def _group_norm(
    local: LocalCall, lowering: LoweringCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh
) -> Tensor:
    num_groups = arguments_of(replace(call.node, args=local.args, kwargs=local.kwargs))["num_groups"]
    weight, bias = (inputs[v.index] if isinstance(v := call.get(n), Operand) else None for n in ("weight", "bias"))
    axes = (mesh.axes[number] for number in lowering.axes)
    return group_norm(inputs[0], num_groups, weight, bias, call["eps"], *axes)


def _draw(lowering: LoweringCall, call: Call, mesh: SimulatedMesh) -> Tensor:
    return draw(
        call["distribution"],
        key=DROPOUT_KEY,
        layout=_layout(lowering, mesh),
        mesh=mesh,
        device=mesh.device,
        dtype=call.outputs[0].dtype,
        **{name: call[name] for name in ("p", "low", "high")},
    )


def _attention(lowering: LoweringCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh) -> Tensor:
    q, k, v = (inputs[call.tensor(name).index] for name in ("query", "key", "value"))
    mask = call.get("attn_mask")
    return attention(
        q,
        k,
        v,
        mask=inputs[mask.index] if isinstance(mask, Operand) else None,
        dropout_p=call["dropout_p"],
        is_causal=call["is_causal"],
        scale=call["scale"],
        enable_gqa=call["enable_gqa"],
        key=DROPOUT_KEY,
        layout=_layout(lowering, mesh),
        mesh=mesh,
    )


def _context_attention(lowering: LoweringCall, call: Call, inputs: Sequence[Tensor], mesh: SimulatedMesh) -> Tensor:
    q, k, v = (inputs[call.tensor(name).index] for name in ("query", "key", "value"))
    mask = call.get("attn_mask")
    window = {name: call.get(name) for name in ("before", "after", "chunk")}
    sinks = call.get("sinks")
    return context_attention(
        q,
        k,
        v,
        mesh.axes[lowering.axes[0]],
        attn_mask=inputs[mask.index] if isinstance(mask, Operand) else None,
        is_causal=call.get("is_causal", False),
        scale=call["scale"],
        enable_gqa=call["enable_gqa"],
        exchange="ring" if lowering.name == "ring" else "all_gather",
        is_striped=lowering.is_striped,
        sinks=inputs[sinks.index] if isinstance(sinks, Operand) else None,
        **window,
    )
