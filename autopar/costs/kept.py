"""Tensors that autograd keeps of one call for its backward, as torch reports them.

Each distinct call runs once, as programs write it, on tensors without memory. Hooks see every saved tensor: an input, a
result, a view of either, or a tensor that the call creates for its backward alone (a mask, statistics, indices, a copy
in another dtype). Tensors of one number and Python objects do not count.

Three kinds of calls cannot run so, and are declared instead:

- Fused kernels declare what they save in their pattern (codegen/fusion), run-time functions that choose kernels by
device in a record `SAVED` next to their code.
- Attention on a GPU: a CPU cannot show what torch's flash kernels save. They save q, k, v, the result and one fp32
logsumexp per query and head (`_scaled_dot_product_flash_attention` in torch's derivatives.yaml). A mask is kept too: a
boolean one as a copy in q's dtype (`convert_boolean_attn_mask` in ATen's attention.cpp).
- A call that torch cannot run without memory is assumed to keep all its inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from autopar.frontend.fakes import empty, mode, probing
from autopar.ir.graph import UPDATE_BUFFER, Node, Ref, TensorMeta, base_name, has_dropout, map_refs
from autopar.ir.mesh import Mesh
from autopar.ir.operators import shares_memory
from autopar.ir.placement import local_shape
from autopar.lowering.one_call import OneCall, call_graph, one_call
from autopar.lowering.stand_ins import StandInMesh
from autopar.operators.traits import CHOSEN_BY_DEVICE, VIEWS
from autopar.rules.families.attention import EXCHANGES
from autopar.rules.localize import local_call
from autopar.rules.rule import AxisOption
from autopar.sharding.call_options import Operator, Option, num_local, rule_or_blank
from autopar.sharding.fusible_runs import OTHER_RESULT
from autopar.sharding.scopes import scopes_of
from codegen.fusion import KERNELS

Metas = tuple[TensorMeta, ...]

_RECORDED = {
    "autopar.sink_attention": "codegen.runtime.sink_attention",
    "autopar.window_attention": "codegen.runtime.windows",
    "autopar.expert_linear": "codegen.runtime.experts",
}
"""Run-time functions with a record, and the modules that define it."""

_LARGEST_CACHE = 1 << 14


@dataclass(frozen=True, slots=True)
class Kept:
    """Kept tensors of a call. inputs, outputs: positions of those that are kept. made: bytes of each further tensor.

    shares: label of an option -> whether it cuts each of these further tensors, filled on demand.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    extra_bytes: tuple[int, ...] = ()
    shares: dict[str, tuple[bool, ...]] = field(default_factory=dict, compare=False, repr=False)


_NOTHING = Kept()
_BY_NODE: dict[tuple[int, bool], tuple[Node, Metas, Kept]] = {}
_BY_CALL: dict[Any, Kept] = {}


def kept(node: Node, inputs: Metas, on_cpu: bool) -> Kept:
    """Return the tensors that the call keeps. on_cpu: whether it runs on a CPU."""
    if not any(meta.requires_grad for meta in node.outputs):
        return _NOTHING
    cached = _BY_NODE.get((id(node), on_cpu))  # the node is stored with it, so that no other has its id
    if cached is not None and cached[1] == inputs:
        return cached[2]
    if len(_BY_NODE) > _LARGEST_CACHE:
        _BY_NODE.clear()
        _BY_CALL.clear()
    numbers = count()
    refs = map_refs((node.args, node.kwargs), lambda ref: Ref("", next(numbers)))
    key = node.op, refs, inputs, on_cpu
    try:
        record = _BY_CALL.get(key)
        if record is None:
            record = _BY_CALL[key] = _found(node, inputs, on_cpu)
    except TypeError:  # an argument that cannot be a key
        record = _found(node, inputs, on_cpu)
    _BY_NODE[id(node), on_cpu] = node, inputs, record
    return record


def made_bytes(operator: Operator, option: Option, mesh: Mesh, on_cpu: bool) -> float:
    """Return the bytes that a rank keeps of tensors that the call creates for its backward alone."""
    node, inputs = operator.node, operator.inputs
    whole = kept(node, inputs, on_cpu)
    if not whole.extra_bytes:
        return 0.0
    sizes = [float(size) for size in whole.extra_bytes]
    share = num_local(inputs[0], option.inputs[0], mesh) / max(inputs[0].numel, 1)
    if _record(node.op) is not None:  # numbers per row of the first argument, whose rows are complete
        return sum(sizes) * share
    if any(chosen.lowering in EXCHANGES for chosen in option.axes):  # the logsumexp of a rank's queries
        return 4.0 * share * inputs[0].numel / inputs[0].shape[-1]
    for chosen, ranks in zip(option.axes, mesh.sizes, strict=True):
        if ranks > 1 and operator.rule.sharded_by(chosen.label, ranks):
            cut = whole.shares.get(chosen.label)
            if cut is None:
                cut = whole.shares[chosen.label] = _cut(operator, chosen, ranks, whole, on_cpu)
            sizes = [size / ranks if is_cut else size for size, is_cut in zip(sizes, cut, strict=True)]
    return sum(sizes)


def is_view(node: Node) -> bool:
    """Return whether the results share memory with the first input."""
    return bool(node.inputs) and shares_memory(node.op)


# --- answers ----------------------------------------------------------------------------------------------------------


