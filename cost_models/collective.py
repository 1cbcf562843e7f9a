"""The time of one collective operation on a process group laid over a cluster.

Alpha-beta costs after R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), with the choices and step counts of NCCL (``src/graph/tuning.cc``; bandwidth factors as in
``doc/PERFORMANCE.md`` of nccl-tests). Notation:

    n ranks on N nodes, p = n / N ranks per node;  B bytes of the whole tensor (see `seconds`)
    w      inter-node rate of one device:  achievable / (1 + c log2 N), over devices_per_node if the node shares a link
    r      rate of one rank in a ring: the intra-node rate; p w where the ring leaves the node; the smaller if both
    lat(s) latency of s ring steps per rank pair: hops inside nodes cost alpha_intra, hops between nodes alpha_inter
    s0     startup_seconds of the slowest link in use

alpha, s0 and the rates of a link are first multiplied by its latency_factors and rate_factors for the kind, if any.
All groups of a mesh axis communicate at the same time, so a group owns p / devices_per_node of its nodes' network
interfaces: that is where p w comes from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from cost_models.hardware import COLLECTIVES, Link
from cost_models.machine import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks base + i * stride, i < size, for every base that the other mesh axes leave. Raises ValueError."""

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a group needs size and stride of at least 1, got {self.size} and {self.stride}")


@dataclass(frozen=True, slots=True)
class Layout:
    """How a group lies on a cluster.

    num_nodes: nodes that the group touches. ranks_per_node: its ranks on each of them, on average and rounded up.
    devices_per_node / ranks_per_node groups of the axis therefore share a node's network interfaces.
    """

    num_nodes: int
    ranks_per_node: int


def lay_out(group: Group, cluster: Cluster) -> Layout:
    """Where the group's ranks are, ranks being numbered node by node. Raises ValueError if the cluster is too small.

    If the groups tile the cluster but not the node (6 ranks in a row on nodes of 8), some of them lie across two
    nodes; those finish last, so they are the ones described.
    """
    span = group.size * group.stride
    if span > cluster.num_devices:
        raise ValueError(f"{group} spans {span} ranks, but the cluster {cluster} has {cluster.num_devices} devices")
    per_node = cluster.devices_per_node
    if span <= per_node:
        across = per_node % span != 0 and cluster.num_devices % span == 0 and group.size > 1
        num_nodes = 2 if across else 1
    else:
        num_nodes = min(group.size, math.ceil(span / per_node))
    return Layout(num_nodes, math.ceil(group.size / num_nodes))


def wire_bytes(kind: Kind, num_bytes: float, size: int) -> float:
    """Bytes that one of `size` ranks sends; num_bytes as in `seconds`.

    all_reduce 2 (n-1)/n B; all_gather, reduce_scatter and all_to_all (n-1)/n B; broadcast and p2p at most B (the last
    rank of a chain sends nothing).
    """
    _check(kind, num_bytes)
    if size == 1:
        return 0.0
    if kind in ("broadcast", "p2p"):
        return num_bytes
    return (2 if kind == "all_reduce" else 1) * num_bytes * (size - 1) / size


def seconds(kind: Kind, num_bytes: float, group: Group, cluster: Cluster) -> float:
    """Time until the last rank is done, when all groups of the axis do the same at once.

    num_bytes: of the whole tensor: the gathered output of all_gather on one rank; the full input of reduce_scatter and
    all_reduce on one rank; the local buffer of one rank for all_to_all (of which it sends (n-1)/n); the message of
    broadcast and p2p. p2p is a send from every rank of the group to the next one, the slowest counted.
    A group of one, and nothing to send, cost 0. Raises ValueError for an unknown kind, negative bytes, or a group
    larger than the cluster.
    """
    _check(kind, num_bytes)
    path = _path(kind, group, cluster)
    if group.size == 1 or num_bytes == 0:
        return 0.0
    if kind == "all_reduce":
        return path.startup_seconds + _all_reduce(num_bytes, path)
    if kind in ("all_gather", "reduce_scatter"):
        return path.startup_seconds + _ring_pass(num_bytes, path)
    if kind == "all_to_all":
        return path.startup_seconds + _all_to_all(num_bytes, path)
    if kind == "broadcast":
        return path.startup_seconds + _broadcast(num_bytes, path)
    return path.startup_seconds + path.slowest_latency + num_bytes / _p2p_rate(group, path, cluster)


def _check(kind: str, num_bytes: float) -> None:
    if kind not in COLLECTIVES:
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVES)}")
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes must be zero or more, got {num_bytes}")


@dataclass(frozen=True, slots=True)
class _Path:
    """A group's layout with the rates and latencies that apply to it; rates in bytes per second of one rank."""

    size: int
    layout: Layout
    intra_rate: float
    device_rate: float
    intra_latency: float
    inter_latency: float
    startup_seconds: float
    in_network_reduction: bool

    @property
    def group_rate(self) -> float:
        """The group's share of a node's network interfaces, p w: the sibling groups have the rest."""
        return self.device_rate * self.layout.ranks_per_node

    @property
    def ring_rate(self) -> float:
        if self.layout.num_nodes == 1:
            return self.intra_rate
        return self.group_rate if self.layout.ranks_per_node == 1 else min(self.intra_rate, self.group_rate)

    @property
    def slowest_latency(self) -> float:
        return self.intra_latency if self.layout.num_nodes == 1 else self.inter_latency

    @property
    def ring_latency(self) -> float:
        """Of one pass around the ring: n - N hops inside nodes, N - 1 between them (NCCL's tuning.cc)."""
        inter_hops = self.layout.num_nodes - 1
        return (self.size - 1 - inter_hops) * self.intra_latency + inter_hops * self.inter_latency

    @property
    def tree_latency(self) -> float:
        """From the leaves of a binary tree to its root: over the ranks of a node, then over the nodes."""
        inside, between = _levels(self.layout.ranks_per_node), _levels(self.layout.num_nodes)
        return inside * self.intra_latency + between * self.inter_latency


