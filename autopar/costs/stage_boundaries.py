"""Costs of stage boundaries: bytes that a pipeline would send, and parameters that two units share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.costs.peak import slot_of
from autopar.costs.placer import Placer
from autopar.costs.price import Pricer
from autopar.costs.stage_costs import SecondCopy
from autopar.ir.chain import chain, homes_of, segments
from autopar.ir.graph import Graph, LayerRun, Node, Ref, derived
from autopar.ir.mesh import Mesh
from autopar.ir.placement import Stored
from autopar.ir.stage_mesh import StageMesh
from autopar.sharding.assignment import Assignment
from autopar.sharding.call_options import num_local
from autopar.sharding.scopes import scopes_of
from cost_models import collective
from cost_models.mixed_cluster import AnyCluster, MixedCluster


def boundary_bytes(graph: Graph, mesh: Mesh, assignment: Assignment) -> tuple[float, ...]:
    """Return for each unit the local bytes per micro-batch that cross the boundary before it.

    These are tensors with a gradient that an earlier unit computes and this one or a later one reads. Each stage
    recomputes tensors without a gradient.
    """
    place, scopes = Placer(graph, assignment), {scope.name: scope for scope in scopes_of(graph)}
    producers: dict[Ref, int] = {}
    crossing = [0.0] * len(chain(graph))

    def send(ref: Ref, source: int, target: int, scope: str) -> None:
        meta = scopes[scope].metas[ref]
        if meta.requires_grad:
            size = num_local(meta, place.where(scopes[scope], ref), mesh) * meta.dtype.itemsize
            for boundary in range(source + 1, target + 1):
                crossing[boundary] += size

    reach: dict[Ref, int] = {}
    for piece, first, last in _spans(graph):
        for ref in piece.inputs:
            if ref in producers:
                carried = isinstance(piece, LayerRun) and piece.args.index(ref) in {i for i, _ in piece.carried}
                reach[ref] = max(reach.get(ref, 0), first if carried else last)
        if isinstance(piece, LayerRun):
            for _, output in piece.carried:
                for unit in range(first, last):
                    send(piece.layer.outputs[output], unit, unit + 1, piece.layer.name)
        producers |= {Ref(piece.name, i): last for i in range(len(piece.outputs))}
    for ref, target in reach.items():
        send(ref, producers[ref], target, "")
    return tuple(crossing)


def _spans(graph: Graph) -> list[tuple[Node | LayerRun, int, int]]:
    """Return every piece of the body with its first and last unit."""
    unit_of, spans = segments(graph), list[tuple[Node | LayerRun, int, int]]()
    unit, previous = -1, ""
    for piece in graph.body:
        if isinstance(piece, LayerRun):
            spans.append((piece, unit + 1, unit + len(piece.instances)))
            unit, previous = unit + len(piece.instances), ""
            continue
        if unit_of[piece.name] != previous:
            unit, previous = unit + 1, unit_of[piece.name]
        spans.append((piece, unit, unit))
    return spans


@derived
def tied_parameters(graph: Graph) -> Mapping[str, tuple[int, int]]:
    """Return trained top-level parameters that two units read: the first and the last of them (indices in the
    chain)."""
    homes = homes_of(graph)
    trained = {p.name for p in graph.parameters if p.meta.requires_grad and p.name in homes}
    uses: dict[str, list[int]] = {}
    for piece, first, last in _spans(graph):
        for ref in piece.inputs:
            if ref.node in trained:
                uses.setdefault(ref.node, []).extend((first, last))
    return {name: (min(units), max(units)) for name, units in uses.items() if min(units) != max(units)}


def hop_seconds(whole: AnyCluster, source: StageMesh, target: StageMesh, num_bytes: float) -> float:
    """Price one message from every rank of a pipeline rank to its counterpart in the next one, which may differ. In
    a group of nodes this is the message between the slowest neighbors. num_bytes: of one rank, on the side that
    has more of them."""
    if not num_bytes or whole.groups[source.group].num_devices == 1 and source.group == target.group:
        return 0.0
    ranks = max(source.mesh.num_ranks, target.mesh.num_ranks)
    cluster = whole.groups[source.group]
    if isinstance(whole, MixedCluster) and source.group != target.group:
        between = whole.between
        cluster = replace(cluster, num_nodes=2, devices_per_node=ranks, intra_node=between, inter_node=between)
    ranks = min(ranks, cluster.num_devices // 2)
    return collective.seconds("p2p", num_bytes, collective.Group(cluster.num_devices // ranks, ranks), cluster)


def tied_costs(
    graph: Graph, pricer: Pricer, parameters: Mapping[tuple[str, str], Stored], pp: int
) -> dict[str, tuple[tuple[float, float, float], float]]:
    """Return for each shared parameter the bytes of a second copy (weights, gradients, state) and the seconds to sum
    both gradients.

    The sum is priced between pipeline ranks half of the pipeline apart.
    """
    metas, costs = {p.name: p.meta for p in graph.parameters}, {}
    for name in tied_parameters(graph):
        stored = parameters.get(("", name))
        if stored is not None and pp > 1:
            size = num_local(metas[name], stored.placements, pricer.mesh) * pricer.training.gradient_bytes
            # The other copy may be in another group of nodes; it is priced as if it were in this one.
            stride = min(pricer.mesh.num_ranks * (pp // 2), pricer.cluster.num_devices // 2)
            pair = collective.Group(2 if stride else 1, max(stride, 1))
            seconds = collective.seconds("all_reduce", size / pricer.parameters.zero_size(stored), pair, pricer.cluster)
            costs[name] = (pricer.parameters.parameter_bytes(metas[name], stored), seconds)
    return costs


def second_copies(graph: Graph, pricer: Pricer, parameters: Mapping[tuple[str, str], Stored]) -> tuple[SecondCopy, ...]:
    """Return the buffers of parameters that two units read, in the stage of the second."""
    metas, units = {p.name: p.meta for p in graph.parameters}, chain(graph)
    return tuple(
        SecondCopy(first, last, slot_of(pricer, metas[name], parameters["", name], units[last]))
        for name, (first, last) in tied_parameters(graph).items()
        if ("", name) in parameters
    )
