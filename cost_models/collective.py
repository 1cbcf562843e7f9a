"""The time of one collective operation on a process group laid over a cluster.

Alpha-beta costs after R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19 (2005), with the algorithms, protocols and step counts of NCCL (``src/graph/tuning.cc``; bandwidth
factors as in ``doc/PERFORMANCE.md`` of nccl-tests). Every algorithm and protocol is a line, fixed + per_byte B, and the
time is that of the lowest line. Notation:

    n ranks on N nodes, p = n / N ranks per node;  B bytes of the whole tensor (see `seconds`)
        g      contention on the fabric: 1 + c log2 M p / d, c the link's contention_per_doubling, d devices per node,
           M all nodes of the cluster
    i      intra-node rate of one rank: achievable, times the share of its links that lead to its group (`mesh`)
    w      inter-node rate of one device:  achievable / g, over devices_per_node if the node shares a link
    hi, he one hop inside and between nodes, of the Simple protocol on a ring; he is the link's latency times g
    s0     startup_seconds of the slowest link in use
        e      the share of a ring step taken by a rank's own chunk (``machines/nccl.toml``, own_step; 0 for
        all_reduce)

A protocol multiplies s0, hops and rates (`nccl.protocol`). Links that NCCL does not drive have one protocol, with
factors of 1 and e = 0. s0, hops and the rates of a link are first multiplied by its latency_factors and rate_factors
for the kind. All groups of a mesh axis communicate at the same time, so a group owns p / d of its nodes' network
interfaces: its ring leaves a node at p w. Interfaces of equal number in all nodes form one rail, with its own switches.
A group with one rank per node stays on its rail, and a group waits for the slowest of its p rails. Groups on other
nodes share the same switches. So g grows with the nodes of the cluster, not of the group, and with the share of the
rails that a group uses (docs/published_runs.md, "Rails").

Ranks of a ring wait for one neighbor only, so noisy steps slow it by a factor that does not grow with n (K. Johansson,
"Shape fluctuations and random matrices", 2000: last-passage times are linear in the number of steps). A shared fabric
slows down with N. Hence hops and bytes between nodes share one factor g, and there is no term for the slowest of n
steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from cost_models import nccl
from cost_models.hardware import COLLECTIVES, Link
from cost_models.machine import Cluster

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "p2p"]


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks base + i * stride, i < size, for every base that the other mesh axes allow. Raises ValueError."""

    size: int
    stride: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.stride < 1:
            raise ValueError(f"a group needs size and stride of at least 1, got {self.size} and {self.stride}")


@dataclass(frozen=True, slots=True)
class Layout:
    """The position of a group on a cluster.

    num_nodes: nodes that the group touches. ranks_per_node: its ranks on each of them, on average and rounded up. So
    devices_per_node / ranks_per_node groups of the axis share a node's network interfaces.
    """

    num_nodes: int
    ranks_per_node: int


def lay_out(group: Group, cluster: Cluster) -> Layout:
    """Place the group's ranks, numbered node by node. Raises ValueError if the cluster is too small.

    If the groups tile the cluster but not the node (6 consecutive ranks on nodes of 8), some of them span two nodes.
    Those finish last, so the layout is theirs.
    """
    span = group.size * group.stride
    if span > cluster.num_devices:
        raise ValueError(f"{group} spans {span} ranks, but the cluster {cluster} has {cluster.num_devices} devices")
    return _lay_out(group, cluster.num_nodes, cluster.devices_per_node)


def _lay_out(group: Group, num_nodes: int, per_node: int) -> Layout:
    span = group.size * group.stride
    if span <= per_node:
        across = per_node % span != 0 and num_nodes * per_node % span == 0 and group.size > 1
        num_nodes = 2 if across else 1
    else:
        num_nodes = min(group.size, math.ceil(span / per_node))
    return Layout(num_nodes, math.ceil(group.size / num_nodes))


