"""The communication of a program in words: its reshards, and the synchronization of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.costs.context import NearCall, context_call
from autopar.costs.parameter_prices import summed_axes
from autopar.costs.quantised_collectives import sent_bytes_of
from autopar.costs.rates import Training
from autopar.ir.graph import Ref, TensorMeta
from autopar.ir.mesh import Mesh, zero_axes
from autopar.ir.placement import Placement, Stored
from autopar.report.dims import DimNames
from autopar.report.sharding import relative
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, num_local
from autopar.sharding.scopes import Scope
from autopar.units import bytes_text
from codegen.program import Call, ModuleClass, Reshard, TensorType


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer of a step. traffic: bytes forward and the collective backward, in words. count: per optimizer step.
    num_bytes: bytes that one rank gathers, reduces or exchanges each time."""

    words: str
    traffic: str
    count: int
    num_bytes: float


def reshard_rows(scope: Scope, module: ModuleClass, names: DimNames, num_micro_batches: int) -> list[Transfer]:
    """Return the class's reshards in the order of execution; equal reshards share a row that counts them."""
    counts: dict[tuple[str, str, float], int] = {}
    for index, reshard in enumerate(module.body):
        if isinstance(reshard, Reshard):
            following = next((s for s in module.body[index + 1 :] if not isinstance(s, Reshard)), None)
            words = reshard_words(scope, reshard, names)
            if isinstance(following, Call) and following.section:
                words += f", for {relative(scope, following.section)}"
            row = words, _moved(reshard), reshard.num_bytes
            counts[row] = counts.get(row, 0) + 1
    times = scope.count * num_micro_batches
    return [Transfer(text, traffic, number * times, size) for (text, traffic, size), number in counts.items()]


def reshard_words(scope: Scope, reshard: Reshard, names: DimNames) -> str:
    axis, tensor = reshard.axis, reshard.source.name.removeprefix("self.")
    before, after = (dim_word(scope, variable.type, axis, names) for variable in (reshard.source, reshard.result))
    return {
        "all_gather": f"{tensor}: all_gather {before} over {axis}",
        "reduce_scatter": f"{tensor}: reduce_scatter {after} over {axis}",
        "all_reduce": f"{tensor}: all_reduce over {axis}",
        "all_to_all": f"{tensor}: all_to_all from {before} to {after} over {axis}",
        "for_use": f"{tensor}: sum the gradient over {axis}",
        "slice": f"{tensor}: keep one shard of {after} over {axis}",
        "first_rank_only": f"{tensor}: keep on the first rank of {axis}",
        "first_rank_grad": f"{tensor}: keep the gradient on the first rank of {axis}",
    }.get(reshard.method, f"{tensor}: {reshard.method} over {axis}")


def dim_word(scope: Scope, tensor_type: TensorType, axis: str, names: DimNames) -> str:
    """Return the dim that is sharded over the axis, or the placement's text if none is."""
    placement, ref = Placement.parse(tensor_type.placement(axis)), Ref(*tensor_type.tensor)
    if not placement.is_shard:
        return str(placement)
    return (
        names.of(scope.name, ref, placement, len(tensor_type.shape)) if ref in scope.metas else f"dim {placement.dim}"
    )


def context_rows(
    scope: Scope,
    operators: Mapping[tuple[str, str], Operator],
    assignment: Assignment,
    mesh: Mesh,
    on_cpu: bool,
    num_micro_batches: int,
) -> list[Transfer]:
    """Return the exchanges inside attention calls with keys on several ranks."""
    transfers = []
    for node in scope.nodes:
        key = scope.name, node.name
        call = context_call(operators[key], assignment.operators[key], mesh, on_cpu) if key in operators else None
        if call is None:
            continue
        axis, times = mesh.axes[call.axis], scope.count * num_micro_batches
        if isinstance(call, NearCall):
            words = f"{node.name}: keys and values of neighbors on {axis}"
            back = bytes_text(call.near + call.wide_near)
            transfers.append(Transfer(words, f"{bytes_text(call.near)}, backward {back} p2p", times, call.near))
        elif call.exchange == "ring":
            words, once = f"{node.name}: keys and values around {axis}", call.size - 1
            back = bytes_text(once * call.part + call.size * call.wide_part)
            traffic = f"{bytes_text(once * call.part)}, backward {back} p2p"
            transfers.append(Transfer(words, traffic, times, once * call.part))
        else:
            words = f"{node.name}: gather keys and values of all rows over {axis}"
            traffic = f"{bytes_text(call.whole)}, backward all_gather, reduce_scatter"
            transfers.append(Transfer(words, traffic, times, call.whole))
    return transfers