def _found(node: Node, inputs: Metas, on_cpu: bool) -> Kept:
    record = _record(node.op)
    if record is not None:
        arguments, has_result, row_bytes = record
        rows = inputs[0].numel // max(inputs[0].shape[-1], 1)
        kept_inputs = tuple(position for position in arguments if position < len(inputs))
        return Kept(kept_inputs, (0,) if has_result else (), (row_bytes * rows,) if row_bytes else ())
    name = base_name(node.op)
    is_attention = name == "scaled_dot_product_attention"
    if is_attention and not on_cpu and not has_dropout(node):
        return _flash(node, inputs)
    if name in VIEWS or node.op == UPDATE_BUFFER:
        return Kept()
    try:
        # Calls for which torch chooses by device run on fake CPU tensors. Meta tensors are faster and serve all others.
        # With dropout, attention is a run-time function of calls that behave alike everywhere.
        return _asked(node, inputs, on_fakes=name in CHOSEN_BY_DEVICE and not (is_attention and has_dropout(node)))
    except Exception:  # no kernel for tensors without memory, or one that reads values
        return Kept(tuple(range(len(inputs))))


@cache
def _record(op: str) -> tuple[tuple[int, ...], bool, int] | None:
    """Return the tensors that a kernel or a run-time function declares as saved: (positions of arguments, whether the
    result, bytes per row of the first argument). Return None if torch can run the call."""
    space, _, name = op.partition(".")
    if space in ("kernels", OTHER_RESULT.removesuffix(".")):
        pattern = KERNELS[f"kernels.{name}"]
        kept_inputs = tuple(pattern.leaves.index(leaf) for leaf in pattern.saves)
        return kept_inputs, False, pattern.row_bytes if space == "kernels" else 0
    module = _RECORDED.get(op.rpartition(".")[0])
    return importlib.import_module(module).SAVED if module else None


def _flash(node: Node, inputs: Metas) -> Kept:
    query = inputs[0]
    masks = [(position, meta) for position, meta in enumerate(inputs) if position > 2]
    rows = query.numel // query.shape[-1]
    copies = [meta.numel * query.dtype.itemsize for _, meta in masks if meta.dtype == torch.bool]
    kept_masks = [position for position, meta in masks if meta.dtype != torch.bool]
    return Kept((0, 1, 2, *kept_masks), (0,), (4 * rows, *copies))


def _asked(node: Node, inputs: Metas, on_fakes: bool) -> Kept:
    """Return the tensors kept in a run."""
    call, is_in_place = _program(node, inputs), node.op.split(".")[1].endswith("_")
    with probing(), torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
        fake = mode() if on_fakes else None
        leaves = [_tensor(meta, fake) for meta in inputs]
        if fake is not None:
            with fake:
                return _watched(call, leaves, is_in_place)
        return _watched(call, leaves, is_in_place)


def _program(node: Node, inputs: Metas) -> OneCall:
    """Emit the call for one rank."""
    graph = call_graph(node, inputs)
    (scope,) = scopes_of(graph)
    rule, _ = rule_or_blank(scope.nodes[0], scope.metas)
    return one_call(graph, rule, (), Mesh((), ()))


def _tensor(meta: TensorMeta, fake: Any) -> Tensor:
    tensor = (
        torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        if fake is None
        else empty(fake, meta.shape, meta.dtype)
    )
    return tensor.requires_grad_(meta.requires_grad)


def _watched(call: OneCall, leaves: Sequence[Tensor], is_in_place: bool) -> Kept:
    """Run the call and look up each saved tensor's storage. A tensor written in place is a result."""
    values = [leaf.clone() for leaf in leaves] if is_in_place else leaves
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        results = call.run(values, StandInMesh.of((), ()))
    inputs = {_storage(value): position for position, value in reversed(list(enumerate(values)))}
    outputs = {_storage(value): position for position, value in reversed(list(enumerate(results)))}
    kept_inputs: set[int] = set()
    returned: set[int] = set()
    new_storages: dict[int, int] = {}
    for tensor in saved:
        storage = _storage(tensor)
        if storage in inputs and not (is_in_place and storage in outputs):
            kept_inputs.add(inputs[storage])
        elif storage in outputs:
            returned.add(outputs[storage])
        elif tensor.dim():
            new_storages[storage] = tensor.untyped_storage().nbytes()
    return Kept(
        tuple(sorted(kept_inputs)), tuple(sorted(returned)), tuple(size for size in new_storages.values() if size)
    )


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


# --- shares of ranks --------------------------------------------------------------------------------------------------


def _cut(operator: Operator, chosen: AxisOption, ranks: int, whole: Kept, on_cpu: bool) -> tuple[bool, ...]:
    """Return whether an option makes each further tensor smaller, from a run of one rank's call."""
    node, sizes = operator.node, (ranks,)
    try:
        local = local_call(node, operator.rule, (chosen,), operator.inputs, sizes)
        metas = _local(operator.inputs, chosen.inputs, sizes)
        outputs = _local(node.outputs, chosen.outputs, sizes)
    except ValueError:
        return (False,) * len(whole.extra_bytes)
    part = kept(replace(node, op=local.op, args=local.args, kwargs=local.kwargs, outputs=outputs), metas, on_cpu)
    if len(part.extra_bytes) != len(whole.extra_bytes):
        return (False,) * len(whole.extra_bytes)
    return tuple(part_size < size for part_size, size in zip(part.extra_bytes, whole.extra_bytes, strict=True))


def _local(metas: Metas, placements: Sequence[Any], sizes: tuple[int, ...]) -> Metas:
    return tuple(
        TensorMeta(local_shape(meta.shape, (place,), sizes), meta.dtype, meta.requires_grad)
        for meta, place in zip(metas, placements, strict=True)
    )