def wire_bytes(kind: Kind, num_bytes: float, size: int) -> float:
    """Return the bytes that one of `size` ranks sends; num_bytes as in `seconds`.

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
    """Return the time until the last rank is done, when all groups of the axis run the same collective at once.

    num_bytes: of the whole tensor: the gathered output of all_gather on one rank; the full input of reduce_scatter and
    all_reduce on one rank; the local buffer of one rank for all_to_all (of which it sends (n-1)/n); the message of
    broadcast and p2p. p2p is a send from every rank of the group to the next one, the slowest counted.
    A group of one, and an empty message, cost 0. Raises ValueError for an unknown kind, negative bytes, or a group
    larger than the cluster.
    """
    if kind not in COLLECTIVES or not num_bytes >= 0:
        _check(kind, num_bytes)
    per_node = cluster.devices_per_node
    if group.size * group.stride > cluster.num_nodes * per_node:
        lay_out(group, cluster)
    if group.size == 1 or num_bytes == 0:
        return 0.0
    shortest = math.inf
    for fixed, per_byte in _lines(kind, group, cluster.num_nodes, per_node, cluster.intra_node, cluster.inter_node):
        time = fixed + per_byte * num_bytes
        if time < shortest:
            shortest = time
    return shortest


def _check(kind: str, num_bytes: float) -> None:
    if kind not in COLLECTIVES:
        raise ValueError(f"unknown collective {kind!r}; known: {', '.join(COLLECTIVES)}")
    if not num_bytes >= 0:
        raise ValueError(f"num_bytes must be zero or more, got {num_bytes}")


Line = tuple[float, float]
"""Fixed seconds, and seconds per byte."""


@lru_cache(maxsize=4096)
def _lines(kind: Kind, group: Group, num_nodes: int, per_node: int, intra: Link, inter: Link) -> tuple[Line, ...]:
    """Return the lines of every algorithm and protocol that is the fastest for some size.

    The arguments num_nodes and per_node replace a Cluster, whose device would dominate the cache lookup.
    """
    path = _path(kind, _lay_out(group, num_nodes, per_node), group, num_nodes, per_node, intra, inter)
    if kind == "all_reduce":
        return _lowest([*_rings(2, path), *_trees(path), *_switch(path)])
    if kind in ("all_gather", "reduce_scatter"):
        return _lowest(_rings(1, path))
    if kind == "all_to_all":
        return _lowest(_all_to_all(path))
    if kind == "broadcast":
        return _lowest(_broadcast(path))
    rate = _p2p_rate(group, path, per_node)
    return ((path.startup_seconds + path.slowest_latency, 1 / rate),)


def _lowest(lines: Iterator[Line] | list[Line]) -> tuple[Line, ...]:
    """Return the lines (seconds, seconds per byte) that no other line undercuts at every size."""
    kept: list[Line] = []
    for fixed, per_byte in sorted(lines):
        if not kept or per_byte < kept[-1][1]:
            kept.append((fixed, per_byte))
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class _Path:
    """A group's layout with its links (factors applied); rates in bytes per second of one rank."""

    size: int
    layout: Layout
    intra: Link
    inter: Link
    intra_rate: float
    device_rate: float
    startup_seconds: float
    by_nccl: bool
    own_step: float

    @property
    def group_rate(self) -> float:
        """Return the group's share of a node's network interfaces, p w; sibling groups use the rest."""
        return self.device_rate * self.layout.ranks_per_node

    @property
    def ring_rate(self) -> float:
        if self.layout.num_nodes == 1:
            return self.intra_rate
        return self.group_rate if self.layout.ranks_per_node == 1 else min(self.intra_rate, self.group_rate)

    @property
    def slowest_latency(self) -> float:
        return self.intra.latency_seconds if self.layout.num_nodes == 1 else self.inter.latency_seconds

    def protocols(self, algorithm: nccl.Algorithm) -> Iterator[tuple[nccl.Protocol, nccl.Protocol]]:
        """Yield each protocol on the links (inside, between) nodes; an unused link takes the other's factors."""
        if not self.by_nccl:
            yield nccl.PLAIN, nccl.PLAIN
            return
        intra = self.inter if self.layout.ranks_per_node == 1 else self.intra
        inter = self.intra if self.layout.num_nodes == 1 else self.inter
        for name in nccl.protocols((intra, inter)):
            yield nccl.protocol(algorithm, name, intra), nccl.protocol(algorithm, name, inter)


