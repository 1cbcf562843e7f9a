"""What it takes to send the rows of experts' layers to the ranks that have their experts, and back, on one mesh.

Rows go straight (codegen/runtime/experts.py), or cross between nodes once per node (experts_by_node.py): over n = N p
ranks, p of them on each of N nodes, T tokens of a rank with k choices among E experts each,

    straight           all_to_all of T k rows over n ranks
    once per node      all_to_all of T m rows over N ranks, one of each node, and of T k rows over p ranks of a node
    m = N (1 - C(E - E/N, k) / C(E, k))       nodes that have an expert of a token, if all choices are as likely

forward to the experts and back from them, and the same backward. On every rank the rows that a gather or sum makes are
read and written. Which of both programs have follows from rates and numbers alone, not from how many rows there are:
what a token takes when there are many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_models import collective, routing
from cost_models.machine import Cluster

MANY_TOKENS = 1 << 20
"""Tokens of which the seconds are those of their bytes."""

ROW_BYTES = 4096
"""Of the rows by which ways are compared; both ways' seconds are proportional to it."""


ID_BYTES = 4
"""Of the number of an expert as it is told."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """How the ranks that share out experts lie: `neighbours` of them, `stride` apart, on each of `num_nodes` nodes."""

    num_nodes: int
    neighbours: int
    stride: int

    @property
    def across(self) -> collective.Group:
        """Ranks at one place of all nodes."""
        return collective.Group(self.num_nodes, self.stride * self.neighbours)

    @property
    def inside(self) -> collective.Group:
        """Ranks of a node."""
        return collective.Group(self.neighbours, self.stride)


def nodes_of(group: collective.Group, cluster: Cluster) -> Nodes | None:
    """The nodes that the group spans, where it has as many ranks on each and several on one; None elsewhere."""
    size, stride, per_node = group.size, group.stride, cluster.devices_per_node
    neighbours = per_node // stride
    spans = size * stride > per_node and per_node % stride == 0 and neighbours > 1 and size % neighbours == 0
    return Nodes(size // neighbours, neighbours, stride) if spans else None


def nodes_of_token(num_nodes: int, num_experts: int, choices: int) -> float:
    """Over how many nodes a token's choices of different experts are spread by the mean."""
    elsewhere = num_experts - num_experts // num_nodes
    return num_nodes * (1 - math.comb(elsewhere, choices) / math.comb(num_experts, choices))


def seconds_straight(row_bytes: float, load: float, group: collective.Group, cluster: Cluster) -> float:
    """One exchange of rows of so many bytes together on a rank; load: what the fullest rank gets by the mean."""
    return collective.seconds("all_to_all", load * row_bytes, group, cluster)


@dataclass(frozen=True, slots=True)
class OncePerNode:
    """One exchange by way of the nodes. tokens: of a rank; skew: of its experts (`routing`)."""

    nodes: Nodes
    num_experts: int
    choices: int
    tokens: float
    skew: float

    @property
    def copies(self) -> float:
        """Rows that leave a rank for nodes, its own among them; on the way to the fullest of them, at most all tokens
        for each node."""
        num_nodes = self.nodes.num_nodes
        mean = nodes_of_token(num_nodes, self.num_experts, self.choices)
        load = routing.fullest_load(
            num_nodes, self.num_experts, self.choices, self.tokens * num_nodes * self.nodes.neighbours, self.skew
        )
        return self.tokens * min(mean * load, num_nodes)

    def seconds(self, row_bytes: float, copy_bytes: float, load: float, cluster: Cluster) -> float:
        """row_bytes, copy_bytes: of one row inside a node, and of one between nodes. load: as `seconds_straight`."""
        return self.seconds_across(copy_bytes, cluster) + self.seconds_inside(row_bytes, load, cluster)

    def seconds_across(self, copy_bytes: float, cluster: Cluster) -> float:
        """What goes with every copy to its node, or comes back."""
        return collective.seconds("all_to_all", self.copies * copy_bytes, self.nodes.across, cluster)

    def seconds_inside(self, row_bytes: float, load: float, cluster: Cluster) -> float:
        """What goes with every choice to the rank of the node that has its expert, or comes back."""
        num_bytes = load * self.tokens * self.choices * row_bytes
        return collective.seconds("all_to_all", num_bytes, self.nodes.inside, cluster)


def pays(nodes: Nodes, num_experts: int, choices: int, cluster: Cluster) -> bool:
    """Whether many tokens travel faster once per node, with one more pass over their copies on both sides."""
    if not 1 < choices <= num_experts or num_experts % nodes.num_nodes:
        return False
    group = collective.Group(nodes.num_nodes * nodes.neighbours, nodes.stride)
    way = OncePerNode(nodes=nodes, num_experts=num_experts, choices=choices, tokens=MANY_TOKENS, skew=0.0)
    straight = seconds_straight(MANY_TOKENS * choices * ROW_BYTES, 1.0, group, cluster)
    device = cluster.device
    passes = 4 * way.copies * ROW_BYTES / (device.memory_bytes_per_second * device.memory_efficiency)
    return way.seconds(ROW_BYTES, ROW_BYTES, 1.0, cluster) + passes < straight
