"""The mesh over nodes and devices: the location of every rank, colored by its index on one axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autopar.ir.mesh import DATA_AXES, PIPELINE_AXIS
from autopar.page.markup import AXIS_COLORS, Markup, element, section
from autopar.program import GeneratedProgram
from autopar.units import counted
from codegen.program import PipelineProgram
from cost_models.hardware import Link
from cost_models.machine import Cluster, label
from cost_models.mixed_cluster import MixedCluster

MOST_NODES = 16
"""The most nodes that are drawn; a larger cluster shows the nodes of one data-parallel replica."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank: its node, and its index on every axis of its stage mesh, including `pp`."""

    rank: int
    node: int
    coordinate: dict[str, int]

    @property
    def is_first_replica(self) -> bool:
        """Whether the rank has the first rows of the batch."""
        return not any(self.coordinate.get(axis, 0) for axis in DATA_AXES)


def places_of(compiled: GeneratedProgram) -> list[Place]:
    """Return all ranks, as programs number them."""
    nodes = [number for number, _ in _nodes(compiled)]
    meshes, places = compiled.plan.stage_meshes, []
    for rank in range(compiled.plan.num_ranks):
        program = compiled.program
        pipeline_rank, stage_rank = program.place(rank) if isinstance(program, PipelineProgram) else (0, rank)
        mesh = meshes[pipeline_rank].mesh.compact
        stages = {PIPELINE_AXIS: pipeline_rank} if len(meshes) > 1 else {}
        places.append(Place(rank, nodes[rank], stages | mesh.coordinate(stage_rank)))
    return places


def _nodes(compiled: GeneratedProgram) -> Iterator[tuple[int, Cluster]]:
    """Yield for every rank its node and the node's group. Ranks fill nodes in order."""
    before = 0
    for group in compiled.cluster.groups:
        for device in range(group.num_devices):
            yield before + device // group.devices_per_node, group
        before += group.num_nodes


def mesh_section(compiled: GeneratedProgram) -> Markup:
    """Return the drawing, with a choice of the axis that gives the colors."""
    places = places_of(compiled)
    groups = dict(_nodes(compiled))
    axes = list(dict.fromkeys(axis for place in places for axis in place.coordinate))
    shown = _shown_nodes(places)
    by_node: dict[int, list[Place]] = {node: [] for node in shown}
    for place in places:
        if place.node in by_node:
            by_node[place.node].append(place)
    first = axes[0] if axes else ""
    boxes = [_node(node, node_places, groups[node], first) for node, node_places in by_node.items()]
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
    return "Each cell is a rank and names its index on an axis. Ranks of one color have the same index."


def _choice(axes: list[str]) -> Markup | None:
    """Return buttons for the axis of the colors. The script shows them."""
    if len(axes) < 2:
        return None
    buttons = [
        element("button", axis, type="button", data_axis=axis, aria_pressed="true" if axis == axes[0] else "false")
        for axis in axes
    ]
    return element("div", "color by ", buttons, class_="choice", hidden=True, role="group", aria_label="color by")


def _shown_nodes(places: list[Place]) -> list[int]:
    nodes = list(dict.fromkeys(place.node for place in places))
    if len(nodes) <= MOST_NODES:
        return nodes
    replica = dict.fromkeys(place.node for place in places if place.is_first_replica)
    return list(replica)[:MOST_NODES]


def _left_out(places: list[Place], shown: list[int], count: int) -> str:
    """Return which part of the cluster is drawn, in words."""
    replica = [place for place in places if place.is_first_replica]
    nodes = len({place.node for place in replica})
    times = len(places) // len(replica)
    part = f", of which the first {len(shown)} are drawn" if nodes > len(shown) else ""
    size = f"{counted(len(replica), 'rank')} on {counted(nodes, 'node')}"
    return f"Filled: one data-parallel replica, {size}{part}. The cluster has {times} of them, on {count} nodes."


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
    coordinate = ", ".join(f"{name} {index}" for name, index in place.coordinate.items())
    place_on_axis = place.coordinate.get(axis, 0)
    data = {f"data_{name}": str(index) for name, index in place.coordinate.items()}
    replica = " replica" if place.is_first_replica else ""
    return element(
        "div",
        element("b", place.rank),
        element("span", f"{axis} {place_on_axis}" if axis else "", class_="place"),
        class_=f"cell {AXIS_COLORS[place_on_axis % len(AXIS_COLORS)]}{replica}",
        title=f"rank {place.rank}: node {place.node}; {coordinate}",
        **data,
    )


def _links(compiled: GeneratedProgram) -> str:
    """Return the links between devices and nodes, in words."""
    cluster, parts = compiled.cluster, []
    for group in cluster.groups:
        group_words = f" of {group}" if isinstance(cluster, MixedCluster) else ""
        if group.devices_per_node > 1:
            parts.append(f"inside a node{group_words}: {_link(group.intra_node)}")
        if group.num_nodes > 1:
            parts.append(f"between nodes{group_words}: {_link(group.inter_node)}")
    if isinstance(cluster, MixedCluster):
        parts.append(f"between groups: {_link(cluster.between)}")
    text = "; ".join(parts)
    return text[:1].upper() + text[1:] + "." if text else "One device."


def _link(link: Link) -> str:
    return f"{label(link)}, {link.bytes_per_second / 1e9:.3g} GB/s per device each way"
