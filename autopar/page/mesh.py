"""The mesh over nodes and devices: which rank sits where, coloured by its place on one axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.mesh import DATA_AXES, PIPELINE_AXIS
from autopar.page.colours import AXES
from autopar.page.markup import Markup, element, section
from autopar.program import GeneratedProgram
from codegen.program import PipelineProgram
from cost_models.hardware import Link
from cost_models.machine import Cluster, label
from cost_models.mixed import MixedCluster

MOST_NODES = 16
"""Nodes that are drawn; of more, those of one data-parallel replica."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank: its node, and its index on every axis of its stage mesh, `pp` among them."""

    rank: int
    node: int
    coordinate: dict[str, int]

    @property
    def is_first_replica(self) -> bool:
        """Whether it has the first rows of the batch."""
        return not any(self.coordinate.get(axis, 0) for axis in DATA_AXES)


def places_of(compiled: GeneratedProgram) -> list[Place]:
    """All ranks, as programs number them."""
    nodes = [number for number, _ in _nodes(compiled)]
    meshes, found = compiled.plan.stage_meshes, []
    for rank in range(compiled.plan.num_ranks):
        program = compiled.program
        pipeline_rank, own = program.place(rank) if isinstance(program, PipelineProgram) else (0, rank)
        mesh = meshes[pipeline_rank].mesh.compact
        stages = {PIPELINE_AXIS: pipeline_rank} if len(meshes) > 1 else {}
        found.append(Place(rank, nodes[rank], stages | mesh.coordinate(own)))
    return found


def _nodes(compiled: GeneratedProgram) -> Iterator[tuple[int, Cluster]]:
    """For every rank, its node and the group of nodes that this is of: ranks fill nodes in their order."""
    before = 0
    for group in compiled.cluster.groups:
        for device in range(group.num_devices):
            yield before + device // group.devices_per_node, group
        before += group.num_nodes


def mesh_section(compiled: GeneratedProgram) -> Markup:
    """The drawing, with a choice of the axis that gives the colours."""
    places = places_of(compiled)
    groups = dict(_nodes(compiled))
    axes = list(dict.fromkeys(axis for place in places for axis in place.coordinate))
    shown = _shown_nodes(places)
    by_node: dict[int, list[Place]] = {node: [] for node in shown}
    for place in places:
        if place.node in by_node:
            by_node[place.node].append(place)
    first = axes[0] if axes else ""
    boxes = [_node(node, own, groups[node], first) for node, own in by_node.items()]
    count = len(set(groups))
    has_more = len(shown) < count
    kind = "nodes replica-shown" if has_more else "nodes"
    drawn = element("div", boxes, class_=kind, id="mesh")
    more = element("p", _left_out(places, shown, count), class_="note") if has_more else None
    return section(
        "Mesh", _choice(axes), drawn, more, element("p", _links(compiled), class_="note"), intro=_intro(axes)
    )


def _intro(axes: list[str]) -> str:
    if not axes:
        return "One rank does everything."
    return "Each cell is a rank. Ranks of one colour have the same place on an axis, which the cell names."


def _choice(axes: list[str]) -> Markup | None:
    """Buttons that choose the axis of the colours; they are shown where scripts run."""
    if len(axes) < 2:
        return None
    buttons = [
        element("button", axis, type="button", data_axis=axis, aria_pressed="true" if axis == axes[0] else "false")
        for axis in axes
    ]
    return element("div", "colour by ", buttons, class_="choice", hidden=True, role="group", aria_label="colour by")


def _shown_nodes(places: list[Place]) -> list[int]:
    nodes = list(dict.fromkeys(place.node for place in places))
    if len(nodes) <= MOST_NODES:
        return nodes
    replica = dict.fromkeys(place.node for place in places if place.is_first_replica)
    return list(replica)[:MOST_NODES]


def _left_out(places: list[Place], shown: list[int], count: int) -> str:
    """What is not drawn, in words."""
    replica = [place for place in places if place.is_first_replica]
    nodes = len({place.node for place in replica})
    times = len(places) // len(replica)
    part = f", of which the first {len(shown)} are drawn" if nodes > len(shown) else ""
    what = f"{len(replica)} rank{'s' if len(replica) > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}"
    return f"Filled: one data-parallel replica, {what}{part}. The cluster holds {times} of them, on {count} nodes."


def _node(node: int, places: list[Place], group: Cluster, axis: str) -> Markup:
    cells = [_cell(place, axis) for place in places]
    name = f"node {node}"
    return element(
        "figure",
        element("figcaption", name, element("span", label(group.device))),
        element("div", cells, class_="cells"),
        class_="node",
    )


def _cell(place: Place, axis: str) -> Markup:
    where = ", ".join(f"{name} {index}" for name, index in place.coordinate.items())
    own = place.coordinate.get(axis, 0)
    data = {f"data_{name}": str(index) for name, index in place.coordinate.items()}
    replica = " replica" if place.is_first_replica else ""
    return element(
        "div",
        element("b", place.rank),
        element("span", f"{axis} {own}" if axis else "", class_="place"),
        class_=f"cell {AXES[own % len(AXES)]}{replica}",
        title=f"rank {place.rank}: node {place.node}; {where}",
        **data,
    )


def _links(compiled: GeneratedProgram) -> str:
    """What joins devices and nodes."""
    cluster, parts = compiled.cluster, []
    for group in cluster.groups:
        of = f" of {group}" if isinstance(cluster, MixedCluster) else ""
        if group.devices_per_node > 1:
            parts.append(f"inside a node{of}: {_link(group.intra_node)}")
        if group.num_nodes > 1:
            parts.append(f"between nodes{of}: {_link(group.inter_node)}")
    if isinstance(cluster, MixedCluster):
        parts.append(f"between groups: {_link(cluster.between)}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else "One device."


def _link(link: Link) -> str:
    return f"{label(link)}, {link.bytes_per_second / 1e9:.3g} GB/s per device each way"
