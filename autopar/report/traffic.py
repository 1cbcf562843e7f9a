"""What is sent: the reshards of the generated program, and what synchronising parameters takes, in words."""

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
from autopar.options.assignment import Assignment
from autopar.options.scopes import Scope
from autopar.options.strategies import Operator, num_local
from autopar.report.dims import DimNames
from autopar.report.sharding import relative
from autopar.units import bytes_text
from codegen.program import Call, ModuleClass, Reshard, TensorType


@dataclass(frozen=True, slots=True)
class Transfer:
    """words: what happens. traffic: bytes forward and collective backward, of one, in words. count: per optimiser step.
    num_bytes: of one, which one rank gathers, reduces or exchanges."""

    words: str
    traffic: str
    count: int
    num_bytes: float


def reshard_rows(scope: Scope, module: ModuleClass, names: DimNames, num_micro_batches: int) -> list[Transfer]:
    """The class' reshards in the order of execution, equal ones once with their number."""
    found: dict[tuple[str, str, float], int] = {}
    for index, reshard in enumerate(module.body):
        if isinstance(reshard, Reshard):
            following = next((s for s in module.body[index + 1 :] if not isinstance(s, Reshard)), None)
            words = reshard_words(scope, reshard, names)
            if isinstance(following, Call) and following.section:
                words += f", for {relative(scope, following.section)}"
            row = words, _moved(reshard), reshard.num_bytes
            found[row] = found.get(row, 0) + 1
    times = scope.count * num_micro_batches
    return [Transfer(text, traffic, number * times, size) for (text, traffic, size), number in found.items()]


def reshard_words(scope: Scope, reshard: Reshard, names: DimNames) -> str:
    axis, what = reshard.axis, reshard.source.name.removeprefix("self.")
    before, after = (dim_word(scope, variable.type, axis, names) for variable in (reshard.source, reshard.result))
    return {
        "all_gather": f"{what}: gather {before} over {axis}",
        "reduce_scatter": f"{what}: sum over {axis}, each keeps its part of {after}",
        "all_reduce": f"{what}: sum over {axis}",
        "all_to_all": f"{what}: exchange {before} for {after} over {axis}",
        "for_use": f"{what}: used in different ways over {axis}, gradients summed",
        "slice": f"{what}: keep own part of {after} on {axis}",
        "first_rank_only": f"{what}: count once, on the first of {axis}",
        "first_rank_grad": f"{what}: count the gradient once, on the first of {axis}",
    }.get(reshard.method, f"{what}: {reshard.method} over {axis}")


def dim_word(scope: Scope, held: TensorType, axis: str, names: DimNames) -> str:
    """What is sharded over the axis; the placement's text where nothing is."""
    placement, ref = Placement.parse(held.placement(axis)), Ref(*held.tensor)
    if not placement.is_shard:
        return str(placement)
    return names.of(scope.name, ref, placement, len(held.shape)) if ref in scope.metas else f"dim {placement.dim}"


def context_rows(
    scope: Scope,
    operators: Mapping[tuple[str, str], Operator],
    assignment: Assignment,
    mesh: Mesh,
    on_cpu: bool,
    num_micro_batches: int,
) -> list[Transfer]:
    """What attention over keys of several ranks exchanges inside its call."""
    found = []
    for node in scope.nodes:
        key = scope.name, node.name
        call = context_call(operators[key], assignment.operators[key], mesh, on_cpu) if key in operators else None
        if call is None:
            continue
        axis, times = mesh.axes[call.axis], scope.count * num_micro_batches
        if isinstance(call, NearCall):
            words = f"{node.name}: keys and values of neighbours on {axis}"
            back = bytes_text(call.near + call.wide_near)
            found.append(Transfer(words, f"{bytes_text(call.near)}, backward {back} p2p", times, call.near))
        elif call.exchange == "ring":
            words, once = f"{node.name}: keys and values around {axis}", call.size - 1
            back = bytes_text(once * call.part + call.size * call.wide_part)
            traffic = f"{bytes_text(once * call.part)}, backward {back} p2p"
            found.append(Transfer(words, traffic, times, once * call.part))
        else:
            words = f"{node.name}: gather keys and values of all rows over {axis}"
            traffic = f"{bytes_text(call.whole)}, backward all_gather, reduce_scatter"
            found.append(Transfer(words, traffic, times, call.whole))
    return found


def parameter_traffic(
    scope: Scope,
    assignment: Assignment,
    mesh: Mesh,
    training: Training,
    num_micro_batches: int,
    whole: frozenset[str] = frozenset(),
) -> list[Transfer]:
    """Gradient synchronisation and ZeRO's gathers of the scope, by kind and axis; bytes of one layer.

    whole: names of the parameters that one rank each updates for all.
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
    """(what, how often per step) -> bytes each time on one rank: as gathered, or before they are summed."""
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
            sent = sent_bytes_of(training.compression, meta, size, *widths)
            how = f"all_to_all{packed['reduce']}" if sent.reduce_code else "reduce_scatter"
            _add(totals, f"gradients: {how} over {_names(mesh, over)}", reduces, local * sent.reduce)
            how, weight = (
                f"all_gather{packed['gather'] if sent.gather_code else ''} over {_names(mesh, over)}",
                local * sent.gather,
            )
            if stored.zero == 3:
                _add(totals, f"parameters: {how}, forward and again backward", 2 * num_micro_batches, weight)
            else:
                _add(totals, f"parameters: {how} after the update", 1, weight)
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
    """What an owner gets of one parameter, on average over ranks, and what a rank gets back."""
    num_ranks = math.prod(mesh.sizes)
    over = zero_axes(mesh.axes, stored.placements) if stored.zero else ()
    own = num_local(meta, stored.placements, mesh) / math.prod(mesh.sizes[axis] for axis in over)
    if num_ranks > 1 and own < meta.numel:
        size = 2 * meta.numel * training.gradient_bytes / num_ranks
        _add(totals, "values and gradients: to the ranks that update them whole", 1, size)
    if num_ranks > 1:
        _add(totals, "parameters: from the ranks that update them whole", 1, own * training.gradient_bytes)


def _names(mesh: Mesh, axes: tuple[int, ...]) -> str:
    return " x ".join(mesh.axes[axis] for axis in axes)


def _add(totals: dict[tuple[str, int], float], words: str, count: int, num_bytes: float) -> None:
    totals[words, count] = totals.get((words, count), 0.0) + num_bytes


def _moved(reshard: Reshard) -> str:
    """`64 KiB, backward reduce_scatter`: what is sent in forward, and in backward."""
    size = bytes_text(reshard.num_bytes)
    forward = size if reshard.forward else "no communication"
    backward = f", backward {reshard.backward}" if reshard.backward else ""
    waits = "; the step waits for it" if ("wait", False) in reshard.kwargs else ""
    return forward + (f"{backward} {size}" if backward and not reshard.forward else backward) + waits