def _path(kind: Kind, layout: Layout, group: Group, num_nodes: int, per_node: int, intra: Link, inter: Link) -> _Path:
    intra, inter = _for_kind(intra, kind), _for_kind(inter, kind)
    sharers = per_node if inter.shared_by_node else 1
    contention = _contention(layout, num_nodes, per_node, inter)
    alone = layout.ranks_per_node == 1
    links = [inter] if alone else [intra] if layout.num_nodes == 1 else [intra, inter]
    by_nccl = all(nccl.drives(link) for link in links)
    share = 1.0 if alone else nccl.mesh_share(intra, kind, group.size, group.stride, per_node)
    return _Path(
        size=group.size,
        layout=layout,
        intra=intra,
        inter=replace(inter, latency_seconds=inter.latency_seconds * contention),
        intra_rate=intra.achievable_bytes_per_second * share,
        device_rate=inter.achievable_bytes_per_second / sharers / contention,
        startup_seconds=max(link.startup_seconds for link in links),
        by_nccl=by_nccl,
        own_step=nccl.own_step(kind) if by_nccl else 0.0,
    )


def _contention(layout: Layout, num_nodes: int, per_node: int, inter: Link) -> float:
    """Return g. A node with one interface has one rail, which all of its groups use."""
    share = 1.0 if inter.shared_by_node else layout.ranks_per_node / per_node
    return 1 + inter.contention_per_doubling * math.log2(num_nodes) * share


def _for_kind(link: Link, kind: Kind) -> Link:
    """Return the link with its factors for `kind` applied."""
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


def _ring_hops(path: _Path, inside: nccl.Protocol, between: nccl.Protocol) -> float:
    """Return the seconds of one pass around the ring: (n - N) hi + (N - 1) he (NCCL's tuning.cc)."""
    inter_hops = path.layout.num_nodes - 1
    intra_seconds = (path.size - 1 - inter_hops) * path.intra.latency_seconds * inside.hop
    return intra_seconds + inter_hops * path.inter.latency_seconds * between.hop


def _tree_hops(path: _Path, inside: nccl.Protocol, between: nccl.Protocol) -> float:
    """Return the seconds of latency from the leaves to the root.

    NCCL runs a chain over the ranks of a node, (p - 1) hi, then a binary tree over nodes, log2(N) he. Other libraries
    run a binary tree in both places.
    """
    per_node = path.layout.ranks_per_node
    depth = per_node - 1 if path.by_nccl else _levels(per_node)
    intra_seconds = depth * path.intra.latency_seconds * inside.hop
    return intra_seconds + _levels(path.layout.num_nodes) * path.inter.latency_seconds * between.hop


def _rings(passes: int, path: _Path) -> Iterator[Line]:
    """Price all_gather and reduce_scatter in one pass, all_reduce in two (Thakur et al., sections 4.1, 4.2, 4.5):

    s0 + passes ((n-N) hi + (N-1) he) + B max((passes (n-1) + e) / n / i, passes (n-1)/n / (p w))
    """
    layout, size = path.layout, path.size
    for inside, between in path.protocols("ring"):
        steps = passes * (size - 1)
        inside_node = (steps + path.own_step) / size / (path.intra_rate * inside.rate)
        leaving = steps / size / (path.group_rate * between.rate)
        per_byte = leaving if layout.ranks_per_node == 1 else inside_node
        if layout.num_nodes > 1:
            per_byte = max(per_byte, leaving)
        startup = path.startup_seconds * max(inside.startup, between.startup)
        yield startup + passes * _ring_hops(path, inside, between), per_byte


def _trees(path: _Path) -> Iterator[Line]:
    """Price all_reduce to the root and back (NCCL's double binary tree), q levels of nodes above a chain of p ranks:

    s0 + 2 hops + 2 B / r + 2 C ((p-1) / i + q / (p w)),  C = min(B, chunk_bytes)

    A rank forwards a chunk of C bytes, of all channels together, once it has the whole chunk. So the tree fills before
    bytes flow at the rate r. Protocols that forward single words do not have this delay.
    """
    levels = _levels(path.layout.num_nodes)
    for inside, between in path.protocols("tree"):
        rate = path.ring_rate * min(inside.rate, between.rate)
        startup = path.startup_seconds * max(inside.startup, between.startup)
        fixed = startup + 2 * _tree_hops(path, inside, between)
        fill = 0.0
        if path.by_nccl and not inside.streams:
            chain = (path.layout.ranks_per_node - 1) / (path.intra_rate * inside.rate)
            fill = 2 * (chain + levels / (path.group_rate * between.rate))
        yield fixed, 2 / rate + fill
        yield fixed + nccl.chunk_bytes() * fill, 2 / rate


