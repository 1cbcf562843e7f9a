"""Seconds to send the rows of expert layers to their experts' ranks and back, on one mesh.

One rule covers every kind of exchange (``cost_models/machines/dispatches.toml``). With n = N p ranks, p on each of N
nodes, T tokens of a rank with k choices among E experts each:

    all_to_all         T k rows over n ranks
    once per node      T m(N) rows over N ranks, one of each node, then T k rows over p ranks of a node
    once per rank      T m(N) rows over N ranks and, while they arrive, T m(n) rows over p ranks of a node
    gathered           T rows of each of n ranks to all of them, and sums of results back
    m(x) = x (1 - C(E - E/x, k) / C(E, k))    of x equal groups of experts, those that a token
                                              chooses from if all choices are equally likely

Rows travel forward to the experts and back, and their gradients do the same backward. Sorting also reads and writes
rows: once for any kind, plus as often as the kind says. Generated programs use the first kind
(codegen/runtime/experts.py) and the second (experts_by_node.py). The choice follows from rates and numbers of ranks,
experts and choices, not from the number of rows: it compares the time per token for many tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cost_models import collective, routing
from cost_models.dispatch import Dispatch, dispatch, dispatches
from cost_models.machine import Cluster

MANY_TOKENS = 1 << 20
"""Enough tokens that bytes alone determine the seconds."""

ROW_BYTES = 4096
"""Bytes of a row in the comparison; the seconds of both kinds are proportional to it."""


ID_BYTES = 4
"""Bytes of an expert's number as it is sent."""

ONCE_PER_NODE = "once_per_node"
"""The second kind of exchange that programs have; the first is all_to_all."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """The layout of ranks that share experts: `neighbors` ranks, `stride` apart, on each of `num_nodes` nodes."""

    num_nodes: int
    neighbors: int
    stride: int

    @property
    def across(self) -> collective.Group:
        """Return the ranks at the same place of every node."""
        return collective.Group(self.num_nodes, self.stride * self.neighbors)

    @property
    def inside(self) -> collective.Group:
        """Return the ranks of a node."""
        return collective.Group(self.neighbors, self.stride)


def nodes_of(group: collective.Group, cluster: Cluster) -> Nodes | None:
    """Return the group's nodes if it has equally many ranks, and several, on each node; else None."""
    size, stride, per_node = group.size, group.stride, cluster.devices_per_node
    neighbors = per_node // stride
    spans = size * stride > per_node and per_node % stride == 0 and neighbors > 1 and size % neighbors == 0
    return Nodes(size // neighbors, neighbors, stride) if spans else None


def parts_of_token(num_parts: int, num_experts: int, choices: int) -> float:
    """Return over how many equal groups of experts (nodes, ranks) a token's different choices spread on average."""
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
        """Return the rows that leave a rank for nodes, the local node included. At most all tokens go to each node:
        this limits the fullest."""
        num_nodes = self.nodes.num_nodes
        mean = parts_of_token(num_nodes, self.num_experts, self.choices)
        load = routing.fullest_load(
            num_nodes, self.num_experts, self.choices, self.tokens * num_nodes * self.nodes.neighbors, self.skew
        )
        return self.tokens * min(mean * load, num_nodes)

    def seconds(self, row_bytes: float, copy_bytes: float, load: float, cluster: Cluster) -> float:
        """Price the exchange. row_bytes, copy_bytes: of one row inside a node, and of one between nodes. load: of
        the fullest rank relative to the mean."""
        return self.seconds_across(copy_bytes, cluster) + self.seconds_inside(row_bytes, load, cluster)

    def seconds_across(self, copy_bytes: float, cluster: Cluster) -> float:
        """Return the seconds of data that travels with every copy to its node, or back."""
        return collective.seconds("all_to_all", self.copies * copy_bytes, self.nodes.across, cluster)

    def seconds_inside(self, row_bytes: float, load: float, cluster: Cluster, per_token: float = 0.0) -> float:
        """Return the seconds of data that travels with every choice to its expert's rank in the node, or back.
        per_token: rows of a token, if not its choices."""
        num_bytes = load * self.tokens * (per_token or self.choices) * row_bytes
        return collective.seconds("all_to_all", num_bytes, self.nodes.inside, cluster)


@dataclass(frozen=True, slots=True)
class Mixture:
    """The rows of one expert layer on each rank of a group. load: of the fullest rank relative to the mean; skew: of
    its experts (`routing`)."""

    group: collective.Group
    num_experts: int
    choices: int
    tokens: float = MANY_TOKENS
    row_bytes: float = ROW_BYTES
    load: float = 1.0
    skew: float = 0.0

    def seconds(self, kind: Dispatch, cluster: Cluster) -> float:
        """Price one exchange, there or back, with the passes over its rows that are specific to the kind."""
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
        """Return whether the kind differs from all_to_all here: by its nodes, or by its ranks."""
        nodes = nodes_of(self.group, cluster)
        whole = nodes is not None and self.num_experts % nodes.num_nodes == 0
        several = 1 < self.choices <= self.num_experts
        return kind.between != "node" or several and (whole or kind.inside == "rank" and nodes is None)

    def fastest(self, names: Iterable[str], cluster: Cluster) -> Dispatch:
        """Return the kind, among those that fit, with the least time for many tokens of such a mixture, overlap
        included; all_to_all if none fits."""
        many = Mixture(self.group, self.num_experts, self.choices)
        kinds = [kind for kind in map(dispatch, names) if self.fits(kind, cluster)]
        if len(kinds) < 2:
            return kinds[0] if kinds else dispatch("all_to_all")
        return min(kinds, key=lambda kind: (1 - kind.hidden) * many.seconds(kind, cluster))


GATHERS: tuple[collective.Kind, collective.Kind] = ("all_gather", "reduce_scatter")


def pays(nodes: Nodes, num_experts: int, choices: int, cluster: Cluster) -> bool:
    """Return whether programs have the rows of such a mixture cross between nodes once per node."""
    group = collective.Group(nodes.num_nodes * nodes.neighbors, nodes.stride)
    names = [name for name, kind in dispatches().items() if kind.in_programs]
    return Mixture(group, num_experts, choices).fastest(names, cluster).name == ONCE_PER_NODE