def parameter_traffic(
    scope: Scope,
    assignment: Assignment,
    mesh: Mesh,
    training: Training,
    num_micro_batches: int,
    whole: frozenset[str] = frozenset(),
) -> list[Transfer]:
    """Return the scope's gradient synchronization and ZeRO gathers by kind and axis, in bytes of one layer.

    whole: names of the parameters that one rank each updates for all ranks.
    """
    totals = traffic_bytes(scope, assignment, mesh, training, num_micro_batches)
    for name, stored in _trained(scope, assignment):
        if not whole.isdisjoint(scope.full_names(name)):
            _add_whole_updates(totals, scope.metas[Ref(name)], stored, mesh, training)
    rows = ((words, bytes_text(size), count * scope.count, size) for (words, count), size in totals.items())
    return [Transfer(*row) for row in rows]


def traffic_bytes(
    scope: Scope, assignment: Assignment, mesh: Mesh, training: Training, num_micro_batches: int
) -> dict[tuple[str, int], float]:
    """Map (words, times per step) to bytes each time on one rank: of the gathered tensor, or before the reduction."""
    totals: dict[tuple[str, int], float] = {}
    packed = {name: f" of {code} blocks" for name, code in training.compression.names.items()}
    for name, stored in _trained(scope, assignment):
        meta = scope.metas[Ref(name)]
        local = num_local(meta, stored.placements, mesh)
        over = zero_axes(mesh.axes, stored.placements)
        size = math.prod(mesh.sizes[axis] for axis in over) if stored.zero else 1
        if stored.zero:
            reduces = 1 if stored.zero == 1 else num_micro_batches
            widths = (training.compute_bytes, training.gradient_bytes)
            wire = sent_bytes_of(training.compression, meta, size, *widths)
            words = f"all_to_all{packed['reduce']}" if wire.reduce_code else "reduce_scatter"
            _add(totals, f"gradients: {words} over {_names(mesh, over)}", reduces, local * wire.reduce)
            words, weight = (
                f"all_gather{packed['gather'] if wire.gather_code else ''} over {_names(mesh, over)}",
                local * wire.gather,
            )
            if stored.zero == 3:
                _add(totals, f"parameters: {words}, in forward and in backward", 2 * num_micro_batches, weight)
            else:
                _add(totals, f"parameters: {words} after the update", 1, weight)
        for axes in summed_axes(mesh.axes, stored):
            _add(totals, f"gradients: all_reduce over {_names(mesh, axes)}", 1, local * training.gradient_bytes / size)
    return totals


def _trained(scope: Scope, assignment: Assignment) -> Iterator[tuple[str, Stored]]:
    for (owner, name), stored in assignment.parameters.items():
        if owner == scope.name and scope.metas[Ref(name)].requires_grad:
            yield name, stored


def _add_whole_updates(
    totals: dict[tuple[str, int], float], meta: TensorMeta, stored: Stored, mesh: Mesh, training: Training
) -> None:
    """Add the mean bytes that an owner receives for one parameter, and the bytes that a rank receives back."""
    num_ranks = math.prod(mesh.sizes)
    over = zero_axes(mesh.axes, stored.placements) if stored.zero else ()
    stored_elements = num_local(meta, stored.placements, mesh) / math.prod(mesh.sizes[axis] for axis in over)
    if num_ranks > 1 and stored_elements < meta.numel:
        size = 2 * meta.numel * training.gradient_bytes / num_ranks
        _add(totals, "values and gradients: to the ranks that own the update", 1, size)
    if num_ranks > 1:
        _add(totals, "parameters: from the ranks that own the update", 1, stored_elements * training.gradient_bytes)


def _names(mesh: Mesh, axes: tuple[int, ...]) -> str:
    return " x ".join(mesh.axes[axis] for axis in axes)


def _add(totals: dict[tuple[str, int], float], words: str, count: int, num_bytes: float) -> None:
    totals[words, count] = totals.get((words, count), 0.0) + num_bytes


def _moved(reshard: Reshard) -> str:
    """Return `64 KiB, backward reduce_scatter`: the bytes sent in forward, and the collective of backward."""
    size = bytes_text(reshard.num_bytes)
    backward = f"backward {reshard.backward}" if reshard.backward else ""
    if reshard.forward:
        traffic = f"{size}, {backward}" if backward else size
    else:
        traffic = f"{backward} {size}" if backward else "none"
    return traffic + ("; the step waits for it" if ("wait", False) in reshard.kwargs else "")