def _switch(path: _Path) -> Iterator[Line]:
    """Price all_reduce summed in the switch, each byte once up and once down (NCCL's NVLS, NVLSTree), q levels of
    nodes:

    s0 + 2 hi + 2 q he + max(B / i, x B / (p w)) + 2 q C / (p w),  C = min(B, chunk_bytes)

    NVLS has one hop for both ways inside a node, where it reaches ``switch_rate`` of i (``machines/nccl.toml``). x
    counts what the busiest node sends. With two nodes it sends every byte once. With three or more it sends every byte
    twice: a node inside one of the two binary trees sends to its parent and two children, half of B each, and is a leaf
    of the other tree (NCCL allows two nodes twice the bus bandwidth, and aws-ofi-nccl halves it beyond). Chunks as in
    `_trees`.
    """
    layout = path.layout
    if not path.intra.in_network_reduction or layout.ranks_per_node == 1:
        return
    levels = _levels(layout.num_nodes)
    inside = nccl.switch_hop(path.intra) if path.by_nccl else 2.0
    between = nccl.switch_hop(path.inter) if path.by_nccl and levels else 1.0
    hops = path.intra.latency_seconds * inside + 2 * levels * path.inter.latency_seconds * between
    within = 1 / (path.intra_rate * (nccl.switch_rate() if path.by_nccl else 1.0))
    leaving = min(layout.num_nodes - 1, 2) / path.group_rate
    fill = 2 * levels / path.group_rate if path.by_nccl else 0.0
    yield path.startup_seconds + hops, max(within, leaving) + fill
    yield path.startup_seconds + hops + nccl.chunk_bytes() * fill, max(within, leaving)


def _all_to_all(path: _Path) -> Iterator[Line]:
    """Price sending B/n to every other rank, over NVLink and network at once (Thakur et al., section 4.3, pairwise):

    (p-1) hi + [he + (n-p) m] + max((p-1+e)/n B / i, (n-p)/n B / w)

    m: the host hands messages to the network one by one, and NCCL runs all of them at once (``machines/nccl.toml``,
    message_microseconds). Other libraries wait for each message, (n-p) he, and use Bruck's algorithm for small
    tensors: log2(n) messages of B/2.
    """
    size, per_node = path.size, path.layout.ranks_per_node
    remote = size - per_node
    inside = (per_node - 1 + path.own_step) / size / path.intra_rate if per_node > 1 else 0.0
    between = remote / size / path.device_rate
    hop = path.inter.latency_seconds
    waiting = hop + remote * nccl.message_seconds() if path.by_nccl and remote else remote * hop
    yield path.startup_seconds + (per_node - 1) * path.intra.latency_seconds + waiting, max(inside, between)
    if not path.by_nccl:
        rate = path.intra_rate if path.layout.num_nodes == 1 else min(path.intra_rate, path.device_rate)
        yield path.startup_seconds + _levels(size) * path.slowest_latency, _levels(size) / 2 / rate


def _broadcast(path: _Path) -> Iterator[Line]:
    """Price NCCL's pipelined chain, s0 + (n-1) hops + B / r. Other libraries also have a binomial tree,
    s0 + log2(n) (hop + B / r) (Thakur et al., section 4.4)."""
    for inside, between in path.protocols("ring"):
        startup = path.startup_seconds * max(inside.startup, between.startup)
        rate = path.ring_rate * min(inside.rate, between.rate)
        yield startup + _ring_hops(path, inside, between), 1 / rate
    if not path.by_nccl:
        yield path.startup_seconds + _tree_hops(path, nccl.PLAIN, nccl.PLAIN), _levels(path.size) / path.ring_rate


def _p2p_rate(group: Group, path: _Path, per_node: int) -> float:
    """Return the bytes per second of the slowest pair: of a device's own interface, or of its share of the node's
    interface among the devices that send between nodes."""
    if path.layout.num_nodes == 1:
        return path.intra_rate
    return path.device_rate * per_node / min(group.stride, per_node) if path.inter.shared_by_node else path.device_rate