def _path(kind: Kind, group: Group, cluster: Cluster) -> _Path:
    layout = lay_out(group, cluster)
    intra, inter = _for_kind(cluster.intra_node, kind), _for_kind(cluster.inter_node, kind)
    sharers = cluster.devices_per_node if inter.shared_by_node else 1
    contention = 1 + inter.contention_per_doubling * math.log2(layout.num_nodes)
    links = [inter] if layout.ranks_per_node == 1 else [intra] if layout.num_nodes == 1 else [intra, inter]
    return _Path(
        size=group.size,
        layout=layout,
        intra_rate=intra.achievable_bytes_per_second,
        device_rate=inter.achievable_bytes_per_second / sharers / contention,
        intra_latency=intra.latency_seconds,
        inter_latency=inter.latency_seconds,
        startup_seconds=max(link.startup_seconds for link in links),
        in_network_reduction=intra.in_network_reduction,
    )


def _for_kind(link: Link, kind: Kind) -> Link:
    """The link with its factors for `kind` applied."""
    latency, rate = link.latency_factors.get(kind, 1.0), link.rate_factors.get(kind, 1.0)
    if latency == rate == 1.0:
        return link
    return replace(
        link,
        bytes_per_second=link.bytes_per_second * rate,
        latency_seconds=link.latency_seconds * latency,
        startup_seconds=link.startup_seconds * latency,
    )


def _levels(count: int) -> int:
    return math.ceil(math.log2(count))


def _ring_pass(num_bytes: float, path: _Path) -> float:
    """all_gather or reduce_scatter on a ring: lat(n-1) + (n-1)/n B / r (Thakur et al., sections 4.1 and 4.2)."""
    return path.ring_latency + num_bytes * (path.size - 1) / path.size / path.ring_rate


def _all_reduce(num_bytes: float, path: _Path) -> float:
    """The fastest of

    ring: reduce_scatter, then all_gather: 2 lat(n-1) + 2 (n-1)/n B / r (Thakur et al., section 4.5)
    tree: pipelined reduce to the root and broadcast: 2 lat(tree) + 2 B / r (NCCL's double binary tree)
    in the switch, where the link sums: max(B / intra, 2 (N-1)/N B / (p w)) + latency of the node and of the tree over
    nodes (NCCL's NVLS and NVLSTree)
    """
    times = [
        2 * _ring_pass(num_bytes, path),
        2 * path.tree_latency + 2 * num_bytes / path.ring_rate,
    ]
    layout = path.layout
    if path.in_network_reduction and layout.ranks_per_node > 1:
        between = 2 * (layout.num_nodes - 1) / layout.num_nodes * num_bytes / path.group_rate
        latency = 2 * path.intra_latency + 2 * _levels(layout.num_nodes) * path.inter_latency
        times.append(latency + max(num_bytes / path.intra_rate, between))
    return min(times)


def _all_to_all(num_bytes: float, path: _Path) -> float:
    """The faster of pairwise exchange and Bruck's algorithm (Thakur et al., section 4.3).

    pairwise: (n-1) alpha + max((p-1)/n B / intra, (n-p)/n B / w): every rank sends B/n to each other, over NVLink and
    network at once. Bruck: log2(n) messages of B/2, for small tensors.
    """
    size, per_node = path.size, path.layout.ranks_per_node
    inside = num_bytes * (per_node - 1) / size / path.intra_rate
    between = num_bytes * (size - per_node) / size / path.device_rate
    pairwise = (per_node - 1) * path.intra_latency + (size - per_node) * path.inter_latency + max(inside, between)
    slowest_rate = path.intra_rate if path.layout.num_nodes == 1 else min(path.intra_rate, path.device_rate)
    bruck = _levels(size) * (path.slowest_latency + num_bytes / 2 / slowest_rate)
    return min(pairwise, bruck)


def _broadcast(num_bytes: float, path: _Path) -> float:
    """The faster of a binomial tree, lat(tree) + ceil(log2 n) B / r (Thakur et al., section 4.4), and NCCL's
    pipelined chain, lat(n-1) + B / r."""
    binomial = path.tree_latency + _levels(path.size) * num_bytes / path.ring_rate
    chain = path.ring_latency + num_bytes / path.ring_rate
    return min(binomial, chain)


def _p2p_rate(group: Group, path: _Path, cluster: Cluster) -> float:
    """Of the slowest pair: a device's own network interface, or its part of the node's among the pairs that cross."""
    if path.layout.num_nodes == 1:
        return path.intra_rate
    contention = 1 + cluster.inter_node.contention_per_doubling
    rate = _for_kind(cluster.inter_node, "p2p").achievable_bytes_per_second / contention
    if cluster.inter_node.shared_by_node:
        return rate / min(group.stride, cluster.devices_per_node)
    return rate
