"""What it takes to send the rows of experts' layers to the ranks that have their experts, and back, on one mesh.

One rule for every kind of exchange (``cost_models/machines/dispatches.toml``): over n = N p ranks, p of them on each of
N nodes, T tokens of a rank with k choices among E experts each,

    all_to_all         T k rows over n ranks
    once per node      T m(N) rows over N ranks, one of each node, then T k rows over p ranks of a node
    once per rank      T m(N) rows over N ranks and, while they arrive, T m(n) rows over p ranks of a node
    gathered           T rows of each of n ranks to all of them, and sums of results back
    m(x) = x (1 - C(E - E/x, k) / C(E, k))    of x parts of the experts those that a token has one in, if all choices
                                              are as likely

forward to the experts and back from them, and the same backward. Rows are also read and written by what sorts them,
once by any kind, and as often again as the kind says. Autopar's programs have the first (codegen/runtime/experts.py)
and the second (experts_by_node.py). Which of both follows from rates and numbers alone, not from how many rows there
are: what a token takes when there are many.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cost_models import collective, routing
from cost_models.dispatch import Dispatch, dispatch, dispatches
from cost_models.machine import Cluster

MANY_TOKENS = 1 << 20
"""Tokens of which the seconds are those of their bytes."""

ROW_BYTES = 4096
"""Of the rows by which ways are compared; both ways' seconds are proportional to it."""


ID_BYTES = 4
"""Of the number of an expert as it is told."""

ONCE_PER_NODE = "once_per_node"
"""The kind that programs have beside all_to_all."""


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


def parts_of_token(num_parts: int, num_experts: int, choices: int) -> float:
    """Over how many of equal parts of the experts (nodes, ranks) a token's different choices are spread by the mean."""
    elsewhere = num_experts - num_experts // num_parts
    return num_parts * (1 - math.comb(elsewhere, choices) / math.comb(num_experts, choices))


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
        mean = parts_of_token(num_nodes, self.num_experts, self.choices)
        load = routing.fullest_load(
            num_nodes, self.num_experts, self.choices, self.tokens * num_nodes * self.nodes.neighbours, self.skew
        )
        return self.tokens * min(mean * load, num_nodes)

    def seconds(self, row_bytes: float, copy_bytes: float, load: float, cluster: Cluster) -> float:
        """row_bytes, copy_bytes: of one row inside a node, and of one between nodes. load: of the fullest rank by the
        mean."""
        return self.seconds_across(copy_bytes, cluster) + self.seconds_inside(row_bytes, load, cluster)

    def seconds_across(self, copy_bytes: float, cluster: Cluster) -> float:
        """What goes with every copy to its node, or comes back."""
        return collective.seconds("all_to_all", self.copies * copy_bytes, self.nodes.across, cluster)

    def seconds_inside(self, row_bytes: float, load: float, cluster: Cluster, per_token: float = 0.0) -> float:
        """What goes with every choice to the rank of the node that has its expert, or comes back. per_token: rows of a
        token instead of its choices."""
        num_bytes = load * self.tokens * (per_token or self.choices) * row_bytes
        return collective.seconds("all_to_all", num_bytes, self.nodes.inside, cluster)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The rows of one layer of experts on each rank of a group. load: of the fullest rank by the mean; skew: of its
    experts (`routing`)."""

    group: collective.Group
    num_experts: int
    choices: int
    tokens: float = MANY_TOKENS
    row_bytes: float = ROW_BYTES
    load: float = 1.0
    skew: float = 0.0

    def seconds(self, kind: Dispatch, cluster: Cluster) -> float:
        """One exchange, there or back, with the passes over its rows that not every kind has."""
        sent = self.tokens * self.row_bytes
        if kind.between == "all":
            both = (collective.seconds(k, self.group.size * sent, self.group, cluster) for k in GATHERS)
            return sum(both) / 2
        per_token, nodes = float(self.choices), nodes_of(self.group, cluster)
        if kind.inside == "rank":
            per_token = parts_of_token(self.group.size, self.num_experts, self.choices)
        passes = kind.passes * per_token
        if kind.between == "choice" or nodes is None:
            moving = collective.seconds("all_to_all", self.load * per_token * sent, self.group, cluster)
        else:
            way = OncePerNode(
                nodes, num_experts=self.num_experts, choices=self.choices, tokens=self.tokens, skew=self.skew
            )
            across = way.seconds_across(self.row_bytes, cluster)
            inside = way.seconds_inside(self.row_bytes, self.load, cluster, per_token)
            moving = (across**kind.power + inside**kind.power) ** (1 / kind.power)
            passes += kind.copy_passes * way.copies / self.tokens
        device = cluster.device
        return moving + 2 * passes * sent / (device.memory_bytes_per_second * device.memory_efficiency)

    def fits(self, kind: Dispatch, cluster: Cluster) -> bool:
        """Whether the kind can be told from all_to_all here: by its nodes, or by its ranks."""
        nodes = nodes_of(self.group, cluster)
        whole = nodes is not None and self.num_experts % nodes.num_nodes == 0
        several = 1 < self.choices <= self.num_experts
        return kind.between != "node" or several and (whole or kind.inside == "rank" and nodes is None)

    def fastest(self, names: Iterable[str], cluster: Cluster) -> Dispatch:
        """Of the kinds that fit the one that takes many tokens of such a mixture least, overlap counted; all_to_all
        where there is none."""
        many = Mixture(self.group, self.num_experts, self.choices)
        kinds = [kind for kind in map(dispatch, names) if self.fits(kind, cluster)]
        if len(kinds) < 2:
            return kinds[0] if kinds else dispatch("all_to_all")
        return min(kinds, key=lambda kind: (1 - kind.hidden) * many.seconds(kind, cluster))


GATHERS: tuple[collective.Kind, collective.Kind] = ("all_gather", "reduce_scatter")


def pays(nodes: Nodes, num_experts: int, choices: int, cluster: Cluster) -> bool:
    """Whether programs have the rows of such a mixture cross between nodes once per node."""
    group = collective.Group(nodes.num_nodes * nodes.neighbours, nodes.stride)
    names = [name for name, kind in dispatches().items() if kind.in_programs]
    return Mixture(group, num_experts, choices).fastest(names, cluster).name == ONCE_PER_NODE
