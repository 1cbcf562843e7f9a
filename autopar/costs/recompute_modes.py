"""Kept tensors and seconds of a layer under each recompute mode.

Let f and b be the seconds of a layer's forward and backward. Let s be those of its matmuls and attention in f, without
moving rows to their experts and back. A mode adds these seconds to the backward of a micro-batch, and keeps:

    none        0                              everything
    selective   f - s                          inputs, results of matmuls and attention
    full        f                              inputs
    offload     max(c - f, 0) + max(c - b, 0)  nothing on the device

c is the time to copy everything over the link to the host, in one direction. Copies out overlap the forward, copies
back the backward. A second forward just before the backward recomputes the rest, in one stretch with it
(host_calls.py): a host that runs ahead in the backward issues it in that time. Under "selective" a host does not issue
matmuls and attention again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.costs.host_calls import PRODUCT
from autopar.costs.layer_costs import LayerCost, Mode
from autopar.costs.liveness import Liveness
from autopar.costs.price import Pricer
from autopar.ir.graph import Graph, LayerRun, Ref, TensorMeta, base_name
from autopar.ir.placement import Placements
from autopar.operators.traits import ATTENTION, MATMULS
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import Operator, num_local
from autopar.sharding.scopes import Scope


@dataclass(frozen=True, slots=True)
class _Kept:
    """Bytes of a layer's carried inputs, and of the results of its matmuls and attention, with the forward seconds and
    the host calls of these.

    Not alive without recomputation: parts, from which a result is composed, and products, which differ from the
    call's result. When a layer runs again, the result replaces each product at once; largest: of them.
    """

    inputs: float
    results: float
    parts: float
    products: float
    largest: float
    costly_seconds: float
    costly_calls: float


def recompute_modes(
    graph: Graph,
    operators: Mapping[tuple[str, str], Operator],
    pricer: Pricer,
    assignment: Assignment,
    scope: Scope,
    unit: LayerCost,
) -> dict[str, Mode]:
    """Return "none", and the modes of a class of layers that keep less than everything. unit: complete, without its
    modes."""
    kept, live = _kept(graph, operators, pricer, assignment, scope), unit.live
    again = _repeated(live)
    fetched = _fetched(again, live.kept)
    # The host stores everything; while a layer runs backward, its tensors and the next one's are on the device.
    copied = live.kept / pricer.cluster.device.host_link_bytes_per_second
    late = max(copied - max(unit.forward_seconds, unit.host[0]), 0.0)
    late += max(copied - max(unit.backward_seconds, unit.host[1]), 0.0)
    issuing = pricer.rates.host_call_seconds
    modes = {
        "none": Mode(0.0, live.kept, unit.transient_bytes, live),
        "offload": Mode(late, 0.0, max(fetched.forward, fetched.waiting), fetched),
    }
    beside = kept.parts + kept.products, kept.parts + kept.largest
    for name, num_bytes, (once, repeated), seconds in (
        (
            "selective",
            kept.inputs + kept.results,
            beside,
            _more(unit, unit.forward_seconds - kept.costly_seconds, unit.host[0] - kept.costly_calls * issuing),
        ),
        ("full", kept.inputs, (0.0, 0.0), _more(unit, unit.forward_seconds, unit.host[0])),
    ):
        if num_bytes < live.kept:
            alive = replace(_fetched(again, repeated), forward=again.forward + once)
            transient = max(alive.forward, alive.waiting) - num_bytes
            modes[name] = Mode(seconds, num_bytes, transient, alive)
    return modes


def _more(unit: LayerCost, device: float, host: float) -> float:
    """Return the seconds that a second forward of so many seconds adds to a unit's backward."""
    backward, issued = unit.backward_seconds, unit.host[1]
    return max(backward + device, issued + host) - max(backward, issued)


def _kept(
    graph: Graph, operators: Mapping[tuple[str, str], Operator], pricer: Pricer, assignment: Assignment, scope: Scope
) -> _Kept:
    runs = [piece for piece in graph.body if isinstance(piece, LayerRun) and piece.layer.name == scope.name]
    carried = {position for run in runs for position, _ in run.carried}
    inputs = sum(
        _local_bytes(pricer, meta, assignment.tensors[scope.name, Ref(name)])
        for position, (name, meta) in enumerate(scope.layer.inputs if scope.layer else ())
        if position in carried
    )
    results, parts, costly, calls, products = 0.0, 0.0, 0.0, 0.0, [0.0]
    for node in scope.nodes:
        if base_name(node.op) in MATMULS | ATTENTION and any(meta.requires_grad for meta in node.outputs):
            operator, option = operators[scope.name, node.name], assignment.operators[scope.name, node.name]
            call = pricer.contractions.context_call(operator, option)
            num_bytes = _local_bytes(pricer, node.outputs[0], option.outputs[0])
            # For attention over several blocks of keys, the results of all of them are kept, and merged again.
            parts += (call.kept_blocks - 1) * num_bytes if call else 0.0
            products.append(pricer.product_bytes(operator, option) * (1.0 + pricer.rates.fragmentation))
            results += (call.kept_blocks if call else 1) * num_bytes
            calls += PRODUCT
            costly += pricer.operator_seconds(operator, option)[0] - pricer.contractions.rows.sent_again_seconds(
                operator, option
            )
            costly -= call.again_seconds(pricer.rates.collective_seconds, pricer.rates.memory_seconds) if call else 0.0
    return _Kept(
        inputs=inputs,
        results=results,
        parts=parts,
        products=sum(products),
        largest=max(products),
        costly_seconds=costly,
        costly_calls=calls,
    )


def _repeated(live: Liveness) -> Liveness:
    """Return the live bytes of a layer that runs its forward once more before its backward."""
    repeated = live.again + live.leaving
    return replace(
        live,
        backward=max(live.backward, repeated),
        waiting=max(live.waiting, repeated),
        deferring=max(live.deferring, repeated),
    )


def _fetched(live: Liveness, num_bytes: float) -> Liveness:
    """Return the live bytes of a layer with `num_bytes` on the device again while its backward runs."""
    return replace(
        live,
        backward=live.backward + num_bytes,
        waiting=live.waiting + num_bytes,
        deferring=live.deferring + num_bytes,
    )


def _local_bytes(pricer: Pricer, meta: TensorMeta, placements: Placements) -> float:
    size = num_local(meta, placements, pricer.mesh) * meta.dtype.itemsize
    return size * (1.0 + pricer.rates.fragmentation)
